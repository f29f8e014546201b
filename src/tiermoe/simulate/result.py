"""What a replay reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tiermoe.decide.compose import PrecisionSlots
from tiermoe.decide.composition import Composition
from tiermoe.decide.counts import Counts
from tiermoe.decide.phase_costs import PhaseCosts


@dataclass(frozen=True, slots=True)
class Result:
    """One composition's replay. Rates in tokens per second, times in seconds; None where a phase has no passes.

    `hit_rate`: of the experts that the router asked for in decode and that were not skipped, the share already there
    (of the prompt's in `prefill_hit_rate`; of these where nothing is decoded). `belady_hit_rate`: the best in one pool
    of equal units of the same bytes without prefetch. `bound_tok_s`: decode tokens / max(compute time, bytes read /
    bandwidth); `belady_bound_tok_s`: with the bytes that Belady's choice would miss (docs/architecture.md, "Bounds").
    `bytes_per_token`: read while decoding, per token kept. `slots`: 'bits' of copies → slots. Counts are over the whole
    trace; those of discarded passes (MoBiLE) are apart. `prefetching`: what speculate=measured has decided by the
    replay's clock; empty where it has not. `phases`: what each phase cost.
    """

    preset: str
    eviction: str
    cache_fraction: float
    slots: dict[str, int]
    hit_rate: float
    prefill_hit_rate: float | None
    belady_hit_rate: float
    decode_tok_s: float | None
    prefill_tok_s: float | None
    bound_tok_s: float | None
    belady_bound_tok_s: float | None
    bytes_read: int
    bytes_per_token: float | None
    wait_s: float
    hits: int
    prefetched_hits: int
    misses: int
    skipped: int
    loads: int
    low_loads: int
    speculative_loads: int
    discarded_hits: int
    discarded_misses: int
    prefetching: str
    phases: Mapping[str, PhaseCosts] = field(repr=False)

    @property
    def bound_fraction(self) -> float | None:
        """The share of `bound_tok_s` that was reached."""
        return self.decode_tok_s / self.bound_tok_s if self.decode_tok_s and self.bound_tok_s else None

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints: all but `phases`."""
        values = asdict(self) | {"bound_fraction": self.bound_fraction}
        del values["phases"]
        return values

    @staticmethod
    def of(
        composition: Composition,
        cache_fraction: float,
        slots: Sequence[PrecisionSlots],
        phases: Mapping[str, PhaseCosts],
        belady: Mapping[str, PhaseCosts],
        bandwidth: float,
        prefetching: str = "",
    ) -> Result:
        """The sum of what the phases cost, beside Belady's hits on the same trace, which take no time."""
        prefill, decode = phases["prefill"], phases["decode"]
        best = replace(decode, bytes_read=belady["decode"].bytes_read, read_s=0.0)  # other bytes, in no known time
        counts, discarded = Counts(), Counts()
        for phase in phases.values():
            counts.add(phase.counts)
            discarded.add(phase.discarded)
        return Result(
            preset=composition.name,
            eviction=composition.cache,
            cache_fraction=cache_fraction,
            slots={",".join(map(str, share.bits)): share.slots for share in slots},
            hit_rate=headline({name: phase.counts for name, phase in phases.items()}),
            prefill_hit_rate=prefill.counts.hit_rate,
            belady_hit_rate=headline({name: phase.counts for name, phase in belady.items()}),
            decode_tok_s=decode.tok_s or None,
            prefill_tok_s=prefill.tok_s or None,
            bound_tok_s=decode.bound_tok_s(bandwidth) or None,
            belady_bound_tok_s=best.bound_tok_s(bandwidth) or None,
            bytes_read=prefill.bytes_read + decode.bytes_read,
            bytes_per_token=decode.bytes_per_token if decode.tokens else None,
            wait_s=prefill.wait_s + decode.wait_s,
            hits=counts.hits,
            prefetched_hits=counts.prefetched,
            misses=counts.misses,
            skipped=counts.skipped,
            loads=counts.loads,
            low_loads=counts.low_loads,
            speculative_loads=counts.speculative_loads,
            discarded_hits=discarded.hits,
            discarded_misses=discarded.misses,
            prefetching=prefetching,
            phases=phases,
        )


def headline(counts: Mapping[str, Counts]) -> float:
    """The hit rate of decoding, of the prompt where nothing is decoded."""
    rates = (counts[phase].hit_rate for phase in ("decode", "prefill"))
    return next((rate for rate in rates if rate is not None), 0.0)
