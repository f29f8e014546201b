"""Weights of HOBBIT's cache, from a replay. Apart from `hobbit`: listing the presets imports no simulator."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from tiermoe.config import CacheSize
from tiermoe.lab.simulate.costs import shape_of, slot_sizes
from tiermoe.lab.simulate.evictions import run_instantly
from tiermoe.lab.simulate.link import InstantLink
from tiermoe.lab.simulate.steps import Step, steps_of
from tiermoe.lab.trace.file import Trace
from tiermoe.offload.assembly import assemble, cache_bytes, divide
from tiermoe.offload.composition import Composition

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
