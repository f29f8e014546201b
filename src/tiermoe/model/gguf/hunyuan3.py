"""Hunyuan 3 in GGUF files (`HYV3Model` of the converter): its config."""

from __future__ import annotations

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.gguf.config import SIGMOID, Config, grouped
from tiermoe.model.gguf.shapes import AGAIN, blocks, dense_inner, experts, in_first_block, inner, leading_dense


def hunyuan3(file: GgufFile) -> Config:
    """ModelError where routers do not score as Hunyuan's do, or shared experts are no whole number of experts."""
    sigmoid = file.count("expert_gating_func", SIGMOID) == SIGMOID  # models/hy-v3.cpp
    if not sigmoid or file.of_model("expert_weights_norm") is not True:
        raise ModelError(
            f"{file.path} has no sigmoid router whose weights sum to 1, which every Hunyuan 3 has; {AGAIN}"
        )
    dense, columns, shared = leading_dense(file), inner(file), in_first_block(file, "ffn_gate_shexp.weight", 2)[0]
    if not columns or shared % columns:
        raise ModelError(
            f"{file.path} has {shared} columns between the matrices of the shared experts and {columns} between those "
            f"of an expert, and Hunyuan 3 several times as many; {AGAIN}"
        )
    return {
        **grouped(file),
        "model_type": "hy_v3",
        "num_experts": experts(file),
        "num_shared_experts": shared // columns,
        "moe_intermediate_size": columns,
        "intermediate_size": dense_inner(file),
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (blocks(file) - dense),
        "router_scaling_factor": file.decimal("expert_weights_scale"),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }
