"""What a predictor may ask while a layer runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

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
