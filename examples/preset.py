"""A whole preset in one file, a plugin: an eviction policy, a predictor and a precision rule of one's own.

    tiermoe run stories-7m "Once upon a time" --plugin examples/preset.py --preset quick-copies --cache 25%

A predicted expert has time to come in full. One that was not predicted holds the token up: it comes at 2 bits, in about
half of the bytes. docs/research.md goes on from here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tiermoe.offload.composition import Composition
from tiermoe.offload.policies.eviction import EVICTIONS, EvictionContext
from tiermoe.offload.policies.precision import PRECISIONS, HighAndLow
from tiermoe.offload.policies.prediction import PREDICTIONS, Available, Forecasts, LooksAhead
from tiermoe.offload.policies.settings import setting
from tiermoe.offload.presets import PRESETS
from tiermoe.types import Demand, ExpertKey, Routed, Wanted


@dataclass(eq=False)
class Clock:
    """CLOCK, which is nearly LRU: a hand goes around the experts, and evicts the first that nobody has used for
    `rounds` of its rounds."""

    context: EvictionContext
    rounds: int = setting(1, read=int, low=1, high=64)

    def __post_init__(self) -> None:
        self._left: OrderedDict[ExpertKey, int] = OrderedDict()  # rounds that are left; the hand points at the first

    def admitted(self, key: ExpertKey) -> None:
        self._left[key] = 0

    def used(self, key: ExpertKey, demand: Demand) -> None:
        self._left[key] = self.rounds

    def removed(self, key: ExpertKey) -> None:
        del self._left[key]

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        for _ in range((self.rounds + 1) * len(self._left)):
            key = next(iter(self._left))
            if not self._left[key] and evictable(key):
                return key
            self._left[key] = max(self._left[key] - 1, 0)
            self._left.move_to_end(key)
        return None

    def new_sequence(self) -> None:
        """The hand goes on from one sequence to the next."""


@dataclass(eq=False)
class NextGateAbove(LooksAhead):
    """Of the next layers' routers on the running layer's input, the experts whose probability is `least` or more for a
    token, on average."""

    least: float = setting(0.1, low=0, high=1)
    asks_routers: ClassVar[bool] = True
    ranks_all: ClassVar[bool] = True  # else a model's own weights of the K experts come, on another scale

    def candidates(self, layer: int, forecasts: Forecasts, available: Available) -> Iterator[Wanted]:
        for target in self.targets(layer):
            for expert, weight in forecasts.ranked(target):
                if weight < self.least * self.tokens:
                    break
                yield Wanted(target, expert, weight)


@dataclass(eq=False)
class LowOnMiss(HighAndLow):
    """What decoding misses comes in `low_bits`, what is predicted and what a prompt asks for in all bits. A copy in
    more bits serves a demand for fewer."""

    def demands(self, routed: Routed) -> list[Demand]:
        bits = self.low_bits if routed.phase == "decode" else self.context.bits
        return [Demand(expert, tokens, bits) for expert, tokens in routed.tokens_per_expert().items()]

    def predicted(self, layer: int, ranked: Sequence[tuple[int, float]], expert: int) -> int:
        return self.context.bits


EVICTIONS["clock"] = Clock
PREDICTIONS["next-gate-above"] = NextGateAbove
PRECISIONS["low-on-miss"] = LowOnMiss
PRESETS["quick-copies"] = Composition(
    "quick-copies",
    "the next gate above a threshold in full, 2 bits on a miss, CLOCK",
    prefetch="next-gate-above",
    precision="low-on-miss",
    cache="clock",
    own={"least": 0.1, "low_bits": 2},
)
