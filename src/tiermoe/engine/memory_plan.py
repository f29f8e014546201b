"""The parts of a memory budget: what the owners of memory need, and the slots that the rest became."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tiermoe.config import format_size
from tiermoe.offload.assembly import divide as divide_slots
from tiermoe.offload.policies.allotment import slot_numbers
from tiermoe.offload.presets import Resolved
from tiermoe.types import Need, Phase


@dataclass(frozen=True, slots=True)
class PlannedSlots:
    """Slots of one size."""

    bits: tuple[int, ...]  # precisions that share the slots
    slots: int
    slot_bytes: int  # of one slot
    sizes: tuple[int, ...] = ()  # as of `PrecisionSlots`

    @property
    def addresses(self) -> int:
        """Slots that have addresses: more than there is memory for where smaller copies leave theirs to others."""
        return slot_numbers(self.slots, self.sizes) if self.sizes else self.slots


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A memory budget and what it holds while the model runs, in bytes."""

    budget: int
    budget_source: str  # where the budget comes from, for people
    needs: tuple[Need, ...]  # of all owners, in every phase
    slot_bytes: int  # of a slot at the highest precision
    slots: int  # of the expert cache, in all precisions
    all_slots: int  # experts of the model
    layer_slots: int  # experts that a token uses in one layer, at most
    token_slots: int  # experts that a token uses in all layers together
    context: int  # tokens that key/value memory is reserved for
    dense_bits: str = "16"  # precision of the dense layers, for people: '4 (lm_head 6)'
    embedding_on_disk: bool = False  # rows of the input embedding are read when they are needed; `dense` is without it
    looked_up: int = 0  # bytes in `dense` of an input embedding of which each token reads a row
    unless_mapped: int = 0  # `looked_up` where a start may map the store's files, which leaves the embedding on disk
    kv_bits: int = 16  # precision of keys and values
    kv_memory: int | None = None  # bytes that all sequences' keys and values share; None: each has its whole context
    prompt_chunks: int = 1  # chunks of a prompt that go through a layer before the next one does
    chunk_bytes: int = 0  # that each of these chunks but the first takes
    large_step: int = 0  # tokens of a step from which on it takes the memory of `step_slots`
    step_slots: int = 0
    packers: int = 1  # how many pieces are packed at a time
    idle_activations: int = 0  # bytes in `activations` that stay in the process between passes; 0: all is given back
    types: str = ""  # what experts lie in where they are used as published, else empty
    pools: tuple[PlannedSlots, ...] = ()  # of the expert cache: one for each precision with slots of its own
    host_pools: tuple[PlannedSlots, ...] = ()  # pinned slots in main memory that a GPU's slots are filled from
    warnings: list[str] = field(default_factory=list, init=False)

    @property
    def interpreter(self) -> int:
        return running(self.needs, "interpreter")

    @property
    def dense(self) -> int:
        return running(self.needs, "dense")

    @property
    def kv_cache(self) -> int:
        return running(self.needs, "kv cache")

    @property
    def activations(self) -> int:
        return running(self.needs, "activations")

    @property
    def staging(self) -> int:
        return running(self.needs, "staging")

    @property
    def requests(self) -> int:
        return running(self.needs, "requests")

    @property
    def packing(self) -> int:
        """Bytes while the store is packed; 0 if it lacks nothing."""
        return total(self.needs, Phase.PACKING)

    @property
    def loading(self) -> int:
        """Bytes while the dense weights are loaded."""
        return total(self.needs, Phase.LOADING)

    @property
    def fixed(self) -> int:
        """Everything in main memory but the experts, while the model runs."""
        return total(self.needs, Phase.RUNNING)

    @property
    def experts(self) -> int:
        """Bytes of the expert cache."""
        return pool_bytes(self.pools)

    @property
    def bits(self) -> str:
        """The precisions of the experts, for people."""
        return " or ".join(
            str(bits) for bits in sorted({bits for pool in self.pools for bits in pool.bits}, reverse=True)
        )

    @property
    def precision(self) -> str:
        """The precisions of all weights, for people."""
        if self.types and self.bits == "16":
            return f"experts as the file has them ({self.types}), other layers at {self.dense_bits}"
        return f"experts at {self.bits} bits, other layers at {self.dense_bits}"

    @property
    def total(self) -> int:
        """Bytes of main memory while the model runs."""
        return self.fixed + self.experts

    @property
    def peak(self) -> int:
        """The most main memory that packing, loading or running takes."""
        return max(self.total, self.packing, self.loading)

    def lent(self, chunks: int, large: bool) -> int:
        """Slots whose memory a step takes. chunks: of a prompt, which one pass over a layer computes. large: the step
        has `large_step` tokens, or computes logits of a prompt's tokens."""
        beyond = 0 if chunks == 1 else (chunks - 1) * self.chunk_bytes - max(self.budget - self.total, 0)
        return max(-(-beyond // self.slot_bytes), 0) + self.step_slots * large

    def parts(self) -> dict[str, int]:
        """Name → bytes while the model runs."""
        names = ("interpreter", "dense", "kv_cache", "activations", "staging", "requests", "experts")
        return {name: getattr(self, name) for name in names}

    def phases(self) -> list[tuple[str, int, str]]:
        """(what, bytes, note) for people, of what comes before running: packing where the store lacks something, and
        loading where it takes more than running."""
        rows = [("while packing", self.packing, "once: the store lacks something")] if self.packing else []
        if self.loading > self.total:
            rows.append(("while loading", self.loading, "more than while running"))
        return rows

    def rows(self) -> list[tuple[str, int, str]]:
        """(what, bytes, note) for people, in the order of `total`."""
        return [
            ("interpreter and libraries", self.interpreter, "measured in this process"),
            ("dense weights", self.dense, self._where()),
            ("key/value cache", self.kv_cache, self._tokens()),
            ("activations", self.activations, "of one prefill chunk"),
            ("staging", self.staging, "reading lanes"),
            *self._request_rows(),
            ("expert cache", self.experts, self._share(self.pools)),
        ]

    def _request_rows(self) -> list[tuple[str, int, str]]:
        """Of a server."""
        return [("requests in flight", self.requests, "bodies, texts, token ids")] if self.requests else []

    def _tokens(self) -> str:
        shared = "" if self.kv_memory is None else "shared by requests of up to "
        bits = "" if self.kv_bits == 16 else f" at {self.kv_bits} bits"
        return f"{shared}{self.context} tokens of context{bits}"

    def _where(self) -> str:
        if self.embedding_on_disk:
            return "resident; the embedding on disk"
        if self.unless_mapped:
            return f"resident; where the store is mapped {format_size(self.unless_mapped)} of embedding stay on disk"
        return "always resident"

    def _share(self, pools: Sequence[PlannedSlots]) -> str:
        if len(pools) > 1:
            return ", ".join(f"{pool.slots} at {' or '.join(map(str, pool.bits))} bits" for pool in pools)
        slots = sum(pool.slots for pool in pools)
        return f"{slots} of {self.all_slots} experts ({slots / self.all_slots:.0%})"


ON_GPU = ("dense", "kv cache", "activations")
"""The parts that lie on a GPU while the model runs, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemoryPlan(MemoryPlan):
    """A memory plan with a GPU. On the GPU, within `gpu_budget`: dense weights, key/value cache, activations and the
    slots of `pools`. In main memory, within `budget`: interpreter, staging, and the pinned slots of `host_pools`."""

    device: str
    gpu_budget: int  # bytes
    gpu_budget_source: str  # where the GPU's budget comes from, for people

    @property
    def host_slots(self) -> int:
        """Pinned slots, of all precisions."""
        return sum(pool.slots for pool in self.host_pools)

    @property
    def gpu_fixed(self) -> int:
        """Everything on the GPU but the experts."""
        return sum(running(self.needs, part) for part in ON_GPU)

    @property
    def gpu_total(self) -> int:
        return self.gpu_fixed + self.experts

    @property
    def fixed(self) -> int:
        """Everything in main memory but the experts, while the model runs."""
        return total(self.needs, Phase.RUNNING) - self.gpu_fixed

    @property
    def host_experts(self) -> int:
        """Bytes of the pinned slots."""
        return pool_bytes(self.host_pools)

    @property
    def total(self) -> int:
        """Bytes of main memory while the model runs."""
        return self.fixed + self.host_experts

    def rows(self) -> list[tuple[str, int, str]]:
        """(what, bytes, note) for people: the GPU's parts, their sum, then those of `total`."""
        budget = f"of {format_size(self.gpu_budget)} ({self.gpu_budget_source})"
        return [
            ("GPU: dense weights", self.dense, "always resident; loaded through main memory"),
            ("GPU: key/value cache", self.kv_cache, f"{self.context} tokens of context"),
            ("GPU: activations", self.activations, "of one prefill chunk"),
            ("GPU: expert cache", self.experts, self._share(self.pools)),
            ("GPU: in all", self.gpu_total, budget),
            ("interpreter and libraries", self.interpreter, "measured in this process"),
            ("staging", self.staging, "reading lanes"),
            *self._request_rows(),
            ("pinned expert cache", self.host_experts, self._share(self.host_pools)),
        ]


def planned_slots(
    room: int,
    resolved: Resolved,
    sizes: Mapping[int, int],
    all_slots: int,
    whole_slots: bool,
    least: int = 1,
) -> tuple[PlannedSlots, ...]:
    """The slots that fit `room` bytes, and `least` of each pool whatever they take. sizes: precision → bytes of a
    slot. whole_slots: as of `divide`."""
    table = resolved.tables.bits.values()
    shares = divide_slots(room, resolved.composition, sizes, table, all_slots, least, whole_slots)
    return tuple(PlannedSlots(bits, slots, max(sizes[value] for value in bits), own) for bits, slots, own in shares)


def least_room(plan: MemoryPlan, resolved: Resolved, sizes: Mapping[int, int], whole_slots: bool) -> int:
    """Bytes of expert cache below which nothing runs: the experts that a token uses in a layer, and a slot of each
    pool. whole_slots: as of `divide`."""
    one_each = planned_slots(0, resolved, sizes, plan.all_slots, whole_slots)
    return max(plan.layer_slots * plan.slot_bytes, pool_bytes(one_each))


def pool_bytes(pools: Iterable[PlannedSlots]) -> int:
    return sum(pool.slots * pool.slot_bytes for pool in pools)


def total(needs: Iterable[Need], phase: Phase) -> int:
    """Bytes that all owners together hold in a phase."""
    return sum(need.nbytes for need in needs if need.phase is phase)


def running(needs: Iterable[Need], part: str) -> int:
    """Bytes of a part while the model runs."""
    return sum(need.nbytes for need in needs if need.phase is Phase.RUNNING and need.part == part)


def in_words(needs: Iterable[Need], phase: Phase) -> str:
    """'interpreter 240 MiB, dense 1.2 GiB', the parts of a phase in the order of their first need."""
    sums: dict[str, int] = {}
    for need in needs:
        if need.phase is phase:
            sums[need.part] = sums.get(need.part, 0) + need.nbytes
    return ", ".join(f"{part} {format_size(nbytes)}" for part, nbytes in sums.items())
