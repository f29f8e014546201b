"""EdgeMoE: its preset, and its offline search of a bitwidth for each expert within a tolerated loss (section 3.2). The
caller measures what a table of bits costs.

The paper bounds the bitwidths by measuring every precision for all experts, and then moves the K least important
experts to the lower one: K grows while the loss stays within the tolerated loss and shrinks otherwise. The paper names
no step; here it is halved each time: log2(experts) measurements instead of one for each expert.

Experts that look unimportant on one text by chance are the first to be lowered, so the loss on the text of the search
is too small: the result of `search` is judged on other text, and `accept` raises bits until the loss holds there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from tiermoe.errors import ConfigError
from tiermoe.lab.systems.ladder import Ladder
from tiermoe.offload.composition import Composition

PRESET = Composition(
    "edgemoe",
    "a bitwidth per expert within a tolerated loss, activation paths, distance-by-frequency eviction",
    "EdgeMoE (2023)",
    precision="table", prefetch="path", cache="distance", profile="edgemoe", quantizer="linear",
    dense_bits=16, own={"path": 2},
)  # fmt: skip

LADDER = Ladder(
    "IO-EXP, 16 bits",
    (
        ("bitwidths", {"precision": "fixed", "bits": 16}),
        ("preloading", {"prefetch": "none"}),
        ("buffer", {"cache": "none"}),
    ),
)
"""Section 4.4, figure 16."""


Place = tuple[int, int]
"""(MoE layer, expert)."""


class Loss(NamedTuple):
    """A relative loss, 0.05 for 5 %, and its standard error."""

    value: float
    error: float

    def within(self, tolerated: float) -> bool:
        """Whether the loss plus one standard error is at most `tolerated`."""
        return self.value + self.error <= tolerated


Lost = Callable[[Mapping[Place, int]], float]
"""Bits of every expert → the relative loss that they cost."""

Judge = Callable[[Mapping[Place, int]], Loss]
"""Bits of every expert → the loss with its error, on text that the search has not seen."""

PRECISIONS = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Bitwidths:
    """The table of bits that the search found: the `k` least important experts have `lower` bits, the others `upper`;
    k = 0 and `lower` = `upper` where one precision is tolerated for all and no lower one exists."""

    table: dict[Place, int]  # bits of every expert
    lower: int
    upper: int
    k: int
    loss: float  # measured with that very table
    uniform: dict[int, float]  # bits → loss of all experts at once
    mixed: dict[int, float] = field(default_factory=dict)  # k → loss, as measured on the way


def search(
    loss: Lost, importance: Mapping[Place, float], tolerated: float, precisions: Sequence[int] = PRECISIONS
) -> Bitwidths:
    """Bitwidths whose measured loss is at most `tolerated`. importance: what each expert costs alone at the lowest
    precision; in a tie the earlier layer, then the earlier expert goes first.

    The loss of the result was measured, and so was that of one expert more at the lower bitwidth, which is above the
    tolerated loss. Where the loss grows with K that is the largest K; with noisy measurements there may be larger ones.
    ConfigError, with the best that was found, where no precision is within the tolerated loss."""
    order = by_importance(importance)
    uniform = {bits: loss(dict.fromkeys(order, bits)) for bits in sorted(precisions, reverse=True)}
    lower, upper = bounds(uniform, tolerated)
    if lower == upper:
        return Bitwidths(dict.fromkeys(order, upper), lower, upper, 0, uniform[upper], uniform)
    mixed = {0: uniform[upper], len(order): uniform[lower]}

    def holds(k: int) -> bool:
        mixed[k] = loss(lowered(order, k, lower, upper))
        return mixed[k] <= tolerated

    k = _most(holds, len(order))
    return Bitwidths(lowered(order, k, lower, upper), lower, upper, k, mixed[k], uniform, mixed)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The table that holds on other text; fields as of `Bitwidths`."""

    table: dict[Place, int]
    lower: int
    upper: int
    k: int
    loss: Loss  # on the other text
    judged: dict[tuple[int, int, int], Loss]  # (lower, upper, k) → loss there, of every table that was tried


def accept(
    judge: Judge,
    found: Bitwidths,
    importance: Mapping[Place, float],
    tolerated: float,
    precisions: Sequence[int] = PRECISIONS,
) -> Accepted:
    """The table of fewest bytes, from those of `found` upwards, whose loss on other text is within `tolerated`,
    standard error included: fewer experts at the lower bitwidth, then the next higher pair of bitwidths. ConfigError,
    with the best table, where no precision is within it."""
    order = by_importance(importance)
    judged: dict[tuple[int, int, int], Loss] = {}

    def holds(lower: int, upper: int, k: int) -> bool:
        judged[lower, upper, k] = judge(lowered(order, k, lower, upper))
        return judged[lower, upper, k].within(tolerated)

    def accepted(lower: int, upper: int, k: int) -> Accepted:
        return Accepted(lowered(order, k, lower, upper), lower, upper, k, judged[lower, upper, k], judged)

    if holds(found.lower, found.upper, found.k):
        return accepted(found.lower, found.upper, found.k)
    higher = sorted(bits for bits in precisions if bits >= found.upper)
    pairs = [(found.lower, found.upper, found.k)] if found.k else []
    for lower, upper, beyond in pairs + [(lower, upper, len(order)) for lower, upper in pairwise(higher)]:
        if holds(lower, upper, 0):
            return accepted(lower, upper, _most(partial(holds, lower, upper), beyond))
    best = min(judged, key=lambda tried: judged[tried])
    loss = judged[best]
    raise ConfigError(
        f"no bitwidth keeps the loss on text that the search has not seen within {tolerated:.3%}: the best found is "
        f"{loss.value:.3%} ± {loss.error:.3%}, all experts at {best[1]} bits; tolerate that much, or measure on a "
        f"longer text"
    )


def _most(holds: Callable[[int], bool], beyond: int) -> int:
    """The largest K that was found to hold, by halving: 0 holds, `beyond` does not."""
    within = 0
    while beyond - within > 1:
        k = (within + beyond) // 2
        if holds(k):
            within = k
        else:
            beyond = k
    return within


def by_importance(importance: Mapping[Place, float]) -> list[Place]:
    """Experts, the least important one first; in a tie the earlier layer, then the earlier expert."""
    return sorted(importance, key=lambda place: (importance[place], place))


def bounds(uniform: Mapping[int, float], tolerated: float) -> tuple[int, int]:
    """(lower, upper): the bits on both sides of the tolerated loss. upper: the fewest bits within it; lower: the next
    fewer bits, or upper where there are none. ConfigError where no precision is within it."""
    within = [bits for bits, loss in uniform.items() if loss <= tolerated]
    if not within:
        best = min(uniform, key=lambda bits: uniform[bits])
        raise ConfigError(
            f"no bitwidth keeps the loss within {tolerated:.3%}: the best found is {uniform[best]:.3%}, all experts at "
            f"{best} bits; tolerate that much, or measure on a longer text"
        )
    upper = min(within)
    return max((bits for bits in uniform if bits < upper), default=upper), upper


def lowered(order: Sequence[Place], k: int, lower: int, upper: int) -> dict[Place, int]:
    """Bits of every expert: `lower` for the first `k` of `order`, `upper` for the others."""
    return {place: lower if index < k else upper for index, place in enumerate(order)}
