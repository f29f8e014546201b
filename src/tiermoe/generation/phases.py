"""What a phase of a run took: prefill, or decode."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tiermoe.decide.controller import Counts


@dataclass(slots=True)
class Phase:
    """Tokens and what they cost, summed over several stretches. Seconds; bytes over the link."""

    tokens: int = 0
    seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    wait_s: float = 0.0

    @contextlib.contextmanager
    def measured(self, engine: Any, tokens: int) -> Iterator[None]:
        """Adds what `engine` does inside, in which `tokens` tokens pass."""
        before, started = engine.snapshot(), time.perf_counter()
        yield
        self.add(tokens, time.perf_counter() - started, before, engine.snapshot())

    def add(self, tokens: int, seconds: float, before: Any, after: Any) -> None:
        """Adds a stretch between two of an engine's snapshots."""
        self.tokens += tokens
        self.seconds += seconds
        self.hits += after.hits - before.hits
        self.misses += after.misses - before.misses
        self.bytes_read += after.bytes_read - before.bytes_read
        self.wait_s += after.wait_s - before.wait_s

    def __add__(self, other: Phase) -> Phase:
        """Both together."""
        return Phase(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def tok_s(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """Of the experts that the router asked for, the share already there."""
        return Counts(hits=self.hits, misses=self.misses).hit_rate or 0.0

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_read / self.tokens if self.tokens else 0.0

    def bound_tok_s(self, bandwidth: float) -> float:
        """Tokens per second that could have been reached: tokens / max(compute time, bytes / `bandwidth` of the link in
        bytes per second): docs/architecture.md, "Bounds"."""
        link_s = self.bytes_read / bandwidth if bandwidth else 0.0
        bound_s = max(self.seconds - self.wait_s, link_s)
        return self.tokens / bound_s if bound_s > 0 else 0.0
