"""What the tests of the native kernels compute with: packed matrices, experts, checkpoints of shapes they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import tiny
from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.formats.int4 import CPU_LAYOUT, Int4
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.kernels.experts import FusedExperts, SlotViews
from tiermoe.kernels.matrix import address
from tiermoe.kernels.router import Router
from tiermoe.native import _native
from tiermoe.types import MoeLayer, Part


def packed(out: int, in_: int, group: int, seed: int = 0) -> tuple[Int4, dict[str, torch.Tensor]]:
    weight = torch.randn(out, in_, generator=torch.Generator().manual_seed(seed)) * 0.05
    encoding = Int4(CPU_LAYOUT, group)
    return encoding, encoding.encode(weight.bfloat16(), QUANTIZERS["linear"], torch.bfloat16)


def tokens(count: int, width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


def expert_format(hidden: int, inner: int) -> ExpertFormat:
    parts = (Part("gate_up", (2 * inner, hidden)), Part("down", (hidden, inner)))
    encoding = Int4(CPU_LAYOUT, 64)
    return ExpertFormat(MoeLayer("experts", 4, 2, parts), 4, torch.bfloat16, {"gate_up": encoding, "down": encoding})


def expert_views(hidden: int, inner: int, seed: int) -> SlotViews:
    gate_up, down = packed(2 * inner, hidden, 64, seed)[1], packed(hidden, inner, 64, seed + 100)[1]
    return SlotViews({"gate_up": gate_up, "down": down})


class Block:
    """`_native.MoeBlock` of a kernel's experts, over tensors: x, residual and out (T, H)."""

    def __init__(self, kernel: FusedExperts, experts: int) -> None:
        self._native = _native.MoeBlock(kernel.native.absent(), experts)
        self.place, self.compute = self._native.place, self._native.compute

    def __call__(self, router: Router, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> int:
        """How many experts computed; 0 where one that the router chooses is absent."""
        return self._native.run(self._begin(router, x), address(residual), out.data_ptr())

    def route(self, router: Router, x: torch.Tensor) -> list[list[int]]:
        return self._native.route(self._begin(router, x))

    def total(self, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        self._native.total(address(residual), out.data_ptr())

    def _begin(self, router: Router, x: torch.Tensor) -> int:
        needed = self._native.begin(router.pack(), x.data_ptr(), x.shape[0], torch.get_num_threads())
        self._workspace = torch.empty(needed, dtype=torch.uint8)
        return self._workspace.data_ptr()


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
