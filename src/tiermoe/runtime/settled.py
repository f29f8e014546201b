"""Decoding a token of each sequence where experts that have come stay for good: nobody decides anything, so
the block is one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tiermoe.kernels.expert import ExpertKernel, InOneCall, Views
from tiermoe.kernels.native.moe_block import MoeBlock
from tiermoe.kernels.native.router import Router
from tiermoe.runtime.passes import CurrentPass


class SettledExperts:
    """The experts of a layer that have been computed with before, or brought by the background, under a composition
    that evicts and predicts nothing (`Scheduler.settles`): counted as hits, and told to nobody."""

    def __init__(self, kernel: InOneCall, experts: int, current: CurrentPass) -> None:
        self._kernel: Any = MoeBlock(kernel.native, experts)
        self._in_one_call = kernel
        self._current = current
        self._noted: set[int] = set()

    def note(self, expert: int, views: Views) -> None:
        """The expert lies in the slot of these views from now on."""
        if expert not in self._noted:
            self._noted.add(expert)
            self._kernel.place(expert, self._in_one_call.packed(views))

    def watch(self, wrap: Callable[[Any], Any]) -> Callable[[], None]:
        """Puts wrap(kernel), which is called as the kernel is, in its place; returns what puts it back."""
        kernel, self._kernel = self._kernel, wrap(self._kernel)

        def undo() -> None:
            self._kernel = kernel

        return undo

    def __call__(self, router: Router, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor | None:
        """residual, if any, + the block of hidden, (T, H) each; None where the layer must run as usual: an expert has
        not come yet, or somebody observes what is chosen."""
        if self._current.observer is not None:
            return None
        result: torch.Tensor
        result, experts = self._kernel(router, hidden, residual)
        self._current.scheduler.controller.counts.hits += experts
        return result


def settled_experts(kernels: Mapping[int, ExpertKernel], experts: int, current: CurrentPass) -> SettledExperts | None:
    """None where the composition decides something or where no native kernel computes the experts."""
    (kernel, *others) = kernels.values()
    if others or not current.scheduler.settles or not isinstance(kernel, InOneCall):
        return None
    return SettledExperts(kernel, experts, current)
