"""Hunyuan 3 as GGUF, by the rules of llama.cpp's converter (`HYV3Model`). The gguf package does not have it."""

from __future__ import annotations

from typing import Any

import gguf

from gguf_names import name_in_file

ARCHITECTURE = "hy_v3"
_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.EXAONE_MOE, 8)
"""Of a model with the same tensors."""
_OWN = {"mlp.e_score_correction.bias": "exp_probs_b"}
"""Without a suffix: checkpoints call it `mlp.expert_bias`."""


def name_of(path: str) -> str:
    """The name in the file of a parameter of transformers' model."""
    return name_in_file(path, _OWN, _NAMES)


def hunyuan3_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`HYV3Model.set_gguf_parameters`."""
    inner = config["moe_intermediate_size"]
    writer.add_expert_shared_feed_forward_length(inner * config["num_shared_experts"])
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config["router_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
