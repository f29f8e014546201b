"""How long kernels run within a stretch: those of experts, and those of all other weights.

The second are linear layers, and a decoder layer's attention where one call computes all of it. What is left of a
token's time, less waiting for the link, is the framework's own: Python, transformers' modelling code, norms, other
attention, routing, and this program's decisions. Timing every call costs a little, so it is done in a pass of its own
and never in the one that is measured.
"""

from __future__ import annotations

from typing import Any

from tiermoe.engine.observer import DENSE, EXPERTS, Observer


class KernelClock(Observer):
    """Sums the seconds of an engine's kernels while it is entered: `experts_s` and `dense_s` so far."""

    layers = False
    kernels = True

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._seconds = {DENSE: 0.0, EXPERTS: 0.0}

    @property
    def experts_s(self) -> float:
        return self._seconds[EXPERTS]

    @property
    def dense_s(self) -> float:
        return self._seconds[DENSE]

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
        self._seconds[kind] += seconds
