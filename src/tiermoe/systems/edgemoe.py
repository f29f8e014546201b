"""EdgeMoE: its preset, and its offline search of a bitwidth for each expert within a tolerated loss (section 3.2). What
a table of bits costs is measured by whoever calls.

The paper bounds the bitwidths by measuring every precision for all experts, and then moves the K least important
experts to the lower one: K grows while the loss stays within what is tolerated and shrinks otherwise. It names no step;
here it is halved each time: log2(experts) measurements, where a step of one expert would take as many as experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tiermoe.decide.composition import Composition
from tiermoe.errors import ConfigError

PRESET = Composition(
    "edgemoe",
    "a bitwidth per expert within a tolerated loss, activation paths, distance-by-frequency eviction",
    "EdgeMoE (2023)",
    precision="table", prefetch="path", cache="distance", profile="edgemoe", quantizer="linear",
    own={"path": 2},
)  # fmt: skip


Place = tuple[int, int]
"""(MoE layer, expert)."""

Loss = Callable[[Mapping[Place, int]], float]
"""Bits of every expert → the relative loss that they cost, 0.05 for 5 %."""

PRECISIONS = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Bitwidths:
    """What the search found. `table`: bits of every expert; the `k` least important have `lower`, the others `upper`
    (k = 0 and `lower` = `upper` where one precision is tolerated for all and no lower one exists). `loss`: measured
    with that very table. `uniform`: bits → loss of all experts at once. `mixed`: k → loss, as measured on the way."""

    table: dict[Place, int]
    lower: int
    upper: int
    k: int
    loss: float
    uniform: dict[int, float]
    mixed: dict[int, float] = field(default_factory=dict)


def search(
    loss: Loss, importance: Mapping[Place, float], tolerated: float, precisions: Sequence[int] = PRECISIONS
) -> Bitwidths:
    """Bitwidths whose measured loss is at most `tolerated`. importance: what each expert costs alone at the lowest
    precision; of equal ones the earlier layer, then the earlier expert goes first.

    The result's own loss was measured, and so was one expert more at the lower bitwidth, which costs more than is
    tolerated. Where the loss grows with K that is the largest K; where measuring is noisy there may be larger ones.
    ConfigError, with the best that was found, where no precision is within the tolerated loss."""
    order = sorted(importance, key=lambda place: (importance[place], place))
    uniform = {bits: loss(dict.fromkeys(order, bits)) for bits in sorted(precisions, reverse=True)}
    lower, upper = bounds(uniform, tolerated)
    if lower == upper:
        return Bitwidths(dict.fromkeys(order, upper), lower, upper, 0, uniform[upper], uniform)
    mixed = {0: uniform[upper], len(order): uniform[lower]}
    within, beyond = 0, len(order)
    while beyond - within > 1:
        k = (within + beyond) // 2
        mixed[k] = loss(lowered(order, k, lower, upper))
        if mixed[k] <= tolerated:
            within = k
        else:
            beyond = k
    return Bitwidths(lowered(order, within, lower, upper), lower, upper, within, mixed[within], uniform, mixed)


def bounds(uniform: Mapping[int, float], tolerated: float) -> tuple[int, int]:
    """(lower, upper): the neighbours of the tolerated loss. Upper is the fewest bits within it, lower the next fewer
    ones, which are beyond it; the same twice where there are none. ConfigError where no precision is within it."""
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
