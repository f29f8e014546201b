"""Ling 3.0 as GGUF, by the rules of llama.cpp's converter (`BailingMoeV3Model`). The gguf package does not have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gguf
from torch import Tensor

from gguf_latent import latent_metadata
from gguf_linear import kimi_metadata, kimi_tensors
from gguf_names import name_in_file

ARCHITECTURE = "bailingmoe3"
_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.KIMI_LINEAR, 8)
"""Of a model with the same tensors but for those of `_OWN`."""
_OWN = {"self_attn.f_proj.weight": "ssm_f_a.weight"}
_GATES = {"linear_attention": "ssm_g_a.weight", "full_attention": "attn_gate.weight"}


def name_of(path: str) -> str:
    """The name in the file of a parameter of transformers' model."""
    return name_in_file(path, _OWN, _NAMES)


def is_own(path: str) -> bool:
    """Whether a parameter is of a layer's gates, or is changed."""
    return path.endswith(("self_attn.g_proj.weight", "self_attn.conv1d.weight")) or ".forget_gate." in path


def ling_tensors(
    path: str, value: Tensor, config: Any, name_of: Callable[[str], str]
) -> Iterator[tuple[str, Any, Any]]:
    """As `kimi_tensors`, of the parameters that `is_own` names."""
    if path.endswith("g_proj.weight"):
        layer = int(path.split(".")[2])
        yield f"blk.{layer}.{_GATES[config.layer_types[layer]]}", (value,), tuple(value.shape)
    elif path.endswith("A_log"):
        yield name_of(path.replace("forget_gate.", "")), (value,), (len(value), 1)
    else:
        yield from kimi_tensors(path, value, name_of)


def ling_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`BailingMoeV3Model.set_gguf_parameters`."""
    kimi_metadata(writer, config)
    writer.add_bool(f"{ARCHITECTURE}.kda.safe_gate", config["kda_safe_gate"])
    writer.add_float32(f"{ARCHITECTURE}.kda.gate_lower_bound", config["kda_lower_bound"])
    writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["n_shared_experts"])
    latent_metadata(writer, "bailing_hybrid", config)
