"""Gemma 4 with experts as GGUF, by the rules of llama.cpp's converter (`Gemma4Model`)."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

from gguf_names import name_in_file

ARCHITECTURE = "gemma4"
_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, 8)
WHOLE = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
"""Ends of parameters that are one tensor of the file, and not of other families' files → their names in a block."""


def name_of(path: str) -> str:
    """The name in the file of a parameter of transformers' model."""
    return name_in_file(path, WHOLE, _NAMES)


def gemma4_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`Gemma4Model.set_gguf_parameters`."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    full = config["per_layer_config"][str(slides.index(False))]
    heads = config["num_key_value_heads"]
    if "num_key_value_heads" in full:
        writer.add_head_count_kv([heads if each else full["num_key_value_heads"] for each in slides])
    else:
        writer.add_head_count_kv(heads)
    if cap := config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(cap)
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(full["head_dim"])
    writer.add_value_length(full["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_rope_dimension_count(full["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])


def add_shares(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`Gemma4Model.generate_extra_tensors`."""
    kinds = config["layer_types"]
    columns = config["per_layer_config"][str(kinds.index("full_attention"))]["head_dim"]
    turned = int(columns * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    values = [1.0] * turned + [1e30] * (columns // 2 - turned)
    writer.add_tensor("rope_freqs.weight", np.array(values, dtype=np.float32))
