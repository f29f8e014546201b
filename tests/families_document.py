"""docs/families.md, made of the tables that the tests of families run by: `python tests/families_document.py` writes
it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import gguf

from gguf_files import ARCHITECTURES as WRITTEN
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
* GGUF: the architecture (`general.architecture`) of the GGUF files that are read. `tests/test_gguf_models.py` compares
  a tiny file of each with transformers' eager model.

| model type | name | decoder | prefetch by routers | MTP head | GGUF |
|---|---|---|---|---|---|
"""

_LLAMA_CPP = """
## GGUF files beside llama.cpp

The gguf package has no names for `bailingmoe3`, `deepseek4`, `glm5-next`, `granite_swa` and `minimax-m3`: the tests
write them from tables of their own. Files of tiny random models of these but `deepseek4`, and of `dots1` and `phimoe`,
were also written by llama.cpp's converter in F32 (llama-cpp-python 0.3.36, 2026-11-26). The converter and the tests
write the same tensors, bit for bit, and the same entries, but for a base of positions, which GLM-5 Next does not have.

transformers' eager model, tiermoe and llama.cpp read 96 tokens of two of them at once; the largest differences from
transformers, as shares of the largest logit:

| architecture | tiermoe | llama.cpp, float32 | llama.cpp, flash attention |
|---|--:|--:|--:|
| `granite_swa` | 7e-7 | 5e-7 | 3e-4 |
| `minimax-m3` | 5e-7 | no sparse attention | 8e-2, median 3e-4 |

llama.cpp rounds to 16 bits in flash attention, without which it computes no sparse attention. For one token its indexer
chose another block of MiniMax-M3, where the scores of two blocks were 0.002 apart: 8e-2 is that token's, the five after
it differ by up to 7e-3, all others by up to 1e-3. The likeliest tokens were the same at all places.

llama.cpp's converter writes which of Granite's layers have positions where the config has `no_rope_layers`. It does not
read `layer_rope_theta`, so that a file of such a config has positions in all layers.

Files of Ling 3.0 limit the gates of experts in some layers, as the published config does. llama.cpp applies the limits;
transformers' and the published code do not, and tiermoe does as they do. Files of Ling 3.0 that lead to queries by two
matrices, or are of the model that reads pictures, are refused: transformers does not have these models.

llama.cpp computes Phi-MoE with root mean square norms, a softmax router and the scale of positions that the file has
(1.19 for Phi-3.5-MoE). tiermoe computes it as transformers does, with layer norms, a sparse mixer and the published
scale (1.243), which no entry has.
"""


_ARCHITECTURES = {
    model_type: each if isinstance(each, str) else gguf.MODEL_ARCH_NAMES[each] for model_type, each in WRITTEN.items()
}
_ARCHITECTURES["granitemoe"] = _ARCHITECTURES["granitemoeshared"]  # without a shared expert


def document() -> str:
    """The text of docs/families.md."""
    rows = [_row(model_type) for model_type in sorted({*CONFIGS, *FAMILIES})]
    larger = [f"| `{model_type}` | `{LARGER[model_type][0]}` |" for model_type in sorted(LARGER)]
    refused = [f"| `{model_type}` | {reason} |" for model_type, reason in sorted(REFUSED.items())]
    return (
        _HEAD
        + _lines(rows)
        + _LLAMA_CPP
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
    files = f"`{_ARCHITECTURES[model_type]}`" if model_type in _ARCHITECTURES else "no"
    return f"| `{model_type}` | {family.name} | {decoder} | {forecasts} | {drafts} | {files} |"


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    FILE.write_text(document())
