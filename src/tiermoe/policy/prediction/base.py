"""What every predictor derives from: what it is made from, and the size of the pass that runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from tiermoe.policy.prediction.context import PredictionContext
from tiermoe.policy.prediction.protocol import Forecasts, Here
from tiermoe.policy.settings import setting
from tiermoe.types import Routed, Wanted


@dataclass(eq=False)
class Predictor(ABC):
    """Names experts to prefetch. It sees the routers' choices as they are made. `tokens`: of the running pass, those
    that use experts (at least 1); `phase`: 'prefill' or 'decode'. A subclass that is a dataclass may declare settings
    (`policy.settings`).

    `asks_routers`: it calls `Forecasts.ranked` or `recalled`, which not every model and trace answers. `ranks_all`: it
    needs the weights of all experts, not of the K alone. `in_one_product`: of one layer after the other, so that their
    routers are evaluated in one product. `reads_table`: the calibrated table without which it cannot be made."""

    context: PredictionContext
    tokens: int = field(default=1, init=False)
    phase: str = field(default="prefill", init=False)
    asks_routers: ClassVar[bool] = False
    ranks_all: ClassVar[bool] = False
    in_one_product: ClassVar[bool] = False
    reads_table: ClassVar[str] = ""

    def __post_init__(self) -> None:  # noqa: B027
        """Sets up what a subclass needs beside its fields."""

    @abstractmethod
    def candidates(self, layer: int, forecasts: Forecasts, here: Here) -> Iterator[Wanted]:
        """Experts of layers after `layer`, which runs now (-1: before the first), in the order in which they should be
        fetched (those that are here may be among them: they are kept from eviction)."""

    def observe(self, routed: Routed) -> None:
        """The router of a layer has spoken."""
        self.tokens = max(1, sum(1 for chosen in routed.experts if chosen))
        self.phase = routed.phase

    def new_sequence(self) -> None:  # noqa: B027
        """Another request begins; nothing is remembered from the last one."""

    def most(self, each: int) -> int:
        """How many experts of a layer the pass can ask for where a token asks for `each`, if there are so many: the
        tokens' choices have at most that many different ones together."""
        return each * self.tokens


@dataclass(eq=False)
class LooksAhead(Predictor):
    """One that predicts the next `ahead` layers."""

    ahead: int = setting(1, read=int, low=1, high=64)

    def targets(self, layer: int) -> range:
        """The layers that are predicted while `layer` runs (-1: before the first): at most `ahead`, nearest first."""
        return range(layer + 1, min(layer + 1 + self.ahead, self.context.layers))
