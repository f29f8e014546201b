"""Eviction policies alone: one global pool, no prefetch, no time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiermoe.config import CacheSize
from tiermoe.lab.simulate.costs import expert_bytes, run_bits, shape_of, slot_sizes
from tiermoe.lab.simulate.link import InstantLink
from tiermoe.lab.simulate.steps import Future, RecordedForecasts, Step, require, steps_of
from tiermoe.lab.trace import Trace
from tiermoe.metrics import Metrics, PhaseMetrics
from tiermoe.offload.assembly import FutureTrace, PrecisionSlots, assemble
from tiermoe.offload.composition import Composition
from tiermoe.offload.policies.eviction import EVICTIONS
from tiermoe.offload.scheduler import Scheduler

_EVEN = (0.25, 0.25, 0.25, 0.25)


@dataclass(frozen=True, slots=True)
class EvictionRow:
    """One policy at one cache size; hit rates as in `Result`."""

    eviction: str
    cache_fraction: float  # slots / experts
    slots: int
    hit_rate: float
    prefill_hit_rate: float | None
    belady_hit_rate: float


def compare_evictions(
    trace: Trace,
    names: list[str],
    caches: list[CacheSize],
    settings: Mapping[str, Any] | None = None,
    per_sequence: bool = False,
    seed: int = 0,
) -> list[EvictionRow]:
    """Every policy of `names` at every cache size, beside Belady's. settings: of those that declare them; the weights
    of 'weighted' are equal ones where none are given."""
    header = trace.header
    bits = run_bits(header)
    unit = slot_sizes(header, [bits])[bits]
    experts = sum(header.experts)
    rows = []
    for cache in caches:
        asked = int(cache.fraction * experts) if cache.fraction is not None else (cache.nbytes or 0) // unit
        slots = min(max(asked, 1), experts)
        belady = hits_of(trace, "belady", slots, bits)
        for name in names:
            run = belady if name == "belady" else hits_of(trace, name, slots, bits, settings, per_sequence, seed)
            rates = run.headline_hit_rate, run.prefill.counts.hit_rate, belady.headline_hit_rate
            rows.append(EvictionRow(name, slots / experts, slots, *rates))
    return rows


def hits_of(
    trace: Trace,
    name: str,
    slots: int,
    bits: int,
    settings: Mapping[str, Any] | None = None,
    per_sequence: bool = False,
    seed: int = 0,
) -> Metrics:
    """Hits, misses and bytes of one pool of `slots` equal slots under policy `name`. With 'belady' the most that any
    policy can hit there. TraceError if the trace lacks what the policy reads."""
    header = trace.header
    own = {"weights": _EVEN, **(settings or {})}
    composition = Composition(name, "", cache=name, records="sequence" if per_sequence else "model", own=own)
    require(composition, header)
    steps = steps_of(trace, composition)
    future = Future(steps, len(header.experts))
    link = InstantLink(lambda key: expert_bytes(header, key.layer, key.bits))
    foresight = FutureTrace(future.next_use, future.choices)
    scheduler = assemble(
        composition, shape_of(header), [PrecisionSlots((bits,), slots)], link, bits, None, foresight, seed
    )
    metrics, before = Metrics(), PhaseMetrics()
    for step in run_instantly(scheduler, steps, future):
        now = PhaseMetrics(bytes_read=link.bytes_read, counts=scheduler.loader.counts.copy())
        metrics.by_phase[step.phase].add(now.since(before), step.size)
        before = now
    return metrics


def run_instantly(scheduler: Scheduler, steps: Sequence[Step], future: Future | None = None) -> Iterator[Step]:
    """Runs `steps` on a scheduler over an `InstantLink`; yields each step after it ran. future: of these very steps,
    for a policy that knows it."""
    sequence: int | None = None
    for number, step in enumerate(steps):
        if step.sequence != sequence:
            sequence = step.sequence
            scheduler.new_sequence()
        forecasts = RecordedForecasts(step)
        if future is not None:
            future.start_step(number)
        scheduler.begin_pass(step.size, forecasts, step.phase, step.running[0])
        for layer in step.running:
            if future is not None:
                future.start_layer(layer)
            for _ in scheduler.run_layer(step.routed(layer), forecasts):
                pass
        yield step


def all_evictions(weights: bool = True) -> list[str]:
    """The names of the policies that need no calibration, Belady's last. weights: those that read gate weights too."""
    skipped = {"belady", *(name for name, policy in EVICTIONS.items() if getattr(policy, "reads_table", ""))}
    skipped |= {name for name, policy in EVICTIONS.items() if getattr(policy, "reads_weights", False) and not weights}
    return [*(name for name in EVICTIONS if name not in skipped), "belady"]
