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

from tiermoe.config import CacheSize
from tiermoe.engine.engine import Engine
from tiermoe.lab.simulate import ReplaySettings, replay
from tiermoe.lab.trace import DECIDING, Costs, Deciding, Times, Trace
from tiermoe.offload.composition import Composition
from tiermoe.offload.presets import PRESETS
from tiermoe.types import ExpertKey, Load

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
    """The link that fills slots of a model's store when not all experts fit, by experts drawn at random."""
    service, chance = engine.service, random.Random(0)
    (bits,) = service.resolved.precisions
    keys = [ExpertKey(layer, each, bits) for layer, at in enumerate(engine.store.layers) for each in range(at.experts)]
    count = min(_LOADS, len(keys))
    tiers = service.tiers([(count, engine.plan.slot_bytes, False)])

    def seconds(number: int) -> float:
        began = time.perf_counter()
        for slot, key in enumerate(chance.sample(keys, number)):
            tiers.link.submit(Load(key, slot, True))
        for _ in range(number):
            if (error := tiers.link.wait().error) is not None:
                raise error
        return time.perf_counter() - began

    try:
        alone, together = (statistics.median(seconds(number) for _ in range(_REPEATS)) for number in (1, count))
        nbytes = round(fmean(service.extent_of(key).nbytes for key in keys))
        return LinkTimes.of(nbytes, alone, together, count, tiers.link.lanes)
    finally:
        tiers.link.close()


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


_TRIED = 512
"""Passes of a trace that a latency is fitted on."""


def with_latency(trace: Trace, runs: Mapping[str, Mapping[str, Any]]) -> Costs:
    """The costs of a trace with the latency at which a replay of load on demand waits as long as the engine did: a load
    in an engine takes longer than one on an idle machine, since threads wake each other and share the cores."""
    costs = trace.header.costs
    assert costs is not None
    decode, _ = phases(runs["load-on-demand"])
    wanted, passes = decode.wait_s / decode.tokens, trace.passes[:_TRIED]

    def waits(latency: float) -> float:
        tried = Trace(replace(trace.header, costs=replace(costs, latency=latency)), passes)
        settings = ReplaySettings(CacheSize(fraction=1.0), costs.bandwidth, latency, costs.lanes)
        found = replay(tried, PRESETS["load-on-demand"], settings).metrics.decode
        return found.wait_s / found.tokens

    low, high = 0.0, costs.latency + wanted  # a layer's loads wait for one latency at least
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if waits(middle) < wanted else (low, middle)
    return replace(costs, latency=(low + high) / 2)


def _load_seconds(more: Phase, fewer: Phase, resident: float) -> float:
    """Seconds of a load, of two runs of the same decisions a layer with a different number of loads a pass."""
    loads = more.loads / more.passes - fewer.loads / fewer.passes
    seconds = more.beside(resident, 0) / more.passes - fewer.beside(resident, 0) / fewer.passes
    return max(seconds / loads, 0.0) if loads > 0 else 0.0
