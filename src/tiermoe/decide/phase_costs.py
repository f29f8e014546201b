"""What a phase of a run took, prefill or decode: the figures of an engine, of a benchmark and of a replay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tiermoe.decide.counts import Counts


@dataclass(slots=True)
class PhaseCosts:
    """`seconds` in all, `compute_s` and `wait_s` of them computing and waiting for the link, `bytes_read` over it,
    `tokens` that were kept, `counts` of the passes that were kept and `discarded` of the others. `read_s`: seconds in
    which the link was at work, with computing or without; 0 where nobody knows. Of one moment: all that has been so
    far, by a clock that began at any time."""

    seconds: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    bytes_read: int = 0
    tokens: int = 0
    counts: Counts = field(default_factory=Counts)
    discarded: Counts = field(default_factory=Counts)
    read_s: float = 0.0

    def since(self, earlier: PhaseCosts) -> PhaseCosts:
        """What has been added since `earlier`."""
        return PhaseCosts(
            self.seconds - earlier.seconds,
            self.compute_s - earlier.compute_s,
            self.wait_s - earlier.wait_s,
            self.bytes_read - earlier.bytes_read,
            self.tokens - earlier.tokens,
            self.counts.minus(earlier.counts),
            self.discarded.minus(earlier.discarded),
            self.read_s - earlier.read_s,
        )

    def add(self, used: PhaseCosts, tokens: int, discarded: bool = False) -> None:
        """Another stretch of this phase, in which `tokens` tokens are kept. discarded: what it counted is not."""
        self.seconds += used.seconds
        self.compute_s += used.compute_s
        self.wait_s += used.wait_s
        self.bytes_read += used.bytes_read
        self.read_s += used.read_s
        self.tokens += tokens
        (self.discarded if discarded else self.counts).add(used.counts)
        self.discarded.add(used.discarded)

    @contextlib.contextmanager
    def measured(self, now: Callable[[], PhaseCosts], tokens: int) -> Iterator[None]:
        """Adds what happens inside, in which `tokens` tokens pass. now: all that has been so far."""
        before = now()
        yield
        self.add(now().since(before), tokens)

    def __add__(self, other: PhaseCosts) -> PhaseCosts:
        """Both together."""
        both = PhaseCosts()
        for each in (self, other):
            both.add(each, each.tokens)
        return both

    @property
    def tok_s(self) -> float:
        """Tokens per second; 0 where nothing ran."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """Of the experts that the router asked for, the share already there; 0 where nothing was."""
        return self.counts.hit_rate or 0.0

    @property
    def displaced_share(self) -> float:
        """Of the tokens' experts, the share that stood in for others; 0 where nothing ran."""
        counts = self.counts
        return counts.displaced / max(counts.hits + counts.misses + counts.skipped, 1)

    def moved_share(self, layers: int) -> float:
        """Of the tokens' gate weight in so many MoE layers, the share that stand-ins moved; 0 where nothing ran."""
        return self.counts.moved_weight / max(self.tokens * layers, 1)

    @property
    def bytes_per_token(self) -> float:
        """0 where there are no tokens."""
        return self.bytes_read / self.tokens if self.tokens else 0.0

    def bound_tok_s(self, bandwidth: float) -> float:
        """Tokens per second that could have been reached: tokens / max(compute time, bytes / `bandwidth` of the link in
        bytes per second): docs/architecture.md, "Bounds". Where these bytes came faster than that, or partly before
        this phase, they take no longer than the link was at work in it: nothing that ran is above its bound."""
        link_s = self.bytes_read / bandwidth if bandwidth else 0.0
        if self.read_s:
            link_s = min(link_s, self.read_s)
        bound_s = max(self.compute_s, link_s)
        return self.tokens / bound_s if bound_s > 0 else 0.0
