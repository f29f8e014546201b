"""The seam that every prediction fills: which experts the next layers will want."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from tiermoe.types import Routed, Wanted

Ranked = Sequence[tuple[int, float]]
"""Experts of one layer with their predicted gate weights (softmax over all experts), likeliest first."""

Here = Callable[[int, int], bool]
"""(layer, expert) → whether it is cached or on its way in a precision that would do."""


class Forecasts(Protocol):
    """What the running layer's hidden state says about later layers. The engine evaluates routers when asked, a replay
    reads what a trace recorded."""

    def ranked(self, target: int) -> Ranked:
        """Layer `target`'s router on the running layer's input. With several tokens, weights are summed over them;
        empty where nothing is known (no such layer, a trace without it)."""

    def token_ids(self) -> Sequence[int]:
        """The tokens of this pass (for layers that are routed by a hash of the token)."""

    def recalled(self, target: int) -> Ranked:
        """What layer `target`'s router said of this very position in the discarded little pass (MoBiLE); empty in any
        other pass."""


class Prediction(Protocol):
    """Names experts to prefetch. It sees the routers' choices as they are made."""

    def observe(self, routed: Routed) -> None:
        """The router of a layer has spoken."""

    def candidates(self, layer: int, forecasts: Forecasts, here: Here) -> Iterator[Wanted]:
        """Experts of layers after `layer`, which runs now, in the order in which they should be fetched (those that
        are here may be among them: they are kept from eviction)."""

    def new_sequence(self) -> None:
        """Another request begins."""
