"""Frozen value types that every part shares. Standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

FEW_TOKENS = 64
"""At most so many tokens are computed in few calls: sequences decoded together, a short prompt."""
MOST_VERIFIED = 17
"""Tokens of a sequence that are verified in a step at most: the one chosen last, and guesses at its successors."""


class ExpertKey(NamedTuple):
    """What a cache holds: one expert of one MoE layer in one precision.

    `layer` counts MoE layers from 0 in the order they run (dense layers are not counted), `bits` is 16, 8, 4, 3 or 2.
    """

    layer: int
    expert: int
    bits: int

    def __str__(self) -> str:
        return f"layer {self.layer}, expert {self.expert} ({self.bits} bits)"

    def __deepcopy__(self, memo: object) -> ExpertKey:
        """Itself: a copy of an eviction policy, made for each token that may be discarded, has thousands of them."""
        return self


class Demand(NamedTuple):
    """That the running layer needs `expert` for `tokens` tokens of the current chunk, in `bits` or more.

    A miss loads it at `bits`; 0 asks for it only where it is already here: a miss is skipped."""

    expert: int
    tokens: int
    bits: int


class Routed(NamedTuple):
    """A router's choice for one layer: `experts[t]` and `weights[t]` are the K experts of token t and their gate
    weights, in the router's order (empty if a token has none). `phase` is 'prefill' or 'decode'."""

    layer: int
    phase: str
    experts: Sequence[Sequence[int]]
    weights: Sequence[Sequence[float]]

    def tokens_per_expert(self) -> dict[int, int]:
        """Expert → number of tokens that chose it, in ascending expert order."""
        if len(self.experts) == 1:
            return dict.fromkeys(sorted(self.experts[0]), 1)
        counts = Counter(expert for chosen in self.experts for expert in chosen)
        return dict(sorted(counts.items()))


class Wanted(NamedTuple):
    """An expert that a prediction names: of which layer, how likely (any scale, larger is likelier)."""

    layer: int
    expert: int
    score: float


class Ready(NamedTuple):
    """An expert that can be computed now: it lies in `slot` in the precision `bits`."""

    expert: int
    slot: int
    bits: int


class Load(NamedTuple):
    """One transfer of an expert into a slot. `urgent` loads are waited for; others are speculative, those in the
    `background` wait for all of these too."""

    key: ExpertKey
    slot: int
    urgent: bool
    background: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter of an expert. `shape` is without the experts' dimension: (out, in), (in, out) if `transposed`,
    or (out,) for a bias."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2

    @property
    def out_in(self) -> tuple[int, int]:
        """(out, in) features of a matrix, whatever its orientation."""
        rows, columns = self.shape
        return (columns, rows) if self.transposed else (rows, columns)


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """One MoE layer of a model: `name` is the experts module's path, `top_k` the experts a token uses."""

    name: str
    experts: int
    top_k: int
    parts: tuple[Part, ...]

    @property
    def expert_elements(self) -> int:
        """Number of weights in one expert."""
        total = 0
        for part in self.parts:
            count = 1
            for size in part.shape:
                count *= size
            total += count
        return total


@dataclass(frozen=True, slots=True)
class Segment:
    """`nbytes` bytes at `offset` of `file` that belong at byte `at` of an expert's extent."""

    file: str
    offset: int
    nbytes: int
    at: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the stored bytes of one expert lie, with the xxh3-64 checksum of them in the order of `segments`; an empty
    one where nobody has taken it."""

    segments: tuple[Segment, ...]
    checksum: str

    @property
    def nbytes(self) -> int:
        """Bytes that reading the expert costs."""
        return sum(segment.nbytes for segment in self.segments)


class Phase(StrEnum):
    """When memory is held. A process packs (only where the store lacks something), loads, then runs."""

    PACKING = "packing"
    LOADING = "loading"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Need:
    """`nbytes` that an owner holds at the most in a phase. part: the row of the plan that it belongs to; what: which
    of the part's bytes, for people."""

    part: str
    nbytes: int
    phase: Phase
    what: str = ""


@dataclass(frozen=True, slots=True)
class Use:
    """What whoever runs an engine asks of a step. prompts: chunks of so many sequences' prompts at the most, and a
    token of each sequence; None: a chunk of each. scored: the logits of so many tokens at the most, besides those of a
    sequence's last one. kv_memory: bytes that the keys and values of all sequences take together at the most; None:
    those of each one's context. requests: bytes that a server's requests in flight take besides the engine at the
    most."""

    prompts: int | None = None
    scored: int = 0
    kv_memory: int | None = None
    requests: int = 0


USUAL = Use()


@dataclass(frozen=True, slots=True)
class Workload:
    """What is run at the most: `sequences` of up to `context` tokens, of each at most `chunk` tokens at once, in values
    of `itemsize` bytes, keys and values in `kv_bits` (16: as the other values), on so many threads of a CPU or on a
    GPU."""

    context: int
    chunk: int
    sequences: int
    itemsize: int
    threads: int
    kv_bits: int = 16
    use: Use = USUAL
    on_cpu: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        chunk = min(self.chunk, self.context)
        if self.use.prompts is None:
            return chunk * self.sequences
        return chunk * min(self.use.prompts, self.sequences) + self.sequences
