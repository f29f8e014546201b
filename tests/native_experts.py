"""Checkpoints of shapes that the native kernels take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import tiny


def checkpoint(directory: Path, family: str, **changes: Any) -> Path:
    """One whose shapes the kernels take."""
    return tiny.write(directory, family, torch.bfloat16, **{**native_changes(family), **changes})


def native_changes(family: str) -> dict[str, Any]:
    """Sizes that the kernels take, of a family's config."""
    heads: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    by_another_name_or_size = ("bailing_hybrid", "mimo_v2_flash")
    if tiny.config_of(family).to_dict().get("head_dim") == 16 or family in by_another_name_or_size:
        heads["head_dim"] = 32
    inner = "intermediate_size" if "intermediate_size" in tiny.CONFIGS[family] else "moe_intermediate_size"
    heads[inner] = 64
    return heads
