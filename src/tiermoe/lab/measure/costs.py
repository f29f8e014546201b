"""What the engine spends beside kernels and waiting, for replays: seconds of deciding a layer under each preset, of a
load, and the link's rate, from runs of the engine on the text that a trace is recorded of.

With every expert resident a token takes T0. A run of preset P takes T0 for each of its passes, waits, and spends the
rest: `load` seconds for each load, the same under every preset, and `layer` seconds for each layer. Two runs without
prediction and with different numbers of loads (load on demand, LRU) tell these apart."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tiermoe.config import parse_cache
from tiermoe.lab.simulate import ReplaySettings, replay
from tiermoe.lab.trace import DECIDING, Costs, Deciding, Times, Trace
from tiermoe.offload.composition import Composition
from tiermoe.offload.presets import PRESETS

NEEDED = ("io-free", "load-on-demand", "lru")
"""Presets that are run in any case."""

COST_CACHE = "45%"
"""Of the runs; replays of other sizes charge by layer and load."""


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
    lanes: int,
) -> tuple[Times, Costs]:
    """Times whose dense part is of a run with every expert resident, and costs, without their link (`with_link`), of
    runs by preset (`NEEDED` among them). used: experts of a token, by layer. lanes: reads at once."""
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
    costs = Costs(0.0, 0.0, lanes, load, deciding, _copy_rate())
    return replace(times, dense=dense, layers=min(times.layers, dense)), costs


_COPIED, _COPIES = 1 << 28, 5


def _copy_rate() -> float:
    """Bytes per second of a copy within main memory by one thread, beyond the processor's caches."""
    source, target = (torch.zeros(_COPIED, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(_COPIES):
        began = time.perf_counter()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), _COPIED)
        seconds.append(time.perf_counter() - began)
    return _COPIED / min(seconds)


_TRIED = 160
"""Passes of a trace that a link is fitted on."""

_HALVINGS = 10


def with_link(trace: Trace, runs: Mapping[str, Mapping[str, Any]]) -> Costs:
    """The costs of a trace with the bandwidth and the latency at which replays of load on demand and of LRU wait as
    long as the engine did. A load in an engine takes longer than one on an idle machine, since threads wake each other
    and share the cores; the two presets differ in how many loads a layer waits for."""
    costs, passes = trace.header.costs, trace.passes[:_TRIED]
    assert costs is not None
    on_demand, lru = (each.wait_s / each.tokens for each in (phases(runs[name])[0] for name in NEEDED[1:]))

    def waits(name: str, bandwidth: float, latency: float) -> float:
        settings = ReplaySettings(parse_cache(COST_CACHE), bandwidth, latency, costs.lanes)
        found = replay(Trace(trace.header, passes), PRESETS[name], settings).metrics.decode
        return found.wait_s / found.tokens

    def latency_of(bandwidth: float) -> float:
        return _bisected(0.0, on_demand, lambda each: waits("load-on-demand", bandwidth, each) < on_demand)

    # the faster, the more of a load is latency, which LRU's fewer loads a layer wait for as long as all of them
    slowest = 2 ** _bisected(10.0, 44.0, lambda each: waits("load-on-demand", 2**each, 0.0) > on_demand)
    faster = _bisected(0.0, 8.0, lambda each: waits("lru", slowest * 2**each, latency_of(slowest * 2**each)) < lru)
    bandwidth = slowest * 2**faster
    return replace(costs, bandwidth=bandwidth, latency=latency_of(bandwidth))


def _bisected(low: float, high: float, is_below: Callable[[float], bool]) -> float:
    """Where `is_below`, which holds from `low` on, ends."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return (low + high) / 2


def _load_seconds(more: Phase, fewer: Phase, resident: float) -> float:
    """Seconds of a load, of two runs of the same decisions a layer with a different number of loads a pass."""
    loads = more.loads / more.passes - fewer.loads / fewer.passes
    seconds = more.beside(resident, 0) / more.passes - fewer.beside(resident, 0) / fewer.passes
    return max(seconds / loads, 0.0) if loads > 0 else 0.0
