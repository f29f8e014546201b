"""EdgeMoE: *Fast On-Device Inference of MoE-based Large Language Models* (2023). Its preset, its calibration (an
offline search of a bitwidth for each expert within a tolerated loss, section 3.2; the caller measures what a table of
bits costs), its figures.

The paper bounds the bitwidths by measuring every precision for all experts, and then moves the K least important
experts to the lower one: K grows while the loss stays within the tolerated loss and shrinks otherwise. The paper names
no step; here it is halved each time: log2(experts) measurements instead of one for each expert.

Experts that look unimportant on one text by chance are the first to be lowered, so the loss on the text of the search
is too small: the result of `search` is judged on other text, and `accept` raises bits until the loss holds there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from tiermoe.errors import ConfigError
from tiermoe.lab.papers import statistics as counted
from tiermoe.lab.papers.figure import (
    RATE,
    Counted,
    Figure,
    Ladder,
    Loss,
    Paper,
    Place,
    Ratio,
    Replayed,
    Row,
    Side,
    decoding,
    rungs,
)
from tiermoe.lab.sizes import ST_BASE_8
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


ExpertPlace = tuple[int, int]
"""(MoE layer, expert)."""


class RelativeLoss(NamedTuple):
    """A relative loss, 0.05 for 5 %, and its standard error."""

    value: float
    error: float

    def within(self, tolerated: float) -> bool:
        """Whether the loss plus one standard error is at most `tolerated`."""
        return self.value + self.error <= tolerated


Lost = Callable[[Mapping[ExpertPlace, int]], float]
"""Bits of every expert → the relative loss that they cost."""

Judge = Callable[[Mapping[ExpertPlace, int]], RelativeLoss]
"""Bits of every expert → the loss with its error, on text that the search has not seen."""

PRECISIONS = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Bitwidths:
    """The table of bits that the search found: the `k` least important experts have `lower` bits, the others `upper`;
    k = 0 and `lower` = `upper` where one precision is tolerated for all and no lower one exists."""

    table: dict[ExpertPlace, int]  # bits of every expert
    lower: int
    upper: int
    k: int
    loss: float  # measured with that very table
    uniform: dict[int, float]  # bits → loss of all experts at once
    mixed: dict[int, float] = field(default_factory=dict)  # k → loss, as measured on the way


def search(
    loss: Lost, importance: Mapping[ExpertPlace, float], tolerated: float, precisions: Sequence[int] = PRECISIONS
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

    table: dict[ExpertPlace, int]
    lower: int
    upper: int
    k: int
    loss: RelativeLoss  # on the other text
    judged: dict[tuple[int, int, int], RelativeLoss]  # (lower, upper, k) → loss there, of every table that was tried


def accept(
    judge: Judge,
    found: Bitwidths,
    importance: Mapping[ExpertPlace, float],
    tolerated: float,
    precisions: Sequence[int] = PRECISIONS,
) -> Accepted:
    """The table of fewest bytes, from those of `found` upwards, whose loss on other text is within `tolerated`,
    standard error included: fewer experts at the lower bitwidth, then the next higher pair of bitwidths. ConfigError,
    with the best table, where no precision is within it."""
    order = by_importance(importance)
    judged: dict[tuple[int, int, int], RelativeLoss] = {}

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


def by_importance(importance: Mapping[ExpertPlace, float]) -> list[ExpertPlace]:
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


def lowered(order: Sequence[ExpertPlace], k: int, lower: int, upper: int) -> dict[ExpertPlace, int]:
    """Bits of every expert: `lower` for the first `k` of `order`, `upper` for the others."""
    return {place: lower if index < k else upper for index, place in enumerate(order)}


TX2, CARD, HDD = (Place(name, "20%", ST_BASE_8) for name in ("jetson-tx2", "raspberry-pi-4b", "jetson-tx2-hdd"))
OURS, IO_EXP, IO_QEXP = Side("edgemoe"), Side("load-on-demand", bits=16), Side("io-qexp")
STI, KEPT = Side("sti"), Side("sti", {"cache": "belady"})
POLICIES = {"EdgeMoE's": "distance", "LFU": "lfu", "LRU": "lru", "FIFO": "fifo", "random": "random"}
SHARES = (0.1, 0.2, 0.4)


def _latencies() -> list[Row]:
    on_demand = Ratio(OURS, IO_EXP, TX2)
    shards = Ratio(OURS, STI, TX2)
    kept = {f"{share} of the shards kept": replace(shards, theirs=KEPT.but(share=share)) for share in
            ("20%", "45%", "60%", "80%", "85%", "90%", "100%")}  # fmt: skip
    return [
        Row("over IO-EXP, TX2 with an SSD", "2.63 to 3.01", on_demand),
        Row("over IO-EXP, Raspberry Pi with a card", "4.49 to 5.43", replace(on_demand, place=CARD),
            replace(on_demand, place=CARD).shares("25%")),
        Row("over IO-EXP, TX2 with an HDD", "4.49 to 4.76", replace(on_demand, place=HDD)),
        Row("over IO-QEXP, TX2", "1.35 to 1.5", Ratio(OURS, IO_QEXP, TX2), Ratio(OURS, IO_QEXP, TX2).shares("25%")),
        Row("over STI, TX2", "1.11 to 2.78", shards, kept | {
            "shards at 2 bits": replace(shards, theirs=KEPT.but(bits=2)),
            "routed experts alone": replace(shards, theirs=STI.but(routing="all", prefetch="none"))}),
    ]  # fmt: skip


PAPER = Paper(
    "edgemoe",
    "EdgeMoE: Fast On-Device Inference of MoE-based Large Language Models (2023)",
    [
        Figure("figure 3", "a token's time over that with every expert in memory", [
            Row("TX2 with an SSD", "3.2 to 3.9", Ratio(Side("io-free", bits=16), IO_EXP, TX2), given=RATE),
            Row("Raspberry Pi with a card", "3.3 to 3.8", Ratio(Side("io-free", bits=16), IO_EXP, CARD), given=RATE),
        ]),
        Figure("figure 4", "activation paths", [
            Row("tokens on the most frequent 20 % of the paths", "99 %", Counted(counted.paths_covered(0.2), ".1%")),
            Row("were layers independent", "", Counted(counted.paths_covered(0.2, apart=17), ".1%")),
        ]),
        Figure("figure 6", "loss of perplexity, for that of ROUGE-2", [
            Row("experts at 4 bits", "1.30 to 1.44 %",
                Loss(Side("lru", {"quantizer": "linear", "dense_bits": "16"}))),
            Row("experts at 2 bits", "5.8 % and more",
                Loss(Side("lru", {"quantizer": "linear", "dense_bits": "16"}, 2))),
            Row("all weights at 4 bits", "unusable",
                Loss(Side("lru", {"quantizer": "linear", "dense_bits": "4"}))),
        ]),
        Figure("figure 8", "K likeliest experts of the next layer, which it then uses", [
            Row("nothing known", "nearly even", Counted(counted.recall_of("frequent"), ".1%")),
            Row("one layer known", "", Counted(counted.recall_of("path 1"), ".1%")),
            Row("two layers known", "87 % of one expert", Counted(counted.recall_of("path 2"), ".1%")),
        ]),
        Figure("figure 10", "memory of all experts at 16 bits over EdgeMoE's", [
            Row("a fifth of the experts at 4 bits", "2.6 to 3.2", Counted(counted.memory_saved(0.2, 4), ".2f"),
                given="a fifth of the experts, and their bytes at 4 bits"),
        ]),
        Figure("figure 11", "speed over the baselines'", _latencies()),
        Figure("table 2", "bytes and loss", [
            Row("bytes of an expert at 16 bits over 4", "2.9 to 4", Counted(counted.bytes_moved(4), ".2f"),
                given="the format of 4 bits"),
            Row("loss of EdgeMoE", "4.9 %", Loss(OURS)),
            Row("loss of STI", "20 to 25 %", Loss(STI)),
        ]),
        Figure("figure 13", "hits of eviction policies without preloading", [
            Row(f"{name}, {share:.0%} of the experts", "the most" if key == "distance" else "",
                Counted(counted.hits(key, share), ".1%"),
                {"as the formula is printed": Counted(counted.hits(key, share, distance="behind"), ".1%")}
                if key == "distance" else {}) for share in SHARES for name, key in POLICIES.items()
        ]),
        Figure("figure 14", "speed over IO-QEXP by budget, TX2", [
            Row(f"{share:.0%} of the experts, over {bits} bits", "above 1",
                Ratio(OURS, IO_QEXP.but(bits=bits), replace(TX2, share=f"{share:.0%}")),
                Ratio(OURS, IO_QEXP.but(bits=bits), TX2).shares("40%") if bits == 2 and share != 0.4 else {})
            for share in SHARES for bits in (4, 2)
        ]),
        Figure("figure 15", "tokens a second, TX2, by precision in the place of the tolerated loss", [
            Row(f"every expert at {bits} bits", "rises with the loss",
                Replayed(OURS.but(precision="fixed", bits=bits), TX2, decoding, ".2f")) for bits in (8, 4, 2)
        ]),
        Figure("figure 16", "speed over IO-EXP, part by part, TX2",
               rungs(PRESET, LADDER, TX2, ("2.01", "2.59", "3.22"))),
    ],
    {
        "figure 2": "is of other papers",
        "figure 7": "tiermoe calibrate --for edgemoe measures each expert's importance; another quantiser is not built",
        "figure 12": "a distribution over requests: tiermoe simulate prints means",
    },
)  # fmt: skip
