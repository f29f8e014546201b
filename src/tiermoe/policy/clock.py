"""Where the run is: what recency, frequency and distance are measured against. Written by the scheduler alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """`layer`: the MoE layer that runs. `token`: tokens of this sequence so far, the running ones included.
    `sequence`: sequences begun so far."""

    layer: int = 0
    token: int = 0
    sequence: int = 0

    def advance(self, tokens: int) -> None:
        """A forward pass over `tokens` tokens begins."""
        self.token += tokens
        self.layer = 0

    def new_sequence(self) -> None:
        self.token = 0
        self.layer = 0
        self.sequence += 1
