"""How the bytes of the expert cache become slots, for compositions that load one precision and for those that mix."""

from __future__ import annotations

from collections.abc import Mapping

from tiermoe.compose import divide
from tiermoe.config import Settings
from tiermoe.errors import BudgetError
from tiermoe.runtime.composition import Resolved
from tiermoe.runtime.memory_plan import SlotPool


def wanted_bytes(settings: Settings, cache: str, slot_bytes: int, all_slots: int, layer_slots: int) -> int:
    """Bytes of expert cache that are asked for; a share counts slots of the highest precision."""
    if cache == "none":
        return layer_slots * slot_bytes
    if cache == "all" or settings.cache is None:
        return all_slots * slot_bytes
    if settings.cache.fraction is not None:
        return max(1, int(settings.cache.fraction * all_slots)) * slot_bytes
    assert settings.cache.nbytes is not None
    return settings.cache.nbytes


def pools_in(room: int, resolved: Resolved, sizes: Mapping[int, int], all_slots: int) -> tuple[SlotPool, ...]:
    """The slots that fit `room` bytes. sizes: precision → bytes of a slot."""
    shares = divide(room, resolved.composition, sizes, resolved.tables.bits.values(), all_slots)
    return tuple(SlotPool(bits, slots, max(sizes[value] for value in bits)) for bits, slots in shares)


def require_all(pools: tuple[SlotPool, ...], all_slots: int, missing_bytes: int) -> None:
    """BudgetError where a composition that keeps every expert in memory has too few slots."""
    slots = sum(pool.slots for pool in pools)
    if slots < all_slots:
        raise BudgetError(
            f"the preset keeps all {all_slots} experts in memory, {slots} fit; "
            f"raise --memory by {missing_bytes:,} bytes or use another preset"
        )
