"""docs/families.md, made of the tables that the tests of families run by: `python tests/families_document.py` writes
it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gguf_files import architectures
from small_families import FAMILIES, LARGER
from tiermoe.model.families import REFUSED, family_of
from tiny import CONFIGS, OWN_DECODERS

FILE = Path(__file__).parent.parent / "docs" / "families.md"

_HEAD = """# Model families

Written by `python tests/families_document.py` from the tables that the tests run by, and checked by
`tests/test_families.py`. Each family in the first table is compared with transformers' eager experts on a tiny random
checkpoint: logits, greedy tokens, and prefetching where its routers can be asked.

transformers does not have DeepSeekMoE (`deepseek`). tiermoe brings a class of it, made of transformers' Llama and
Qwen2-MoE, and `tests/test_deepseek.py` compares it with the published equations. No code of a checkpoint runs.

Any other causal family of transformers whose experts go through its experts interface is found in the same way; it has
no test here. A family that is newer than the transformers beside it is refused in a line that says so.

* decoder: *own* is tiermoe's, on a CPU; with *on a GPU too* there as well. *transformers* is transformers' modelling
  code around tiermoe's experts, and runs the other families on a GPU.
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

The tests' files have the names, shapes, entries and order of elements that llama.cpp's converter (llama-cpp-python
0.3.36) wrote of the same small models: `tests/golden`. By hand are the order of columns in `hy_v4`, the experts of
`deepseek4`, which the converter takes in MXFP4 alone, and the scale of temperatures of `mistral4`, which it writes of
checkpoints in Mistral's own form. Logits were compared with llama.cpp's:
`notebook/2026-11-26-gguf-beside-llama-cpp.md` has the figures. The programs differ here:

* Hunyuan 4: llama.cpp rotates neighbouring columns of a head, transformers 5.23 those of both halves, of the same
  matrices. tiermoe reads a GGUF file as llama.cpp does, and safetensors as transformers does.
* Ling 3.0: llama.cpp applies the limits that a file sets to the gates of experts. tiermoe does not, like
  transformers' and the published code. Files with queries by two matrices, or of the model that reads pictures, are
  refused.
* Mellum 2 with two bases of positions: llama.cpp rotates layers with a window by the others' base.
* MiMo-V2-Flash: llama.cpp attends to one position less than the published window.
* Phi-MoE: llama.cpp has root mean square norms, a softmax router and the scale of the file (1.19 for Phi-3.5-MoE).
  tiermoe has layer norms, a sparse mixer and the published scale (1.243), as transformers.
* Qwen3.8: transformers and tiermoe attend to `indexer_top_k` positions and to those after the last whole block,
  llama.cpp to `indexer_top_k + r - 1` positions, r being a block's. llama.cpp's converter writes blocks of 0 positions
  if its transformers has the model; tiermoe refuses such a file.
* GraniteMoE: llama.cpp's converter does not read `layer_rope_theta`: a file of such a config has positions in all
  layers.
"""


_ARCHITECTURES = architectures()
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
    decoder = "own" if model_type in OWN_DECODERS else "transformers"
    decoder += ", on a GPU too" if family.on_gpu else ""
    forecasts, drafts = ("yes" if has else "no" for has in (family.forecasts, family.mtp_head is not None))
    files = f"`{_ARCHITECTURES[model_type]}`" if model_type in _ARCHITECTURES else "no"
    return f"| `{model_type}` | {family.name} | {decoder} | {forecasts} | {drafts} | {files} |"


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    FILE.write_text(document())
