"""docs/families.md, made of the tables that the tests of families run by: `python tests/families_document.py` writes
it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from small_families import FAMILIES, LARGER
from tiermoe.model.families.mtp_heads import HEADS
from tiermoe.model.families.table import ARCHITECTURES, REFUSED, family_of
from tiny import CONFIGS

FILE = Path(__file__).parent.parent / "docs" / "families.md"

_HEAD = """# Model families

Written by `python tests/families_document.py` from the tables that the tests run by, and checked by
`tests/test_families.py`. Each family in the first table is compared with transformers' eager experts on a tiny random
checkpoint: logits, greedy tokens, and prefetching where its routers can be asked.

transformers 5.23 does not have DeepSeekMoE (`deepseek`). tiermoe brings a class of it, made of transformers' Llama and
Qwen2-MoE, and `tests/test_deepseek.py` compares it with the published equations. No code of a checkpoint runs.

Any other causal family of transformers 5.23 whose experts go through its experts interface is found in the same way; it
has no test here.

* decoder: *own* is tiermoe's, on a CPU; *transformers* is transformers' modelling code around tiermoe's experts.
* prefetch: whether a router can be asked about another layer's input (`--set prefetch=next-gate` and its kin). Presets
  that predict from what was used need no router.
* MTP head: whether the model's own head drafts, where a checkpoint has one (`--draft mtp`).

| model type | name | decoder | prefetch by routers | MTP head |
|---|---|---|---|---|
"""


def document() -> str:
    """The text of docs/families.md."""
    rows = [_row(model_type) for model_type in sorted({*CONFIGS, *FAMILIES})]
    larger = [f"| `{model_type}` | `{LARGER[model_type][0]}` |" for model_type in sorted(LARGER)]
    refused = [f"| `{model_type}` | {reason} |" for model_type, reason in sorted(REFUSED.items())]
    return (
        _HEAD
        + _lines(rows)
        + "\n## Models that read more than text\n\nTheir text part runs, and `tiermoe show` and `plan` say what is not "
        "read. Weights of the other parts are\nnot loaded.\n\n| model type | text part |\n|---|---|\n"
        + _lines(larger)
        + "\n## Refused by name\n\n| model type | because |\n|---|---|\n"
        + _lines(refused)
    )


def _row(model_type: str) -> str:
    family = family_of(model_type)
    decoder = "own" if model_type in ARCHITECTURES else "transformers"
    forecasts, drafts = ("yes" if has else "no" for has in (family.forecasts, model_type in HEADS))
    return f"| `{model_type}` | {family.name} | {decoder} | {forecasts} | {drafts} |"


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    FILE.write_text(document())
