"""The parts of a memory budget."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SlotPool:
    """`slots` of `slot_bytes` for experts in one of `bits`."""

    bits: tuple[int, ...]
    slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A memory budget and its parts, all in bytes. The expert cache: `slots` in all, in `pools` that share them where
    precisions have slots of their own; `slot_bytes` is a slot's size at the highest precision. `all_slots` is how many
    experts there are, `token_slots` what one token uses in all layers together. `embedding_on_disk`: the input
    embedding's rows are read as they are asked for, and `dense` is without it. `dense_bits`: the precision of the dense
    layers, for people ('4 (lm_head 8)'). `packing`: all that is held while the store is packed, 0 where it lacks
    nothing; `loading`: all that is held while the dense weights are loaded."""

    budget: int
    budget_source: str
    interpreter: int
    dense: int
    kv_cache: int
    activations: int
    staging: int
    slot_bytes: int
    slots: int
    all_slots: int
    layer_slots: int
    token_slots: int
    context: int
    dense_bits: str = "16"
    embedding_on_disk: bool = False
    packing: int = 0
    loading: int = 0
    pools: tuple[SlotPool, ...] = ()
    warnings: list[str] = field(default_factory=list, init=False)

    @property
    def fixed(self) -> int:
        """Everything but the experts."""
        return self.interpreter + self.dense + self.kv_cache + self.activations + self.staging

    @property
    def experts(self) -> int:
        """Bytes of the expert cache."""
        return sum(pool.slots * pool.slot_bytes for pool in self.pools)

    @property
    def bits(self) -> str:
        """The precisions of the experts, for people."""
        return " or ".join(
            str(bits) for bits in sorted({bits for pool in self.pools for bits in pool.bits}, reverse=True)
        )

    @property
    def total(self) -> int:
        return self.fixed + self.experts

    @property
    def peak(self) -> int:
        """The most main memory that packing, loading or running takes."""
        return max(self.total, self.packing, self.loading)

    def phases(self) -> list[tuple[str, int, str]]:
        """(what, bytes, note) for people, of what comes before running: packing where the store lacks something, and
        loading where it takes more than running."""
        rows = [("while packing", self.packing, "once: the store lacks something")] if self.packing else []
        if self.loading > self.total:
            rows.append(("while loading", self.loading, "more than while running"))
        return rows

    def rows(self) -> list[tuple[str, int, str]]:
        """(what, bytes, note) for people, in the order of `total`."""
        share = f"{self.slots} of {self.all_slots} experts ({self.slots / self.all_slots:.0%})"
        if len(self.pools) > 1:
            share = ", ".join(f"{pool.slots} at {' or '.join(map(str, pool.bits))} bits" for pool in self.pools)
        return [
            ("interpreter and libraries", self.interpreter, "measured in this process"),
            (
                "dense weights",
                self.dense,
                "resident; the embedding on disk" if self.embedding_on_disk else "always resident",
            ),
            ("key/value cache", self.kv_cache, f"{self.context} tokens of context"),
            ("activations", self.activations, "of one prefill chunk"),
            ("staging", self.staging, "reading lanes"),
            ("expert cache", self.experts, share),
        ]
