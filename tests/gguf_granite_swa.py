"""GraniteMoE with sliding windows as GGUF, by the rules of llama.cpp's converter (`GraniteMoeSWAModel`). The gguf
package does not have it."""

from __future__ import annotations

from typing import Any

import gguf

from gguf_names import name_in_file

ARCHITECTURE = "granite_swa"
_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GRANITE_MOE, 8)
WHOLE = {
    "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
    "shared_mlp.input_linear.weight": "ffn_up_shexp.weight",
    "self_attn.sinks": "attn_sinks.weight",
}
"""Ends of parameters that are one tensor of the file, and not of GraniteMoE's files → their names in a block."""


def name_of(path: str) -> str:
    """The name in the file of a parameter of transformers' model."""
    return name_in_file(path, WHOLE, _NAMES)


def granite_swa_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`GraniteSWAModel.set_gguf_parameters`, beside what all Granite models have."""
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_array(f"{ARCHITECTURE}.attention.rope_pattern", [bool(base) for base in config["layer_rope_theta"]])
