"""Weights of HOBBIT's cache, from a replay. Apart from `hobbit`: listing the presets imports no simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tiermoe.config import CacheSize
from tiermoe.offload.assembly import assemble, cache_bytes, divide
from tiermoe.offload.composition import Composition
from tiermoe.simulate.costs import shape_of, slot_sizes
from tiermoe.simulate.evictions import run_instantly
from tiermoe.simulate.link import InstantLink
from tiermoe.simulate.steps import Step, steps_of
from tiermoe.trace.file import Trace

MOST_DEMANDS = 40_000  # of a replay: the search makes some forty of them

Weights = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """The weights of least penalty, with LRU's and LFU's on the same passes."""

    weights: Weights
    penalty: float
    lru_penalty: float
    lfu_penalty: float
    demands: int  # experts that layers needed

    @property
    def over_lru(self) -> float:
        """How much less penalty than LRU's: -0.1 for a tenth less."""
        return self.penalty / self.lru_penalty - 1

    @property
    def over_lfu(self) -> float:
        return self.penalty / self.lfu_penalty - 1


def find_weights(
    trace: Trace,
    composition: Composition,
    bits: int,
    cache: CacheSize,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FoundWeights:
    """The weights of least miss penalty among multiples of a quarter, by replays without prefetch and time (HOBBIT,
    section 3.4); in a tie the first, which has most recency. composition: with its thresholds. bits: of a high load.
    cache: of the runs that the weights are for. A trace of more than `MOST_DEMANDS` demands is cut off there."""
    penalty_of, demands = _penalties(trace, composition, bits, cache)
    candidates = list(simplex(4))
    best: tuple[float, Weights] | None = None
    for done, quarters in enumerate(candidates, 1):
        weights: Weights = (quarters[0] / 4, quarters[1] / 4, quarters[2] / 4, quarters[3] / 4)
        penalty = penalty_of("weighted", weights)
        if best is None or penalty < best[0]:
            best = penalty, weights
        progress(done, len(candidates))
    assert best is not None
    return FoundWeights(best[1], best[0], penalty_of("lru"), penalty_of("lfu"), demands)


def judge_weights(
    trace: Trace, composition: Composition, bits: int, cache: CacheSize, weights: Weights
) -> FoundWeights:
    """The penalty on this trace of weights that were found on another."""
    penalty_of, demands = _penalties(trace, composition, bits, cache)
    return FoundWeights(weights, penalty_of("weighted", weights), penalty_of("lru"), penalty_of("lfu"), demands)


def miss_penalty(
    trace: Trace, composition: Composition, bits: int, cache: CacheSize, name: str, weights: Weights | None = None
) -> float:
    """The miss penalty of eviction policy `name`: 1 for a high-precision load, bits_low / bits_high for a low one."""
    return _Penalty(trace, steps_of(trace, composition), composition, bits, cache)(name, weights)


def simplex(parts: int) -> Iterator[tuple[int, int, int, int]]:
    """All quadruples of whole numbers with the sum `parts`, the first number falling."""
    for a in range(parts, -1, -1):
        for b in range(parts - a, -1, -1):
            for c in range(parts - a - b, -1, -1):
                yield a, b, c, parts - a - b - c


class _Penalty:
    """Miss penalties of one composition with several eviction policies."""

    def __init__(self, trace: Trace, steps: list[Step], composition: Composition, bits: int, cache: CacheSize) -> None:
        header = trace.header
        self._steps = steps
        self._composition = replace(composition, prefetch="none")
        self._bits = bits
        self._shape = shape_of(header)
        sizes = slot_sizes(header, sorted({bits, composition["low_bits"]}))
        nbytes = cache_bytes(composition, cache, self._shape, sizes)
        self._slots = divide(nbytes, composition, sizes, (), sum(header.experts))

    def __call__(self, name: str, weights: Weights | None = None) -> float:
        # a load costs as many units as it has bits: 1 and bits_low / bits_high, times bits_high
        link = InstantLink(lambda key: key.bits)
        composition = self._composition.having({"cache": name, "weights": weights})
        scheduler = assemble(composition, self._shape, self._slots, link, self._bits)
        for _ in run_instantly(scheduler, self._steps):
            pass
        return link.bytes_read / self._bits


def _penalties(trace: Trace, composition: Composition, bits: int, cache: CacheSize) -> tuple[_Penalty, int]:
    """The penalties on a trace's first `MOST_DEMANDS` demands, and the number of demands."""
    steps = list(_first(steps_of(trace, composition), MOST_DEMANDS))
    return _Penalty(trace, steps, composition, bits, cache), sum(_demands(step) for step in steps)


def _first(steps: list[Step], demands: int) -> Iterator[Step]:
    for step in steps:
        if demands <= 0:
            return
        demands -= _demands(step)
        yield step


def _demands(step: Step) -> int:
    return sum(len({expert for row in layer.experts for expert in row}) for layer in step.layers)
