"""Precision rules: in how many bits each expert is demanded, or whether it is skipped. `PRECISIONS` is the one table of
their names."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tiermoe.config import BITS
from tiermoe.errors import ConfigError
from tiermoe.offload.policies.registry import Registry, subclass_of
from tiermoe.offload.policies.settings import setting
from tiermoe.types import Demand, Routed


@dataclass(frozen=True, slots=True)
class PrecisionContext:
    """What a rule may be made from."""

    bits: int  # of a high-precision load
    top_k: Sequence[int]  # per layer
    table: Mapping[tuple[int, int], int] = field(default_factory=dict)  # (layer, expert) → bits; others have `bits`


@dataclass(eq=False)
class Precision(ABC):
    """The bits of the experts that a router chose, and of those that a predictor names. A subclass that is a dataclass
    may declare settings (`policies.settings`)."""

    context: PrecisionContext
    reads_forecasts: ClassVar[bool] = False  # `predicted` looks at `ranked`, which costs evaluating a router
    ranks_all: ClassVar[bool] = False  # at the weights of all experts, not of the K alone
    reads_weights: ClassVar[bool] = False  # `demands` looks at the gate weights
    skips: ClassVar[bool] = False  # a demand may be of 0 bits
    reads_table: ClassVar[str] = ""  # the calibrated table without which it cannot be made

    def __post_init__(self) -> None:  # noqa: B027
        """Sets up what a subclass needs besides its fields."""

    @property
    def loaded(self) -> tuple[int, ...]:
        """The bits that experts are loaded in, highest first."""
        return (self.context.bits,)

    @abstractmethod
    def demands(self, routed: Routed) -> list[Demand]:
        """One demand per chosen expert, ascending; `bits` is what a miss loads, 0 if a miss is skipped."""

    @abstractmethod
    def predicted(self, layer: int, ranked: Sequence[tuple[int, float]], expert: int) -> int:
        """The bits in which a predicted expert is fetched, 0: not at all. ranked: the experts of `layer`, likeliest
        first, with their predicted weights or counts (`Predictor.ranking`); empty if nothing is known."""


@dataclass(eq=False)
class HighAndLow(Precision):
    """A rule that loads some experts in `low_bits`, the others in `context.bits`."""

    low_bits: int = setting(2, read=int, one_of=tuple(sorted(BITS)[:-1]))

    @property
    def loaded(self) -> tuple[int, ...]:
        return tuple(sorted({self.context.bits, self.low_bits}, reverse=True))


def unimportance(weights: Sequence[float]) -> list[float]:
    """HOBBIT's score of each of a token's K experts, in the order given: the share of the gate weights that rank before
    it, s_i = sum_{j<i} |g_j| with the weights normalised to sum 1. From 0 (the first) to 1; ties rank as given."""
    total = math.fsum(abs(weight) for weight in weights)
    scores = [0.0] * len(weights)
    before = 0.0
    for index in sorted(range(len(weights)), key=lambda index: -abs(weights[index])):
        scores[index] = min(before / total, 1.0) if total else 0.0
        before += abs(weights[index])
    return scores


def thresholds(scores: Sequence[float], high_share: float, skip_share: float) -> tuple[float, float]:
    """(t1, t2) for which at least `high_share` of the unimportance scores, and as few as possible, are <= t1, and
    1 - `skip_share` of them <= t2. A share that leaves no score above gives 1, so that none that is yet to come is
    above either. ConfigError without scores or for shares that are more than the whole."""
    if not scores:
        raise ConfigError("no gate weights to take thresholds from; give a longer calibration text")
    if high_share < 0 or skip_share < 0 or high_share + skip_share > 1 + 1e-9:
        raise ConfigError(
            f"high_share ({high_share:g}) and skip_share ({skip_share:g}) must be shares of one whole; make one smaller"
        )
    ordered = sorted(scores)
    return _quantile(ordered, high_share), _quantile(ordered, max(high_share, 1 - skip_share))


def _quantile(ordered: Sequence[float], share: float) -> float:
    if share >= 1:
        return 1.0
    # 1e-9: 0.55 of 100 scores are 55 of them, whatever their product is rounded to
    return ordered[max(math.ceil(share * len(ordered) - 1e-9), 1) - 1]


class Fixed(Precision):
    """Every expert in the same bits."""

    def demands(self, routed: Routed) -> list[Demand]:
        demands, bits = [], self.context.bits
        for expert, tokens in routed.tokens_per_expert().items():
            demands.append(Demand(expert, tokens, bits))
        return demands

    def predicted(self, layer: int, ranked: Sequence[tuple[int, float]], expert: int) -> int:
        return self.context.bits


@dataclass(eq=False)
class GateScore(HighAndLow):
    """A miss is loaded high if its unimportance is at most T1, low up to T2, and skipped above (HOBBIT, token-level
    dynamic loading). Where the tokens of a pass disagree, the highest demand wins. ConfigError without thresholds."""

    t1: float | None = setting(None, low=0, high=1, calibrated=True)
    t2: float | None = setting(None, low=0, high=1, calibrated=True)
    reads_forecasts: ClassVar[bool] = True
    reads_weights: ClassVar[bool] = True
    skips: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.t1 is None or self.t2 is None:
            raise ConfigError(
                "precision=gate-score needs the thresholds t1 and t2; make them with tiermoe calibrate MODEL "
                "--text FILE --for hobbit, or set both"
            )
        self._t1, self._t2 = self.t1, self.t2
        self._tokens = 1

    @staticmethod
    def check(settings: Mapping[str, Any]) -> None:
        """ConfigError for settings that do not go together."""
        t1, t2 = settings["t1"], settings["t2"]
        if t1 is not None and t2 is not None and t1 > t2:
            raise ConfigError(f"t1 ({t1:g}) must not be above t2 ({t2:g})")

    @property
    def loaded(self) -> tuple[int, ...]:
        """Between equal thresholds nothing is low: what is not loaded high is skipped."""
        return (self.context.bits,) if self.t1 == self.t2 else super().loaded

    def demands(self, routed: Routed) -> list[Demand]:
        self._tokens = len(routed.experts)
        bits: dict[int, int] = {}
        for experts, weights in zip(routed.experts, routed.weights, strict=True):
            for expert, score in zip(experts, unimportance(weights), strict=True):
                bits[expert] = max(bits.get(expert, 0), self._bits_of(score))
        return [Demand(expert, tokens, bits[expert]) for expert, tokens in routed.tokens_per_expert().items()]

    def predicted(self, layer: int, ranked: Sequence[tuple[int, float]], expert: int) -> int:
        """By the score among the predicted K; a later expert has all the weight before it. High if several
        tokens run (one that ranks the expert first is enough) or if the weights are not known."""
        if self._tokens > 1 or not ranked:
            return self.context.bits
        chosen = ranked[: self.context.top_k[layer]]
        scores = unimportance([weight for _, weight in chosen])
        return self._bits_of(next((s for (e, _), s in zip(chosen, scores, strict=True) if e == expert), 1.0))

    def _bits_of(self, score: float) -> int:
        if score <= self._t1:
            return self.context.bits
        return self.low_bits if score <= self._t2 else 0


@dataclass(eq=False)
class Popularity(HighAndLow):
    """The least popular experts of a layer are low in prefill, all are high in decode (Fate, section 4.5).

    Popularity is the prediction made while the layer before ran, and it binds the layer's demands: if some predicted
    experts are low, so is every expert that was not predicted. Without a prediction (the first layer) the popularity of
    an expert is how many tokens it serves, of equals the higher index less. ConfigError without the share."""

    low_popularity: float | None = setting(None, low=0, high=1, calibrated=True)  # share of a layer, rounded down
    # bits of decode misses that no prediction has brought: 'low' is Fate's rule for small machines
    mispredicted: str = setting("high", read=str, one_of=("high", "low"))
    reads_forecasts: ClassVar[bool] = True
    ranks_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.low_popularity is None:
            raise ConfigError(
                "precision=popularity needs low_popularity; make it with tiermoe calibrate MODEL --text FILE "
                "--for fate, or set it"
            )
        self._bits, self._share = self.context.bits, self.low_popularity
        self._phase = "prefill"
        # later layer → `_popular` by the running layer's prediction
        self._predicted: dict[int, set[int] | None] = {}
        self._decode_bits = self.low_bits if self.mispredicted == "low" else self._bits

    def demands(self, routed: Routed) -> list[Demand]:
        self._phase = routed.phase
        predicted, self._predicted = self._predicted, {}
        counts = routed.tokens_per_expert()
        if routed.phase == "decode":
            return [Demand(e, tokens, self._decode_bits) for e, tokens in counts.items()]
        if routed.layer in predicted:
            high = predicted[routed.layer]
        else:
            high = self._popular(sorted(counts, key=lambda expert: (-counts[expert], expert)))
        return [Demand(e, tokens, self._bits_of(e, high)) for e, tokens in counts.items()]

    def predicted(self, layer: int, ranked: Sequence[tuple[int, float]], expert: int) -> int:
        if self._phase == "decode" or not ranked:
            return self._bits
        if layer not in self._predicted:
            self._predicted[layer] = self._popular([other for other, _ in ranked])
        return self._bits_of(expert, self._predicted[layer])

    def _popular(self, experts: Sequence[int]) -> set[int] | None:
        """The high ones of experts by falling popularity; None if all experts of the layer are high."""
        # 1e-9: 0.29 of 100 experts are 29 of them, whatever their product is rounded to
        low = math.floor(self._share * len(experts) + 1e-9)
        return set(experts[: len(experts) - low]) if low else None

    def _bits_of(self, expert: int, high: set[int] | None) -> int:
        return self._bits if high is None or expert in high else self.low_bits


class Table(Precision):
    """Bits per expert, found offline (EdgeMoE, section 3.2: by importance; CORM: by usage). ConfigError without a
    table."""

    reads_table: ClassVar[str] = "bits"

    def __post_init__(self) -> None:
        if not self.context.table:
            raise ConfigError(
                "precision=table needs a table of bits per expert and there is none; make it with tiermoe calibrate "
                "MODEL --text FILE --for edgemoe,corm"
            )

    @property
    def loaded(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.context.table.values()), reverse=True))

    def demands(self, routed: Routed) -> list[Demand]:
        return [Demand(e, tokens, self._bits_of(routed.layer, e)) for e, tokens in routed.tokens_per_expert().items()]

    def predicted(self, layer: int, ranked: Sequence[tuple[int, float]], expert: int) -> int:
        return self._bits_of(layer, expert)

    def _bits_of(self, layer: int, expert: int) -> int:
        return self.context.table.get((layer, expert), self.context.bits)


PRECISIONS = Registry[type[Precision]]("PRECISIONS", subclass_of(Precision), {
    "fixed": Fixed,
    "gate-score": GateScore,
    "popularity": Popularity,
    "table": Table,
})  # fmt: skip
