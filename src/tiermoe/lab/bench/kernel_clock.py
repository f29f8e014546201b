"""Seconds of an engine's kernels.

Kernels are those of experts, and those of all other weights: linear layers, and a decoder layer's attention where one
call computes all of it. What is left of a token's time, less waiting for the link, is the framework's own: Python,
transformers' modelling code, norms, other attention, routing, cache decisions. Timing every call costs a little, so it
is done in a pass of its own and never in the one that is measured.
"""

from __future__ import annotations

from typing import Any

from tiermoe.engine.observer import DENSE, EXPERTS, Observer


class KernelClock(Observer):
    """Sums the seconds of an engine's kernels while it is entered."""

    layers = False
    kernels = True

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.experts_s = 0.0  # kernels of experts
        self.dense_s = 0.0  # all others

    @property
    def seconds(self) -> float:
        """Of all kernels."""
        return self.experts_s + self.dense_s

    def __enter__(self) -> KernelClock:
        self._engine.observe(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.observe(None)

    def on_kernel(self, kind: str, seconds: float) -> None:
        self.experts_s += seconds * (kind == EXPERTS)
        self.dense_s += seconds * (kind == DENSE)
