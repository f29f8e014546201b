"""Widen a Qwen3-MoE checkpoint without changing its function: same routing, same logits, real sizes.

    python -m benchmarks.widen models/stories-7m OUT --m 16 [--profiles]

Every unit of the residual stream is copied ``m`` times and every unit inside an expert ``mi`` times. Why the
function stays the same, layer by layer:

* An RMS norm divides by the mean of squares, which copies leave as it is: copied inputs give copied outputs.
* A matrix whose inputs are copied ``k`` times and which is divided by ``k`` gives the original's outputs:
  the sum runs over ``k`` equal terms. Its rows are copied wherever its outputs are to be copied.
* The attention heads are copied ``m`` times as whole heads, queries and keys alike, so that every copy
  attends as the original; grouped queries keep their group because whole groups are repeated. The output
  projection reads ``m`` equal copies and is divided by ``m``.
* The router and the output layer read copied inputs and are divided by ``m``: their logits stay what they
  were, so the same experts run with the same weights.

``m`` and ``mi`` are powers of two, so that the division only changes the exponent: weights keep their
significant bits in bfloat16, and logits differ by the rounding of longer sums alone. Hit rates, traces and
perplexity measured on the widened model are therefore those of the trained one, at the sizes and costs of a
large one. The new weights are as redundant as they look: they stand for speed and memory, not for quality.

--profiles gives OUT the calibrations of the model that hold for it too: all but Fate's, whose windows are of an
expert's bytes (`tiermoe calibrate OUT --for fate`).
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME as INDEX

from benchmarks.rounds import parser_of
from tiermoe.lab.measure.calibrate import CALIBRATORS
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.prepare_store import store_root
from tiermoe.offload.profiles import FOLDER, profile_path, read_profile, to_json

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)


def copy_rows(weight: torch.Tensor, times: int) -> torch.Tensor:
    """(R, ...) to (times * R, ...): the outputs are copied."""
    return weight.repeat(times, *[1] * (weight.dim() - 1))


def share_columns(weight: torch.Tensor, times: int) -> torch.Tensor:
    """(R, C) to (R, times * C): each copy of an input contributes an equal share."""
    return weight.repeat(1, times) / times


class Source:
    """The tensors of a checkpoint directory, sharded or not."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        index = directory / INDEX
        self._map: dict[str, str] | None = json.loads(index.read_text())["weight_map"] if index.exists() else None

    def __call__(self, name: str) -> torch.Tensor:
        shard = self._map[name] if self._map else "model.safetensors"
        with safe_open(self.directory / shard, "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor


def widen_dense(source: Source, config: dict[str, Any], m: int) -> dict[str, torch.Tensor]:
    """Embedding, last norm and output layer, which is divided and so no longer the embedding."""
    embedding = source("model.embed_tokens.weight")
    output = embedding if config.get("tie_word_embeddings") else source("lm_head.weight")
    return {
        "model.embed_tokens.weight": embedding.repeat(1, m),
        "model.norm.weight": copy_rows(source("model.norm.weight"), m),
        "lm_head.weight": share_columns(output, m),
    }


def widen_layer(source: Source, config: dict[str, Any], layer: int, m: int, mi: int) -> dict[str, torch.Tensor]:
    """All tensors of one layer."""
    prefix = f"model.layers.{layer}."
    wide = {}
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        wide[prefix + name] = copy_rows(source(prefix + name), m)
    for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
        wide[prefix + name] = source(prefix + name)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        key = f"{prefix}self_attn.{name}.weight"
        wide[key] = share_columns(copy_rows(source(key), m), m)
    gate = f"{prefix}mlp.gate.weight"
    wide[gate] = share_columns(source(gate), m)
    for expert in range(config.get("num_experts", config.get("num_local_experts"))):
        for name, rows, columns in (("gate_proj", mi, m), ("up_proj", mi, m), ("down_proj", m, mi)):
            key = f"{prefix}mlp.experts.{expert}.{name}.weight"
            wide[key] = share_columns(copy_rows(source(key), rows), columns)
    return wide


def widen_config(config: dict[str, Any], m: int, mi: int) -> dict[str, Any]:
    return {
        **config,
        "hidden_size": config["hidden_size"] * m,
        "intermediate_size": config["intermediate_size"] * mi,
        "moe_intermediate_size": config["moe_intermediate_size"] * mi,
        "num_attention_heads": config["num_attention_heads"] * m,
        "num_key_value_heads": config["num_key_value_heads"] * m,
        "tie_word_embeddings": False,
    }


def check(config: dict[str, Any], m: int, mi: int) -> None:
    """Refuse what would not keep its function."""
    for name, value in (("m", m), ("mi", mi)):
        if value < 1 or value & (value - 1):
            raise ValueError(f"--{name} {value} is not a power of two: dividing by it would round the weights")
    if config.get("model_type") != "qwen3_moe":
        raise ValueError(f"only qwen3_moe checkpoints can be widened, not {config.get('model_type')!r}")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError("every layer must be a mixture of experts")
    if config.get("attention_bias"):
        raise ValueError("attention biases are not widened")


def widen(directory: Path, out: Path, m: int, mi: int) -> None:
    """Write the checkpoint ``directory``, widened, to ``out``: one shard per layer and one for the rest.

    Memory: one layer. Raises ValueError, before anything is written, where the function would change.
    """
    config = json.loads((directory / "config.json").read_text())
    check(config, m, mi)
    out.mkdir(parents=True, exist_ok=True)
    source, index = Source(directory), {}
    total = 0

    def write(shard: str, wide: dict[str, torch.Tensor]) -> None:
        nonlocal total
        save_file({name: weight.contiguous() for name, weight in wide.items()}, out / shard, {"format": "pt"})
        index.update(dict.fromkeys(wide, shard))
        total += sum(weight.numel() * weight.element_size() for weight in wide.values())

    write("model-dense.safetensors", widen_dense(source, config, m))
    for layer in range(config["num_hidden_layers"]):
        write(f"model-layer-{layer:03d}.safetensors", widen_layer(source, config, layer, m, mi))
    for name in TOKENIZER_FILES:
        if (directory / name).exists():
            shutil.copyfile(directory / name, out / name)
    (out / "config.json").write_text(json.dumps(widen_config(config, m, mi), indent=1) + "\n")
    (out / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}) + "\n")


def give_profiles(directory: Path, out: Path) -> None:
    """The calibrations of ``directory`` but Fate's, for the checkpoint ``out``."""
    narrow, wide = (inspect_model(path, path.name) for path in (directory, out))
    store = store_root(wide, None)
    (store / FOLDER).mkdir(parents=True, exist_ok=True)
    for path in (store_root(narrow, None) / FOLDER).glob("*.json"):
        if path.stem in CALIBRATORS.keys() - {"fate"}:
            profile = replace(read_profile(path, None, ""), fingerprint=wide.checkpoint.fingerprint())
            profile_path(store, path.stem).write_bytes(to_json(profile))


def main() -> None:
    parser = parser_of(__doc__, measures=False)
    parser.add_argument("source", type=Path, help="directory of a Qwen3-MoE checkpoint")
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--m", type=int, default=16, help="copies of hidden units and heads (default 16)")
    parser.add_argument("--mi", type=int, help="copies of an expert's units (default: as --m)")
    parser.add_argument("--profiles", action="store_true", help="give OUT the model's calibrations")
    args = parser.parse_args()
    try:
        widen(args.source, args.out, args.m, args.mi or args.m)
        if args.profiles:
            give_profiles(args.source, args.out)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
