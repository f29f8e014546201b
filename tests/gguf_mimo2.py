"""MiMo-V2-Flash as GGUF, by the rules of llama.cpp's converter (`MimoV2Model`). Layers with a window have queries, keys
and values in one tensor, as MiMo-V2.5 has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
from torch import Tensor

_HEAD = {
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "shared_head.norm": "layer_output_norm",
}


def head_name(path: str) -> str | None:
    """The name in the file of a parameter beside an MTP head's layer; None of other parameters."""
    layer, _, name = path.removeprefix("model.layers.").partition(".")
    called = _HEAD.get(name.removesuffix(".weight"))
    return called and f"blk.{layer}.{called}.weight"


def mimo_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`MimoV2Model.set_gguf_parameters`."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    full, windowed = (config["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    writer.add_rope_freq_base_swa(windowed["rope_theta"])
    writer.add_head_count_kv([config["num_key_value_heads"] * (2 if each else 1) for each in slides])
    writer.add_sliding_window(config["sliding_window"] - 1)  # transformers adds 1 to what is published
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["v_head_dim"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_rope_dimension_count(int(config["head_dim"] * full["partial_rotary_factor"]))
    writer.add_float32("mimo2.attention.value_scale", config["attention_value_scale"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])


def is_joined(path: str, config: Any) -> bool:
    """Whether a parameter is one of three in a tensor."""
    of_attention = path.endswith(tuple(f"self_attn.{name}_proj.weight" for name in "qkv"))
    return of_attention and config.layer_types[int(path.split(".")[2])] == "sliding_attention"


def joined(path: str, state: dict[str, Any]) -> Iterator[tuple[str, tuple[Tensor, ...], tuple[int, ...]]]:
    """The one tensor of queries, keys and values of a layer, where it comes to the first of them."""
    if "q_proj" in path:
        parts = tuple(state[path.replace("q_proj", f"{name}_proj")].data for name in "qkv")
        rows = sum(part.shape[0] for part in parts)
        yield f"blk.{path.split('.')[2]}.attn_qkv.weight", parts, (rows, parts[0].shape[1])
