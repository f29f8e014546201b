"""What the engine spends beside kernels and waiting, for replays: seconds of deciding a layer under each preset, of a
load, and the link's rate, from runs of the engine on the text that a trace is recorded of.

With every expert resident a token takes T0. A run of preset P takes T0 for each of its passes, waits, and spends the
rest: `load` seconds for each load, the same under every preset, and `layer` seconds for each layer. Two runs without
prediction and with different numbers of loads (load on demand, LRU) tell these apart."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from tiermoe.engine.engine import Engine
from tiermoe.errors import ConfigError
from tiermoe.lab.trace import DECIDING, Costs, Deciding, Times
from tiermoe.offload.composition import Composition
from tiermoe.types import Load

NEEDED = ("io-free", "load-on-demand", "lru")
"""Presets that are run in any case."""

COST_CACHE = "45%"
"""Of the runs; replays of other sizes charge by layer and load."""


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """A link, as a replay has it: transfers share the bandwidth, each after the latency."""

    bandwidth: float  # bytes per second
    latency: float  # seconds before a transfer's first byte
    lanes: int  # transfers at once

    @staticmethod
    def of(nbytes: int, alone: float, together: float, count: int, lanes: int) -> LinkTimes:
        """Of a transfer of `nbytes` that took `alone` seconds, and of `count` at once that took `together`."""
        each = max((together - alone) / (count - 1), 0.1 * alone)  # a tenth: more at once are hardly slower than one
        return LinkTimes(nbytes / each, max(alone - each, 0.0), lanes)


_LOADS, _REPEATS = 8, 30


def measure_link(engine: Engine) -> LinkTimes:
    """The link of an engine that has resident experts, which are read again into their own slots."""
    cache, link, chance = engine.scheduler.loader.cache, engine.link, random.Random(0)
    resident = list(cache.resident.items())
    count = min(_LOADS, len(resident))
    if count < 2:
        raise ConfigError("a link is measured with at least two resident experts; run the model before")

    def seconds(number: int) -> float:
        began = time.perf_counter()
        for key, slot in chance.sample(resident, number):
            link.submit(Load(key, slot, True))
        for _ in range(number):
            if (error := link.wait().error) is not None:
                raise error
        return time.perf_counter() - began

    alone, together = (statistics.median(seconds(number) for _ in range(_REPEATS)) for number in (1, count))
    nbytes = round(fmean(engine.service.extent_of(key).nbytes for key, _ in resident))
    return LinkTimes.of(nbytes, alone, together, count, link.lanes)


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a run."""

    tokens: int
    seconds: float
    wait_s: float
    loads: int  # urgent and ahead
    passes: float  # over all layers, a token each in decoding

    def beside(self, resident_s: float, load_s: float) -> float:
        """Seconds of deciding: beside `resident_s` a pass, `load_s` a load and waiting."""
        return self.seconds - self.wait_s - self.passes * resident_s - self.loads * load_s


def phases(evaluated: Mapping[str, Any]) -> tuple[Phase, Phase]:
    """(decode, prefill) of what `tiermoe eval --json` prints."""
    decoded = evaluated["tokens"] - evaluated["windows"]  # the first token of each is of its prompt
    read = evaluated["prompt"] * evaluated["windows"]
    decode_loads = evaluated["decode_loads"]
    loads = evaluated["loads"] + evaluated["speculative_loads"] - decode_loads
    passes = decoded * (1 + evaluated["fallback_ratio"])
    wait_s = evaluated["wait_s"] - evaluated["decode_wait_s"]
    return (
        Phase(decoded, decoded / evaluated["decode_tok_s"], evaluated["decode_wait_s"], decode_loads, passes),
        Phase(read, read / evaluated["prefill_tok_s"], wait_s, loads, evaluated["windows"]),
    )


def costs_of(
    runs: Mapping[str, Mapping[str, Any]],
    compositions: Mapping[str, Composition],
    times: Times,
    used: Sequence[int],
    link: LinkTimes,
) -> tuple[Times, Costs]:
    """Times whose dense part is of a run with every expert resident, and costs, of runs by preset (`NEEDED` among
    them). used: experts of a token, by layer."""
    layers, found = len(used), {name: phases(run) for name, run in runs.items()}
    (free, free_prompt), on_demand, lru = (found[name] for name in NEEDED)
    resident, resident_prompt = free.seconds / free.passes, free_prompt.seconds / free_prompt.passes
    load = _load_seconds(on_demand[0], lru[0], resident)
    deciding = {
        name: Deciding(
            {part: str(compositions[name][part]) for part in DECIDING},
            max(decode.beside(resident, load) / (decode.passes * layers), 0.0),
            max(prefill.beside(resident_prompt, load) / (prefill.passes * layers), 0.0),
        )
        for name, (decode, prefill) in found.items()
    }
    experts = sum(used) * min(times.expert.values())
    dense = max(resident - experts, 0.0)
    costs = Costs(link.bandwidth, link.latency, link.lanes, load, deciding)
    return replace(times, dense=dense, layers=min(times.layers, dense)), costs


def _load_seconds(more: Phase, fewer: Phase, resident: float) -> float:
    """Seconds of a load, of two runs of the same decisions a layer with a different number of loads a pass."""
    loads = more.loads / more.passes - fewer.loads / fewer.passes
    seconds = more.beside(resident, 0) / more.passes - fewer.beside(resident, 0) / fewer.passes
    return max(seconds / loads, 0.0) if loads > 0 else 0.0
