"""Eviction policies alone: one global pool, no prefetch, no time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tiermoe.config import CacheSize
from tiermoe.decide.compose import Foresight, ModelShape, PrecisionSlots, assemble
from tiermoe.decide.composition import Composition
from tiermoe.decide.counts import Counts
from tiermoe.decide.eviction import EVICTIONS
from tiermoe.decide.phase_costs import PhaseCosts
from tiermoe.simulate.costs import expert_bytes, run_bits, slot_sizes
from tiermoe.simulate.link import InstantLink
from tiermoe.simulate.result import headline
from tiermoe.simulate.steps import Future, Recorded, steps_of
from tiermoe.trace.schema import Trace

_EVEN = (0.25, 0.25, 0.25, 0.25)


@dataclass(frozen=True, slots=True)
class EvictionRow:
    """One policy at one cache size; fields as in `Result`."""

    eviction: str
    cache_fraction: float
    slots: int
    hit_rate: float
    prefill_hit_rate: float | None
    belady_hit_rate: float

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return asdict(self)


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
        belady = _phase_counts(hits_of(trace, "belady", slots, bits))
        for name in names:
            counts = belady
            if name != "belady":
                counts = _phase_counts(hits_of(trace, name, slots, bits, settings, per_sequence, seed))
            rate, best = headline(counts), headline(belady)
            rows.append(EvictionRow(name, slots / experts, slots, rate, counts["prefill"].hit_rate, best))
    return rows


def hits_of(
    trace: Trace,
    name: str,
    slots: int,
    bits: int,
    settings: Mapping[str, Any] | None = None,
    per_sequence: bool = False,
    seed: int = 0,
) -> dict[str, PhaseCosts]:
    """What one pool of `slots` equal units under policy `name` hits and misses, by phase. With 'belady' the most that
    any policy can hit there."""
    header = trace.header
    own = {"weights": _EVEN, **(settings or {})}
    composition = Composition(name, "", cache=name, records="sequence" if per_sequence else "model", own=own)
    steps = steps_of(trace, composition)
    future = Future(steps, len(header.experts))
    link = InstantLink(lambda key: expert_bytes(header, key.layer, key.bits))
    shape = ModelShape(header.experts, header.top_k, header.encoder_layers)
    foresight = Foresight(future.next_use, future.choices)
    scheduler = assemble(composition, shape, [PrecisionSlots((bits,), slots)], link, bits, None, foresight, seed)
    phases = {"prefill": PhaseCosts(), "decode": PhaseCosts()}
    sequence: int | None = None
    for number, step in enumerate(steps):
        if step.sequence != sequence:
            sequence = step.sequence
            scheduler.new_sequence()
        before, read = scheduler.controller.counts.copy(), link.bytes_read
        forecasts = Recorded(step)
        future.begin(number)
        scheduler.begin_pass(step.size, forecasts, step.phase, step.running[0])
        for layer in step.running:
            future.at(layer)
            for _ in scheduler.run_layer(step.routed(layer), forecasts):
                pass
        used = PhaseCosts(bytes_read=link.bytes_read - read, counts=scheduler.controller.counts.minus(before))
        phases[step.phase].add(used, step.size)
    return phases


def all_evictions() -> list[str]:
    """Every policy's name, Belady's last."""
    return [*(name for name in EVICTIONS if name != "belady"), "belady"]


def _phase_counts(phases: dict[str, PhaseCosts]) -> dict[str, Counts]:
    return {name: phase.counts for name, phase in phases.items()}
