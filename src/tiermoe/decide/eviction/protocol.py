"""The seam that every eviction policy fills, what it is made from, and the clock that recency, frequency and distance
are measured against, which the scheduler alone writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tiermoe.types import Demand, ExpertKey

NextUse = Callable[[ExpertKey], float]
"""When a key is asked for next, counted from now in any unit; infinity where never (replay only)."""


class Eviction(Protocol):
    """Who leaves one pool of slots. A policy sees uses, arrivals and removals, and names victims; it holds no
    weights. Its class may be a dataclass that declares settings (`decide.settings`), and may say `spans_precisions`:
    one instance then serves the pools of all precisions, since an expert's uses count for each of its copies; and
    `forgets`: it reads `per_sequence` (records=sequence)."""

    def admitted(self, key: ExpertKey) -> None:
        """`key` has taken a slot (its load has begun)."""

    def used(self, key: ExpertKey, demand: Demand) -> None:
        """`key` is computed with by the running layer, for `demand`."""

    def removed(self, key: ExpertKey) -> None:
        """`key` has lost its slot."""

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        """The first key to give up for `incoming` among those that `evictable` admits; None where there is none."""

    def new_sequence(self) -> None:
        """Another request begins."""


@dataclass(frozen=True, slots=True)
class EvictionContext:
    """What a policy may be made from. `slots`: of its pool. `layers`: MoE layers of the model, the first
    `encoder_layers` of them in an encoder. `high_bits`: the precision whose uses count as high. `per_sequence`:
    records are forgotten at each new sequence. `next_use`: the future, known in a replay alone. `seed`: for random
    choices. `frequencies`: (layer, expert) → share or number of the calibration's tokens."""

    clock: Clock
    slots: int
    layers: int
    encoder_layers: int = 0
    high_bits: int = 4
    per_sequence: bool = False
    next_use: NextUse | None = None
    seed: int = 0
    frequencies: Mapping[tuple[int, int], float] = field(default_factory=dict)


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
