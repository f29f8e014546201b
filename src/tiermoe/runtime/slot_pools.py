"""How the bytes of the expert cache become slots, for compositions that load one precision and for those that mix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiermoe.compose import ModelShape, divide
from tiermoe.errors import BudgetError
from tiermoe.runtime.composition import Resolved
from tiermoe.runtime.memory_plan import SlotPool
from tiermoe.types import MoeLayer


def pools_in(room: int, resolved: Resolved, sizes: Mapping[int, int], all_slots: int) -> tuple[SlotPool, ...]:
    """The slots that fit `room` bytes. sizes: precision → bytes of a slot."""
    shares = divide(room, resolved.composition, sizes, resolved.tables.bits.values(), all_slots)
    return tuple(SlotPool(bits, slots, max(sizes[value] for value in bits)) for bits, slots in shares)


def shape_of(layers: Sequence[MoeLayer]) -> ModelShape:
    """A model's MoE layers as compositions see them; those of an encoder run first."""
    return ModelShape(
        experts=tuple(layer.experts for layer in layers),
        top_k=tuple(layer.top_k for layer in layers),
        encoder_layers=sum(layer.name.startswith("encoder.") for layer in layers),
    )


def require_all(pools: tuple[SlotPool, ...], all_slots: int, missing_bytes: int) -> None:
    """BudgetError where a composition that keeps every expert in memory has too few slots."""
    slots = sum(pool.slots for pool in pools)
    if slots < all_slots:
        raise BudgetError(
            f"the preset keeps all {all_slots} experts in memory, {slots} fit; "
            f"raise --memory by {missing_bytes:,} bytes or use another preset"
        )
