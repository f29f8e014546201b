"""The seam that every predictor fills: what predictions are made from, and what may be asked while a layer runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from tiermoe.decide.prediction.paths import Paths
from tiermoe.decide.settings import setting
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

    def counted(self, target: int) -> Ranked:
        """The experts that layer `target`'s router chooses for the pass's tokens on the running layer's input, with how
        many tokens choose each, most first, of equals the lower index first; empty where nothing is known."""

    def token_ids(self) -> Sequence[int]:
        """The tokens of this pass (for layers that are routed by a hash of the token)."""

    def recalled(self, target: int) -> Ranked:
        """What layer `target`'s router said of this very position in the discarded little pass (MoBiLE); empty in any
        other pass."""


Future = Callable[[int], Sequence[int]]
"""Layer → the experts that it will choose in this pass (replay only)."""


class HashTable(Protocol):
    """The routing of one layer by the token alone."""

    def __getitem__(self, token_id: int, /) -> Sequence[int]:
        """The experts of a token."""


@dataclass(frozen=True, slots=True)
class PredictionContext:
    """What a prediction may be made from.

    `layers`: MoE layers of the model, the first `encoder_layers` of them in an encoder. `experts`, `top_k`: per layer.
    `paths`: of the calibration (`count_paths`). `frequencies`: (layer, expert) → share or number of the calibration's
    tokens. `little`: experts of a little pass (`routing.little_k`). `hash_tables`: of the layers that are routed by
    the token. `future`: known in a replay alone."""

    layers: int
    experts: Sequence[int]
    top_k: Sequence[int]
    paths: Paths = field(default_factory=dict)
    frequencies: Mapping[tuple[int, int], float] = field(default_factory=dict)
    hash_tables: Mapping[int, HashTable] = field(default_factory=dict)
    future: Future | None = None
    encoder_layers: int = 0
    little: int | None = None

    def most_frequent(self, layer: int) -> list[tuple[int, float]]:
        """Experts of `layer` that the calibration has seen, with their frequency, falling; ties: lower index first."""
        frequencies = ((expert, self.frequencies.get((layer, expert), 0.0)) for expert in range(self.experts[layer]))
        return sorted((seen for seen in frequencies if seen[1] > 0), key=lambda seen: -seen[1])


@dataclass(eq=False)
class Predictor(ABC):
    """Names experts to prefetch. It sees the routers' choices as they are made. `tokens`: of the running pass, those
    that use experts (at least 1); `phase`: 'prefill' or 'decode'. A subclass that is a dataclass may declare settings
    (`decide.settings`).

    `asks_routers`: it calls `Forecasts.ranked` or `recalled`, which not every model and trace answers. `ranks_all`: it
    needs the weights of all experts, not of the K alone. `errs`: of a layer that it predicts it may leave out an expert
    that is chosen. `in_one_product`: of one layer after the other, so that their
    routers are evaluated in one product. `reads_table`: the calibrated table without which it cannot be made."""

    context: PredictionContext
    tokens: int = field(default=1, init=False)
    phase: str = field(default="prefill", init=False)
    asks_routers: ClassVar[bool] = False
    ranks_all: ClassVar[bool] = False
    errs: ClassVar[bool] = True
    in_one_product: ClassVar[bool] = False
    reads_table: ClassVar[str] = ""

    def __post_init__(self) -> None:  # noqa: B027
        """Sets up what a subclass needs beside its fields."""

    @abstractmethod
    def candidates(self, layer: int, forecasts: Forecasts, here: Here) -> Iterator[Wanted]:
        """Experts of layers after `layer`, which runs now (-1: before the first), in the order in which they should be
        fetched (those that are here may be among them: they are kept from eviction)."""

    def ranking(self, target: int, forecasts: Forecasts) -> Ranked:
        """What is predicted of the experts of layer `target`, as the precision of their loads follows it."""
        return forecasts.ranked(target)

    def first(self) -> list[Wanted]:
        """Experts that the cache begins with, most wanted first; empty where the prediction names none."""
        return []

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
