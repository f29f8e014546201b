"""Metrics of a run: expert cache hits, misses and loads (`ExpertCounts`), time and bytes of a phase (`PhaseMetrics`),
and the prefill and decode phases together (`Metrics`). Reports, `stats()`, evaluations, benchmarks and replays read
their figures from `Metrics`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any


@dataclass(slots=True)
class ExpertCounts:
    """What became of the experts that tokens were routed to."""

    hits: int = 0  # in the cache when the router asked, in a precision that satisfies the demand
    prefetched: int = 0  # hits that a prefetch had brought
    misses: int = 0  # not in the cache when the router asked, also where a prefetch was still on its way
    cpu_fallback: int = 0  # misses that the CPU computes in place of a load
    skipped: int = 0  # neither in the cache nor important enough for a load
    loads: int = 0
    low_loads: int = 0  # of these and the next, those below the highest precision
    speculative_loads: int = 0
    warmed: int = 0  # experts that background loads have brought
    dropped: int = 0  # experts that left the room for fetched ones when their layer had run (room)
    displaced: int = (
        0  # choices that fell on another expert than the router's (routing=cached, on_mispredict=predicted)
    )
    moved_weight: float = 0.0  # gate weight that moved with them, in shares of a token's, over tokens and layers

    @property
    def hit_rate(self) -> float | None:
        """Hits of all experts that were asked for and not skipped; None if there were none."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None

    def copy(self) -> ExpertCounts:
        return dataclasses.replace(self)

    def minus(self, earlier: ExpertCounts) -> ExpertCounts:
        """What has happened since `earlier`."""
        names = [each.name for each in dataclasses.fields(self)]
        return ExpertCounts(**{name: getattr(self, name) - getattr(earlier, name) for name in names})

    def add(self, other: ExpertCounts) -> None:
        for each in dataclasses.fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(slots=True)
class PhaseMetrics:
    """What one phase of a run took, prefill or decode. A snapshot has the same fields: all that has been so far, by a
    clock that began at any time; `since` subtracts two snapshots."""

    seconds: float = 0.0
    compute_s: float = 0.0  # seconds of computing
    wait_s: float = 0.0  # seconds of waiting for the link
    bytes_read: int = 0  # from the drive; of a replay, over the link
    tokens: int = 0  # that were kept
    counts: ExpertCounts = field(default_factory=ExpertCounts)  # of the passes that were kept
    discarded: ExpertCounts = field(default_factory=ExpertCounts)  # of the passes that were discarded (MoBiLE)
    read_s: float = 0.0  # seconds in which the drive was at work, with computing or without; 0 if unknown
    bytes_read_also: int = 0  # of `bytes_read`, from the second drive (--also)
    bytes_copied: int = 0  # from main memory to a GPU
    copy_s: float = 0.0  # seconds of these copies

    def since(self, earlier: PhaseMetrics) -> PhaseMetrics:
        """What has been added since `earlier`."""
        return PhaseMetrics(
            self.seconds - earlier.seconds,
            self.compute_s - earlier.compute_s,
            self.wait_s - earlier.wait_s,
            self.bytes_read - earlier.bytes_read,
            self.tokens - earlier.tokens,
            self.counts.minus(earlier.counts),
            self.discarded.minus(earlier.discarded),
            self.read_s - earlier.read_s,
            self.bytes_read_also - earlier.bytes_read_also,
            self.bytes_copied - earlier.bytes_copied,
            self.copy_s - earlier.copy_s,
        )

    def add(self, used: PhaseMetrics, tokens: int, discarded: bool = False) -> None:
        """Another stretch of this phase, of which `tokens` tokens are kept. discarded: its counts go to `discarded`."""
        self.seconds += used.seconds
        self.compute_s += used.compute_s
        self.wait_s += used.wait_s
        self.bytes_read += used.bytes_read
        self.read_s += used.read_s
        self.bytes_read_also += used.bytes_read_also
        self.bytes_copied += used.bytes_copied
        self.copy_s += used.copy_s
        self.tokens += tokens
        (self.discarded if discarded else self.counts).add(used.counts)
        self.discarded.add(used.discarded)

    @contextlib.contextmanager
    def measured(self, snapshot: Callable[[], PhaseMetrics], tokens: int) -> Iterator[None]:
        """Adds what happens inside, in which `tokens` tokens pass. snapshot: all that has been so far."""
        before = snapshot()
        yield
        self.add(snapshot().since(before), tokens)

    @property
    def tok_s(self) -> float:
        """Tokens per second; 0 if nothing ran."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the experts that the router asked for that were in the cache; 0 if it asked for none."""
        return self.counts.hit_rate or 0.0

    @property
    def expert_counts(self) -> dict[str, int | float]:
        """What became of the experts, by the names that `--json` and `stats()` print. Counts are of the passes that
        were kept; `discarded_…` are of the others (MoBiLE)."""
        counts, discarded = self.counts, self.discarded
        return {
            "expert_hits": counts.hits,
            "expert_misses": counts.misses,
            "expert_skips": counts.skipped,
            "prefetched_hits": counts.prefetched,
            "experts_on_cpu": counts.cpu_fallback,
            "loads": counts.loads,
            "low_loads": counts.low_loads,
            "dropped_experts": counts.dropped,
            "speculative_loads": counts.speculative_loads,
            "warmed_experts": counts.warmed,
            "displaced_choices": counts.displaced,
            "moved_weight": counts.moved_weight,
            "discarded_hits": discarded.hits,
            "discarded_misses": discarded.misses,
        }

    @property
    def displaced_share(self) -> float:
        """Share of the tokens' experts that stood in for others; 0 if nothing ran."""
        counts = self.counts
        return counts.displaced / max(counts.hits + counts.misses + counts.skipped, 1)

    def moved_weight_share(self, layers: int) -> float:
        """Share of the tokens' gate weight in `layers` MoE layers that moved to stand-ins; 0 if nothing ran."""
        return self.counts.moved_weight / max(self.tokens * layers, 1)

    @property
    def bytes_per_token(self) -> float:
        """0 if there are no tokens."""
        return self.bytes_read / self.tokens if self.tokens else 0.0

    def bound_tok_s(self, bandwidth: float) -> float:
        """Tokens per second that could have been reached: tokens / max(compute time, bytes / `bandwidth` of the link in
        bytes per second): docs/architecture.md, "Bounds". Where these bytes came faster than that, or partly before
        this phase, they take no longer than the link was at work in it: nothing that ran is above its bound. Before a
        GPU the link is the bus, and the drive's work is the third bound."""
        on_gpu = self.bytes_copied > 0
        moved, busy_s = (self.bytes_copied, self.copy_s) if on_gpu else (self.bytes_read, self.read_s)
        link_s = moved / bandwidth if bandwidth else 0.0
        if busy_s:
            link_s = min(link_s, busy_s)
        if on_gpu:  # two copies at once count each
            link_s = max(min(link_s, self.seconds), self.read_s)
        bound_s = max(self.compute_s, link_s)
        return self.tokens / bound_s if bound_s > 0 else 0.0


@dataclass(slots=True, kw_only=True)
class Metrics:
    """Figures of a whole run. Properties have the names that `--json` prints, rates are in tokens per second, and 0
    stands if nothing ran."""

    prefill: PhaseMetrics = field(default_factory=PhaseMetrics)  # passes over prompts
    decode: PhaseMetrics = field(default_factory=PhaseMetrics)  # passes over generated tokens
    bandwidth: float = 0.0  # of the link (`LinkCounters.bandwidth`), bytes per second
    layers: int = 0  # MoE layers
    peak_memory_bytes: int = 0  # the most that the process has held; 0 of a replay
    fallback_ratio: float = 0.0  # share of the decoded tokens that all K experts computed again (MoBiLE)
    prefetching: str = ""  # what speculate=measured has decided, with its figures; empty if nothing
    kernels: str = ""  # what computes the experts (`Engine.kernels`); empty of a replay
    also_warning: str = ""  # what the second drive failed to give; empty if nothing

    hit_rate = property(attrgetter("total.hit_rate"))
    prefill_hit_rate = property(attrgetter("prefill.hit_rate"))
    decode_hit_rate = property(attrgetter("decode.hit_rate"))
    expert_hits = property(attrgetter("total.counts.hits"))
    expert_misses = property(attrgetter("total.counts.misses"))
    prefill_tok_s = property(attrgetter("prefill.tok_s"))
    decode_tok_s = property(attrgetter("decode.tok_s"))
    bytes_read = property(attrgetter("total.bytes_read"))
    bytes_read_also = property(attrgetter("total.bytes_read_also"))
    prefill_bytes_per_token = property(attrgetter("prefill.bytes_per_token"))
    bytes_per_token = property(attrgetter("decode.bytes_per_token"))
    wait_s = property(attrgetter("total.wait_s"))  # seconds in which computing waited for experts
    decode_wait_s = property(attrgetter("decode.wait_s"))
    displaced_share = property(attrgetter("decode.displaced_share"))

    @property
    def moved_weight_share(self) -> float:
        """Share of the decoded tokens' gate weight that moved to stand-ins (routing=cached)."""
        return self.decode.moved_weight_share(self.layers)

    @property
    def bound_tok_s(self) -> float:
        """`PhaseMetrics.bound_tok_s` of decoding; 0 if nothing came over the link."""
        moved = self.decode.bytes_read or self.decode.bytes_copied
        return self.decode.bound_tok_s(self.bandwidth) if moved else 0.0

    @property
    def by_phase(self) -> dict[str, PhaseMetrics]:
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def total(self) -> PhaseMetrics:
        """Both phases together."""
        total = PhaseMetrics()
        for each in (self.prefill, self.decode):
            total.add(each, each.tokens)
        return total

    @property
    def headline_hit_rate(self) -> float:
        """The hit rate of decoding, of the prompt where nothing is decoded; 0 if nothing ran."""
        rates = (phase.counts.hit_rate for phase in (self.decode, self.prefill))
        return next((rate for rate in rates if rate is not None), 0.0)


def named(figures: object, *names: str) -> dict[str, Any]:
    """Attributes of `figures` by name."""
    return {name: getattr(figures, name) for name in names}
