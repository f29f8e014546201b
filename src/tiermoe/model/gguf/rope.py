"""The rotary embedding of a GGUF file as transformers' configs have it."""

from __future__ import annotations

from typing import Any

from tiermoe.errors import ModelError
from tiermoe.store.gguf.file import GgufFile
from tiermoe.store.gguf.values import count, decimal, rounded

_THETA = 10000.0  # where the file says nothing
_BETA_FAST, _BETA_SLOW = 32.0, 1.0  # llama.cpp's


def rope_parameters(file: GgufFile) -> dict[str, Any]:
    """`rope_parameters` of a config. ModelError for a scaling that is not linear or YaRN."""
    theta = decimal(file, "rope.freq_base", _THETA)
    kind = file.of_model("rope.scaling.type", "none")
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        found |= {"rope_type": "linear", "factor": decimal(file, "rope.scaling.factor")}
    elif kind == "yarn":
        found |= _yarn(file)
    elif kind != "none":
        raise ModelError(f"{file.path} scales its rotary embedding by '{kind}'; linear and yarn are computed")
    return found


def _yarn(file: GgufFile) -> dict[str, Any]:
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
        if (factor := decimal(file, key, 1.0)) != 1.0:
            raise ModelError(f"{file.path} sets {key} to {factor:g}, which tiermoe does not compute")
    found = {
        "rope_type": "yarn",
        "factor": decimal(file, "rope.scaling.factor"),
        "original_max_position_embeddings": count(file, "rope.scaling.original_context_length"),
        "beta_fast": decimal(file, "rope.scaling.yarn_beta_fast", _BETA_FAST),
        "beta_slow": decimal(file, "rope.scaling.yarn_beta_slow", _BETA_SLOW),
    }
    if multiplier := decimal(file, "rope.scaling.yarn_log_multiplier", 0.0):  # DeepSeek's mscale_all_dim, a tenth of it
        scale = rounded(10 * multiplier)
        found |= {"mscale": scale, "mscale_all_dim": scale}
    return found
