"""Engines over small checkpoints whose sizes the native kernels take, and token ids for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import tiermoe

NATIVE = {"hidden_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4, "head_dim": 32}
"""Sizes of a Qwen3-MoE that the native kernels take."""


def tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_of(directory: Path, **options: Any) -> Any:
    return tiermoe.load(directory, memory="4GiB", device="cpu", lanes=1, **options)[0].tiermoe
