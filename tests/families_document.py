"""docs/families.md, made of the tables that the tests of families run by: `python tests/families_document.py` writes
it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gguf_files import ARCHITECTURES as WRITTEN
from gguf_files import called
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

The gguf package has no names for `bailingmoe3`, `deepseek4`, `glm5-next`, `granite_swa`, `hy_v3`, `hy_v4`, `mellum`,
`minimax-m3` and `qwen4exp`: the tests write them from tables of their own. Of these but `deepseek4` and `hy_v4`, and of
`deepseek32`, `dots1`, `gemma4`, `glm-dsa` and `phimoe`, files of tiny random models were also written by llama.cpp's
converter in F32 (llama-cpp-python 0.3.36, 2026-11-26). The converter and the tests write the same tensors, bit for bit,
and the same entries, but for a base of positions, which GLM-5 Next does not have. The file of `hy_v4` is the tests'
own, with 10 chosen positions.

transformers' eager model, tiermoe and llama.cpp read 96 tokens at once; the largest differences from transformers, as
shares of the largest logit:

| architecture | tiermoe | llama.cpp, float32 | llama.cpp, flash attention |
|---|--:|--:|--:|
| `granite_swa` | 7e-7 | 5e-7 | 3e-4 |
| `hy_v4` | 8e-7 | 1e-6 | 2e-2, median 2e-4 |
| `minimax-m3` | 5e-7 | no sparse attention | 8e-2, median 3e-4 |
| `qwen4exp`, all blocks chosen | 3e-6 | 8e-6 | 1e-1, median 8e-5 |
| `qwen4exp`, 2 blocks of 4 positions | 3e-6 | 8e-1, median 2e-1 | 8e-1, median 2e-1 |
| `hy_v3` | 1e-6 | 2e-6 | 6e-1, median 2e-3 |
| `gemma4` | 2e-6 | 2e-3 | 7e-3 |
| `mellum`, one base | 5e-7 | 1e-6 | 1e-1, median 3e-4 |
| `mellum`, two bases | 5e-7 | 4e-1 | 4e-1 |
| `deepseek32` | 1e-6 | 1e-6 | 1e-3 |
| `glm-dsa` | 1e-6 | 8e-6 | 2e-3 |

llama.cpp rounds to 16 bits in flash attention, without which it computes no sparse attention of MiniMax-M3. For one
token its indexer chose another block, where the scores of two blocks were 0.002 apart: 8e-2 is that token's, the five
after it differ by up to 7e-3, all others by up to 1e-3. For Granite and MiniMax the likeliest tokens were the same at
all places; for Qwen3.8 with two blocks 39 of 96 were others.

With flash attention one token of `hy_v3` differs by 6e-1, all others by up to 2e-2; two likeliest tokens of 96 are
others. llama.cpp takes the GELU of Gemma 4 from a table of 16-bit values. Its code of Mellum 2 reads the base of layers
with a window (`rope.freq_base_swa`) and rotates by the others' base: 17 likeliest tokens of 96 are others. With one
base for all it computes what transformers does.

Files of `deepseek32`, `glm-dsa` and, of GLM-4.7-Flash, `deepseek2` were compared in the same way, with MTP heads and 40
tokens, of which indexers chose 6: the tensors are the same, bit for bit, and the heads' drafts differ from
transformers' by up to 1e-6. The gguf package names `deepseek32`'s tensors as `glm-dsa`'s. The converter does not write
what GLM-4.7-Flash's routers score by. llama.cpp knows that model by its number of layers, which the tiny one does not
have; tiermoe takes sigmoid where routers have corrections.

llama.cpp's converter writes which of Granite's layers have positions where the config has `no_rope_layers`. It does not
read `layer_rope_theta`, so that a file of such a config has positions in all layers.

The converter writes the matrices of Hunyuan 4 as they are published. llama.cpp rotates neighbouring columns of a head,
transformers those of both halves, of the same matrices: one of both is wrong. tiermoe reads a GGUF file as
llama.cpp does, and safetensors as transformers does; the tests' file has its rows in llama.cpp's order. The norms
inside of latent attention have an epsilon of 1e-6 in transformers and tiermoe, and the config's in llama.cpp: above it
is 1e-6 too.

Where Qwen3.8's indexer chooses blocks of r positions, transformers attends to their `indexer_top_k` positions and to
those behind the last whole block. llama.cpp attends to `indexer_top_k + r - 1` positions whatever the number behind
that block (`src/models/qwen4exp.cpp`). With blocks of one position both attend to as many: the median difference was
1e-6. llama.cpp's converter reads a config by transformers where that has the model, finds no layer that is called
`full_attention`, and writes that blocks have 0 positions. llama.cpp attends to all positions then; tiermoe refuses such
a file.

Files of Ling 3.0 limit the gates of experts in some layers, as the published config does. llama.cpp applies the limits;
transformers' and the published code do not, and tiermoe does as they do. Files of Ling 3.0 that lead to queries by two
matrices, or are of the model that reads pictures, are refused: transformers does not have these models.

llama.cpp computes Phi-MoE with root mean square norms, a softmax router and the scale of positions that the file has
(1.19 for Phi-3.5-MoE). tiermoe computes it as transformers does, with layer norms, a sparse mixer and the published
scale (1.243), which no entry has.
"""


_ARCHITECTURES = {model_type: called(model_type) for model_type in WRITTEN}
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
    forecasts, drafts = ("yes" if has else "no" for has in (family.forecasts, family.mtp_head is not None))
    files = f"`{_ARCHITECTURES[model_type]}`" if model_type in _ARCHITECTURES else "no"
    return f"| `{model_type}` | {family.name} | {decoder} | {forecasts} | {drafts} | {files} |"


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    FILE.write_text(document())
