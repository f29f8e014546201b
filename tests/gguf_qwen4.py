"""Qwen3.8 as GGUF, by the rules of llama.cpp's converter (`Qwen4ExpTextModel`). The gguf package does not have it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
from gguf import GGUFValueType
from torch import Tensor
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextConfig, Qwen4ExpTextNGramEmbedding

ARCHITECTURE = "qwen4exp"
TABLE = "per_layer_token_embd.weight"
_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35MOE, 8)
_MIXER = {"hc_norm": "norm", "input_mix_weight_down": "down", "input_mix_weight_up": "up"}
_CONNECTION = {**_MIXER, "block_inject_weight": "inject"}
_FEATURES = {
    "key_proj": "key", "value_proj": "value", "norm_key": "norm_key", "norm_query": "norm_query",
    "norm_conv": "norm_conv", "conv1d": "conv1d",
}  # fmt: skip
_OWN = {
    **{f"hyper_connection_mixer.{name}": f"output_hc_{tensor}" for name, tensor in _MIXER.items()},
    **{f"attn_hyper_connection.{name}": f"hc_attn_{tensor}" for name, tensor in _CONNECTION.items()},
    **{f"mlp_hyper_connection.{name}": f"hc_ffn_{tensor}" for name, tensor in _CONNECTION.items()},
    **{f"ple.{name}": f"ple_{tensor}" for name, tensor in _FEATURES.items()},
    **{f"self_attn.indexer.{part}_layernorm": f"indexer.{part}_norm" for part in "qk"},
}


def name_of(path: str) -> str:
    """The name in the file of a parameter of transformers' model."""
    module = path.removesuffix(".weight")
    own = next((tensor for name, tensor in _OWN.items() if module.endswith(name)), None)
    if own is None:
        found = _NAMES.get_name(path, (".weight", ".bias"))
        assert found is not None, path
        return str(found)
    return f"{own}.weight" if own.startswith("output_") else f"blk.{path.split('.')[2]}.{own}.weight"


def is_changed(path: str) -> bool:
    """Whether a parameter is not one tensor of its own shape and name."""
    return path.endswith(("index_qk_proj.weight", "ngram_embedding.weight", "ple.conv1d.weight"))


def changed(path: str, value: Tensor, config: Any) -> Iterator[tuple[str, tuple[Tensor, ...], tuple[int, ...]]]:
    """As `gguf_files._tensors`, of what `Qwen4ExpTextModel.modify_tensors` changes."""
    if path.endswith("ngram_embedding.weight"):
        yield TABLE, (value,), tuple(value.shape)
    elif path.endswith("conv1d.weight"):
        yield name_of(path), (value,), tuple(value.squeeze(1).shape)
    else:
        rows = config.indexer_n_heads * config.indexer_head_dim
        for part, own in zip("qk", (value[:rows], value[rows:]), strict=True):
            yield f"blk.{path.split('.')[2]}.indexer.{part}_proj.weight", (own,), tuple(own.shape)


def qwen4_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`Qwen4ExpTextModel.set_gguf_parameters`, beside what Qwen3.5 has."""
    linear = [kind == "linear_attention" for kind in config["layer_types"]]
    numbers = {
        "hyper_connection.count": config["hc_count"],
        "hyper_connection.low_rank": config["hc_lowrank"],
        "attention.indexer.head_count": config["indexer_n_heads"],
        "attention.indexer.key_length": config["indexer_head_dim"],
        "attention.indexer.top_k": config["indexer_budget"],
    }
    ratios = [0 if each else config["indexer_compress_ratio"] for each in linear]
    writer.add_array(f"{ARCHITECTURE}.attention.compress_ratios", ratios)
    writer.add_array(f"{ARCHITECTURE}.attention.recurrent_layers", linear)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    if config["ple_layer_ids"]:
        (layer,) = config["ple_layer_ids"]
        table = Qwen4ExpTextNGramEmbedding(Qwen4ExpTextConfig(**config), config["ple_embed_dim"], layer - 1)
        numbers |= {
            "ple.ngram_size": config["ngram_size"],
            "ple.heads_per_ngram": config["heads_per_ngram"],
            "ple.conv_kernel": config["ple_conv_kernel_size"],
            "ple.eos_token_id": config["eos_token_id"],
            "embedding_length_per_layer_input": table.ngram_embedding.embedding_dim,
        }
        writer.add_array(f"{ARCHITECTURE}.ple.layers", [layer - 1])
        for key, values in (
            ("layer_multipliers", table.layer_multipliers),
            ("head_offsets", table.ngram_heads_offsets),
            ("head_vocab_sizes", table.ngram_heads_vocab_sizes),
        ):
            name = f"{ARCHITECTURE}.ple.{key}"
            writer.add_key_value(name, values.tolist(), GGUFValueType.ARRAY, sub_type=GGUFValueType.UINT64)
    for key, value in numbers.items():
        writer.add_uint32(f"{ARCHITECTURE}.{key}", value)
