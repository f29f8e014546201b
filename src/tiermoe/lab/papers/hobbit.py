"""HOBBIT: *A Mixed Precision Expert Offloading System for Fast MoE Inference* (2024). Its preset, its calibration
(thresholds from the distribution of unimportance scores, the weights of its cache from replays), its figures.

A command that names the preset loads no simulator: what replays imports it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tiermoe.config import CacheSize
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
    bytes_a_token,
    hit_rate,
    prompts,
    waiting,
)
from tiermoe.lab.papers.statistics import decode_passes
from tiermoe.lab.sizes import MIXTRAL
from tiermoe.lab.trace import Trace
from tiermoe.offload.assembly import assemble, cache_bytes, divide
from tiermoe.offload.composition import Composition
from tiermoe.offload.policies.precision import thresholds, unimportance

if TYPE_CHECKING:
    from tiermoe.lab.simulate.steps import Step

PRESET = Composition(
    "hobbit",
    "low precision or none for unimportant misses, stacked gates, a weighted cache in two pools",
    "HOBBIT, mixed-precision expert loading (2024)",
    precision="gate-score", prefetch="stacked-gates", cache="weighted", records="sequence", start="together",
    profile="hobbit", low_share=0.2, own={"ahead": 3},
)  # fmt: skip

LADDER = Ladder(
    "LRU, one precision",
    (
        ("dynamic loading", {"precision": "fixed", "low_share": 0}),
        ("prefetch", {"prefetch": "none"}),
        ("weighted cache", {"cache": "lru"}),
    ),
)
"""In the order of section 5.5, which measures each mechanism by itself."""


HIGH_SHARE, SKIP_SHARE = 0.67, 0.03
"""Shares of the scores that are high and skipped, as with the paper's thresholds in Mixtral (section 3.2: 67 % high,
30 % low, 3 % skipped)."""


def scores(trace: Trace) -> list[float]:
    """The unimportance of every expert of every decoded token."""
    return [
        score
        for passed in decode_passes(trace)
        for layer in passed.layers
        for gates in layer.weights
        for score in unimportance(gates)
    ]


def thresholds_of(trace: Trace, high_share: float = HIGH_SHARE, skip_share: float = SKIP_SHARE) -> tuple[float, float]:
    """(t1, t2) that split the trace's scores. With one expert per token all are 0 and high."""
    return thresholds(scores(trace), high_share, skip_share)


@dataclass(frozen=True, slots=True)
class Split:
    """Shares of the scores that two thresholds make."""

    high: float
    low: float
    skipped: float

    @staticmethod
    def of(trace: Trace, t1: float, t2: float) -> Split:
        found = scores(trace)
        high = sum(score <= t1 for score in found) / len(found)
        skipped = sum(score > t2 for score in found) / len(found)
        return Split(high, 1 - high - skipped, skipped)


def split_scores(t1: float, t2: float, part: str) -> counted.Statistic:
    """The share of decoded tokens' experts that two thresholds make 'high', 'low' or 'skipped'."""
    return lambda trace: float(getattr(Split.of(trace, t1, t2), part))


MOST_DEMANDS = 40_000  # of a replay: the search makes some forty of them

Weights = tuple[float, ...]

WEIGHTS: list[Weights] = [each for each in itertools.product((1.0, 0.75, 0.5, 0.25, 0.0), repeat=4) if sum(each) == 1]
"""What is tried; weights of recency come first."""


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """The weights of least penalty, with LRU's and LFU's on the same passes."""

    weights: Weights
    penalty: float
    lru_penalty: float
    lfu_penalty: float

    @property
    def over_lru(self) -> float:
        """How much less penalty than LRU's: -0.1 for a tenth less."""
        return self.penalty / self.lru_penalty - 1

    @property
    def over_lfu(self) -> float:
        return self.penalty / self.lfu_penalty - 1


class MissPenalties:
    """Miss penalties of a composition with several eviction policies, by replays of a trace without prefetch and time
    (HOBBIT, section 3.4). composition: with its thresholds. bits: of a high load. cache: of the runs that the weights
    are for. `demands`: experts that layers needed; after `MOST_DEMANDS` of them the trace is cut off."""

    def __init__(self, trace: Trace, composition: Composition, bits: int, cache: CacheSize) -> None:
        from tiermoe.lab.simulate.costs import shape_of, slot_sizes
        from tiermoe.lab.simulate.steps import steps_of

        header = trace.header
        self.demands = 0
        self._steps: list[Step] = []
        for step in steps_of(trace, composition):
            if self.demands >= MOST_DEMANDS:
                break
            self._steps.append(step)
            self.demands += sum(len({expert for row in layer.experts for expert in row}) for layer in step.layers)
        self._composition = replace(composition, prefetch="none")
        self._bits = bits
        self._shape = shape_of(header)
        sizes = slot_sizes(header, sorted({bits, composition["low_bits"]}))
        nbytes = cache_bytes(composition, cache, self._shape, sizes)
        self._slots = divide(nbytes, composition, sizes, (), sum(header.experts))

    def of(self, eviction: str, weights: Weights | None = None) -> float:
        """1 for each high-precision load, bits_low / bits_high for each low one."""
        from tiermoe.lab.simulate.evictions import run_instantly
        from tiermoe.lab.simulate.link import InstantLink

        # a load costs as many units as it has bits: 1 and bits_low / bits_high, times bits_high
        link = InstantLink(lambda key: key.bits)
        composition = self._composition.having({"cache": eviction, "weights": weights})
        scheduler = assemble(composition, self._shape, self._slots, link, self._bits)
        for _ in run_instantly(scheduler, self._steps):
            pass
        return link.bytes_read / self._bits

    def judge(self, weights: Weights) -> FoundWeights:
        """Weights beside LRU and LFU."""
        return FoundWeights(weights, self.of("weighted", weights), self.of("lru"), self.of("lfu"))

    def search(self, progress: Callable[[int, int], None] = lambda done, total: None) -> FoundWeights:
        """The first of `WEIGHTS` with the least penalty."""
        tried: dict[Weights, float] = {}
        for weights in WEIGHTS:
            tried[weights] = self.of("weighted", weights)
            progress(len(tried), len(WEIGHTS))
        return self.judge(min(tried, key=tried.__getitem__))


RTX_4090, ORIN = Place("rtx4090", sizes=MIXTRAL), Place("jetson-orin", sizes=MIXTRAL)
OURS = Side("hobbit", {"low_bits": "4"}, 16)  # float16 with int4, as on the RTX 4090 (table 2)
ON_ORIN = Side("hobbit", {"low_bits": "2"}, 8)  # int8 with int2
OFFLOADING = Side("mixtral-offload", bits=16)
FIDDLER = Side("lru", {"misses": "measured"}, 16)
FASTER = FIDDLER.but(cpu=5 / 3)
"""Section 5.4: PyTorch computes an expert of Mixtral in 3 ms where llama.cpp's interface takes 5."""
ALONE = OURS.but(prefetch="none")
EXACT = Side("hobbit", {"precision": "fixed", "low_share": "0"}, 16)


def _evictions(place: Place, policy: Side) -> Ratio:
    """The miss penalty of HOBBIT's cache over another's: the bytes read on demand, as an expert costs its bytes."""
    return Ratio(ALONE, policy.but(prefetch="none"), place, bytes_a_token)


def _ahead(distance: int) -> tuple[Row, Row]:
    papers = {1: "96 %", 2: "90 %", 3: "90 %"}
    return (
        Row(f"the first expert of layer + {distance} is predicted", papers[distance],
            Counted(counted.first_predicted(distance), ".1%")),
        Row(f"all K of layer + {distance}", "", Counted(counted.recall_of("next-gate", distance), ".1%")),
    )  # fmt: skip


OVER = Ratio(OURS, OFFLOADING, RTX_4090)
READ = replace(OVER, figure=prompts)
OTHERS = {
    "t1=.5 t2=.75": replace(OVER, ours=OURS.but(t1=0.5, t2=0.75)),
    "all but the first rank low": replace(OVER, ours=OURS.but(t1=0, t2=0.99, low_share=0.5)),
    "8 + 2 bits beside 16 in the same bytes": replace(OVER, ours=ON_ORIN.but(share_of=16)),
    **OVER.shares("25%", "60%"),
}
DYNAMIC, DYNAMIC_ORIN = (Ratio(side.but(prefetch="none"), EXACT.but(prefetch="none", bits=side.bits), place)
                         for side, place in ((OURS, RTX_4090), (ON_ORIN, ORIN)))  # fmt: skip


PAPER = Paper(
    "hobbit",
    "HOBBIT: A Mixed Precision Expert Offloading System for Fast MoE Inference (2024)",
    [
        Figure("figure 3a", "share of a token's time that loads take, on demand", [
            Row("RTX 4090, 16 bits", "85.5 %", Replayed(Side("load-on-demand", bits=16), RTX_4090, waiting, ".1%")),
            Row("Jetson Orin, 8 bits", "94.5 %", Replayed(Side("load-on-demand", bits=8), ORIN, waiting, ".1%"),
                given=RATE),
        ]),
        Figure("figure 5b", "scores that T1 = .6 and T2 = .9 split", [
            Row("high precision", "67 %", Counted(split_scores(0.6, 0.9, "high"), ".1%")),
            Row("low precision", "30 %", Counted(split_scores(0.6, 0.9, "low"), ".1%")),
            Row("skipped", "3 %", Counted(split_scores(0.6, 0.9, "skipped"), ".1%")),
        ]),
        Figure("figure 7b", "prediction by a later layer's gate", [row for each in (1, 2) for row in _ahead(each)]),
        Figure("figure 10a", "use by the next token", [
            Row("the first expert", "above .25", Counted(counted.first_is_used_again, ".2f")),
            Row("the first expert, were routing even", ".25", Counted(counted.first_at_random, ".2f"), given="K of E"),
            Row("at least one", "above .46", Counted(counted.one_is_used_again, ".2f")),
            Row("at least one, were routing even", ".46", Counted(counted.one_at_random, ".2f"), given="K of E"),
        ]),
        Figure("figure 10b", "what a layer's most used quarter of the experts serves", [
            Row("within a sequence", "", Counted(counted.most_used(0.25, per_sequence=True), ".1%")),
            Row("in all sequences", "nearly 25 %", Counted(counted.most_used(0.25, per_sequence=False), ".1%")),
        ]),
        Figure("figure 11b", "miss penalty of LHU over LFU", [
            Row("16 and 4 bits", ".85 for three experts", Ratio(ALONE.but(weights="0,0,1,0"),
                ALONE.but(weights="0,1,0,0"), RTX_4090, bytes_a_token)),
        ]),
        Figure("figure 14", "speed beside others; RTX 4090, float16 with int4", [
            Row("decoding over MoE-Offloading", "3.21, 3.29", OVER, OTHERS),
            Row("prompts over MoE-Offloading", "2.0, 2.2", READ, {
                "no room kept for low copies, which a prompt hardly has": replace(READ, ours=OURS.but(low_share=0))}),
        ]),
        Figure("table 3", "loss of perplexity, for that of tasks", [
            Row("16 and 4 bits", "at most 1 %", Loss(OURS)),
            Row("8 and 2 bits", "at most 1 %", Loss(ON_ORIN)),
        ]),
        Figure("figure 15", "the CPU computes misses beside the GPU, RTX 4090", [
            Row("decoding over Fiddler (`misses=measured`, no prefetch)", ".99, 1.46",
                Ratio(OURS.but(misses="cpu"), FIDDLER, RTX_4090),
                {"Fiddler's CPU: 3 ms an expert, HOBBIT's 5": Ratio(OURS.but(misses="cpu"), FASTER, RTX_4090)}),
            Row("decoding over HOBBIT without the CPU", "", Ratio(OURS.but(misses="cpu"), OURS, RTX_4090)),
        ]),
        Figure("figure 16", "dynamic loading alone", [
            Row("RTX 4090, 16 and 4 bits", "1.19 to 1.57 on all", DYNAMIC, {
                "4 and 2 bits": Ratio(ALONE.but(bits=4, low_bits=2), EXACT.but(prefetch="none", bits=4), RTX_4090)}),
            Row("Jetson Orin, 8 and 2 bits", "the highest of all", DYNAMIC_ORIN),
        ]),
        Figure("figure 17b", "layers predicted, RTX 4090", [
            *(Row(f"p = {ahead}, decoding over p = 0, 16 and 4 bits", "1.05" if ahead == 1 else "",
                  Ratio(OURS.but(ahead=ahead), ALONE, RTX_4090)) for ahead in (1, 2, 3)),
            Row("p = 1, decoding, 16 bits alone", "1.01, below 1", Ratio(EXACT.but(ahead=1),
                EXACT.but(prefetch="none"), RTX_4090)),
            Row("p = 1, prompts, 16 and 4 bits", "1.1", Ratio(OURS.but(ahead=1), ALONE, RTX_4090, prompts)),
        ]),
        Figure("figure 18a", "miss penalty over other caches', RTX 4090", [
            Row("over LRU", ".91 to .95", _evictions(RTX_4090, OURS.but(cache="lru"))),
            Row("over LFU of the sequence", ".96 to .98",
                _evictions(RTX_4090, OURS.but(cache="lfu", records="sequence"))),
            Row("over random choice", "", _evictions(RTX_4090, OURS.but(cache="random"))),
        ]),
        Figure("figure 18b", "LFU by sequence and by model", [
            Row("hits, by sequence", "4.5 % more", Replayed(EXACT.but(prefetch="none", cache="lfu",
                records="sequence"), RTX_4090, hit_rate, ".1%")),
            Row("hits, by model", "", Replayed(EXACT.but(prefetch="none", cache="lfu", records="model"), RTX_4090,
                hit_rate, ".1%")),
        ]),
    ],
    {
        "figure 3b": "no command sets the share of experts that are skipped or replaced: t1 and t2 follow scores",
        "figure 5a": "an observer gets the router's weights and not each expert's output",
        "figure 7a": "a trace holds choices and not hidden states",
        "figure 11a": "a drawing of one layer",
        "figure 17a": "needs a GPU: stacked gates are one product here",
    },
)  # fmt: skip
