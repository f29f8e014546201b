"""What predictions have in common: what they are made from, and the size of the pass that runs."""

from __future__ import annotations

from typing import ClassVar

from tiermoe.policy.prediction.context import PredictionContext
from tiermoe.types import Routed


class Predictor:
    """Knows the running pass from the routers' choices. `tokens`: those that use experts (at least 1); `phase`:
    'prefill' or 'decode'. `asks_routers`: it calls `Forecasts.ranked` or `recalled`, which not every model and trace
    answers."""

    asks_routers: ClassVar[bool] = False

    def __init__(self, context: PredictionContext) -> None:
        self.context = context
        self.tokens = 1
        self.phase = "prefill"

    def observe(self, routed: Routed) -> None:
        self.tokens = max(1, sum(1 for chosen in routed.experts if chosen))
        self.phase = routed.phase

    def new_sequence(self) -> None:
        """Nothing is remembered from one request to the next."""

    def most(self, each: int) -> int:
        """How many experts of a layer the pass can ask for where a token asks for `each`, if there are so many: the
        tokens' choices have at most that many different ones together."""
        return each * self.tokens
