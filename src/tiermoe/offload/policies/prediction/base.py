"""Prediction: the interface of every predictor, what predictors are made from, and what they may ask while a layer
runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from tiermoe.offload.policies.settings import setting
from tiermoe.types import Routed, Wanted

Ranked = Sequence[tuple[int, float]]
"""Experts of one layer with their predicted gate weights, likeliest first (`Forecasts.ranked` says on which scale)."""

Available = Callable[[int, int], bool]
"""(layer, expert) → whether it is cached or on its way in a precision that would do."""

Future = Callable[[int], Sequence[int]]
"""Layer → the experts that it will choose in this pass (replay only)."""

PathKey = tuple[tuple[int, ...], ...]
"""The active experts of consecutive MoE layers, oldest layer first, ascending within a layer."""

Paths = Mapping[int, Mapping[PathKey, Mapping[int, int]]]
"""MoE layer → path through the layers before it → expert → number of tokens."""


class Forecasts(Protocol):
    """What the running layer's hidden state says about later layers. The engine evaluates routers when asked, a replay
    reads what a trace recorded."""

    def ranked(self, target: int) -> Ranked:
        """Layer `target`'s router on the running layer's input, weights summed over the tokens; empty if nothing is
        known (no such layer, a trace without it). Weights are a softmax over all experts, and all experts are ranked,
        for a predictor or precision rule with `ranks_all`, and in a replay; else the engine may rank the chosen experts
        alone, by the weights that the model's router gives them."""

    def counted(self, target: int) -> Ranked:
        """The experts that layer `target`'s router chooses for the pass's tokens on the running layer's input, with how
        many tokens choose each, most first, of equals the lower index first; empty if nothing is known."""

    def token_ids(self) -> Sequence[int]:
        """The tokens of this pass (for layers that are routed by a hash of the token)."""

    def recalled(self, target: int) -> Ranked:
        """What layer `target`'s router said of the same position in the discarded little pass (MoBiLE); empty in any
        pass that is no fallback."""


class HashTable(Protocol):
    """The routing of one layer by the token alone."""

    def __getitem__(self, token_id: int, /) -> Sequence[int]:
        """The experts of a token."""


@dataclass(frozen=True, slots=True)
class PredictionContext:
    """What a predictor may be made from."""

    layers: int  # MoE layers of the model
    experts: Sequence[int]  # per layer
    top_k: Sequence[int]  # per layer
    paths: Paths = field(default_factory=dict)  # of the calibration (`path.count_paths`)
    # (layer, expert) → share or number of the calibration's tokens
    frequencies: Mapping[tuple[int, int], float] = field(default_factory=dict)
    hash_tables: Mapping[int, HashTable] = field(default_factory=dict)  # of the layers that are routed by the token
    future: Future | None = None  # known in a replay alone
    encoder_layers: int = 0  # the first MoE layers, in an encoder
    little: int | None = None  # experts of a little pass (`routing.little_k`)

    def most_frequent(self, layer: int) -> list[tuple[int, float]]:
        """Experts of `layer` that the calibration has seen, with their frequency, falling; ties: lower index first."""
        frequencies = ((expert, self.frequencies.get((layer, expert), 0.0)) for expert in range(self.experts[layer]))
        return sorted((seen for seen in frequencies if seen[1] > 0), key=lambda seen: -seen[1])


@dataclass(eq=False)
class Predictor(ABC):
    """Names experts to prefetch. It observes the routers' choices as they are made. A subclass that is a dataclass may
    declare settings (`policies.settings`)."""

    context: PredictionContext
    tokens: int = field(default=1, init=False)  # of the running pass, those that use experts; at least 1
    phase: str = field(default="prefill", init=False)  # or "decode"

    asks_routers: ClassVar[bool] = False  # calls `Forecasts.ranked` or `recalled`, which not every model answers
    ranks_all: ClassVar[bool] = False  # needs all experts and their softmax, not the K alone (`Forecasts.ranked`)
    errs: ClassVar[bool] = True  # may leave out an expert that a predicted layer chooses
    in_one_product: ClassVar[bool] = False  # predicts several layers at once: one product evaluates their routers
    reads_weights: ClassVar[bool] = False  # of the experts that a router chose, in `observe`
    reads_table: ClassVar[str] = ""  # the calibrated table without which it cannot be made

    def __post_init__(self) -> None:  # noqa: B027
        """Sets up what a subclass needs besides its fields."""

    @abstractmethod
    def candidates(self, layer: int, forecasts: Forecasts, available: Available) -> Iterator[Wanted]:
        """Experts of layers after the running `layer` (-1: before the first), in the order in which they should be
        fetched. Available ones may be among them: the scheduler keeps them from eviction."""

    def ranking(self, target: int, forecasts: Forecasts) -> Ranked:
        """The prediction for the experts of layer `target`, from which the precision of their loads follows."""
        return forecasts.ranked(target)

    def initial_experts(self) -> list[Wanted]:
        """Experts that the cache begins with, most wanted first; empty if the predictor names none."""
        return []

    def observe(self, routed: Routed) -> None:
        """The router of a layer has spoken."""
        self.tokens = max(1, len(list(filter(None, routed.experts))))
        self.phase = routed.phase

    def discard_pass(self) -> None:  # noqa: B027
        """The last pass does not count: its token is run again."""

    def new_sequence(self) -> None:  # noqa: B027
        """Another request begins."""

    def most(self, each: int) -> int:
        """The most experts of a layer that the pass can ask for if a token asks for `each`: the choices of all
        tokens together. The layer may have fewer."""
        return each * self.tokens


@dataclass(eq=False)
class LooksAhead(Predictor):
    """A predictor of the next `ahead` layers."""

    ahead: int = setting(1, read=int, low=1, high=64)

    def targets(self, layer: int) -> range:
        """The layers that are predicted while `layer` runs (-1: before the first): at most `ahead`, nearest first."""
        return range(layer + 1, min(layer + 1 + self.ahead, self.context.layers))


@dataclass(eq=False)
class LayerByLayer(LooksAhead):
    """A predictor that names the experts of each of the next layers by themselves."""

    from_the_start: ClassVar[bool] = False  # names experts before the first layer too

    def candidates(self, layer: int, forecasts: Forecasts, available: Available) -> Iterator[Wanted]:
        for target in self.targets(layer) if layer >= 0 or self.from_the_start else ():
            for expert, score in self.named(target, forecasts):
                yield Wanted(target, expert, score)

    @abstractmethod
    def named(self, target: int, forecasts: Forecasts) -> Iterable[tuple[int, float]]:
        """Experts of layer `target` with scores, in the order in which they should be fetched."""
