"""How the slots of a cache are divided among the MoE layers. `ALLOTMENTS` is the one table of names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tiermoe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pool:
    """Slots that one eviction policy rules."""

    slots: int
    bits: frozenset[int] | None  # precisions of the copies; None: any
    layers: range  # MoE layers whose experts the pool caches
    kept: int = 0  # slots that stay where slots move between the pools of the same `bits`; 0: none moves


@dataclass(frozen=True, slots=True)
class Share:
    """Slots to divide among all MoE layers."""

    slots: int
    experts: Sequence[int]  # of each MoE layer
    boundary: int = 0  # layers below it are shallow
    minimum: int = 1  # slots that a pool has at least
    bits: frozenset[int] | None = None  # as `Pool.bits`


def one_pool(share: Share) -> list[Pool]:
    """One pool for all layers. ConfigError where it would have fewer than the minimum."""
    _check_slots(share, 1, "one pool for all MoE layers")
    return [Pool(share.slots, share.bits, range(len(share.experts)))]


def even(share: Share) -> list[Pool]:
    """A pool for each layer, of equal sizes; what does not divide goes one each to the first layers. ConfigError where
    a layer would have fewer than the minimum."""
    _check_layers(share)
    return _pools(_evenly(share.slots, len(share.experts)), share.bits)


def by_use(share: Share) -> list[Pool]:
    """`even` at first; slots move to the layers whose experts are used most, and the minimum stays."""
    return [replace(pool, kept=share.minimum) for pool in even(share)]


def shallow_first(share: Share) -> list[Pool]:
    """Layers below the boundary whole, in order as far as the slots go; the others share the rest evenly:
    (slots - boundary E) / (L - boundary) each (Fate, section 4.4). Every layer has at least the minimum, so that it can
    run. Slots that are left where every layer is shallow and whole are shared evenly. ConfigError where there are too
    few slots, or fewer layers than the boundary."""
    layers, minimum, boundary = len(share.experts), share.minimum, share.boundary
    _check_boundary(share)
    _check_layers(share)
    sizes = [minimum] * layers
    left = share.slots - minimum * layers
    for layer in range(boundary):
        extra = min(max(share.experts[layer] - minimum, 0), left)
        sizes[layer] += extra
        left -= extra
    first = boundary if boundary < layers else 0
    for layer, extra in enumerate(_evenly(left, layers - first), first):
        sizes[layer] += extra
    return _pools(sizes, share.bits)


def shallow_and_shared(share: Share) -> list[Pool]:
    """`shallow_first` for slots that do not give every layer its minimum: layers below the boundary whole, in order as
    far as the slots go, then one pool for all layers behind them, in which the running layer has its minimum. No layer
    is set apart where that leaves less. ConfigError where there are fewer slots than one minimum."""
    _check_boundary(share)
    _check_slots(share, 1, "one pool for all MoE layers")
    sizes: list[int] = []
    left = share.slots - share.minimum
    while len(sizes) < share.boundary and left >= share.minimum:
        sizes.append(min(share.experts[len(sizes)], left))
        left -= sizes[-1]
    rest = Pool(left + share.minimum, share.bits, range(len(sizes), len(share.experts)))
    return [*_pools(sizes, share.bits), rest]


ALLOTMENTS: dict[str, Callable[[Share], list[Pool]]] = {
    "pool": one_pool,
    "even": even,
    "by-use": by_use,
    "shallow": shallow_first,
}


def _evenly(slots: int, layers: int) -> list[int]:
    each, over = divmod(slots, layers)
    return [each + (layer < over) for layer in range(layers)]


def _pools(sizes: Sequence[int], bits: frozenset[int] | None) -> list[Pool]:
    return [Pool(size, bits, range(layer, layer + 1)) for layer, size in enumerate(sizes)]


def _check_boundary(share: Share) -> None:
    if not 0 <= share.boundary <= len(share.experts):
        raise ConfigError(
            f"boundary must be from 0 to {len(share.experts)}, the model's MoE layers, got {share.boundary}"
        )


def _check_layers(share: Share) -> None:
    _check_slots(share, len(share.experts), f"a pool for each of {len(share.experts)} MoE layers")


def _check_slots(share: Share, pools: int, what: str) -> None:
    needed = pools * share.minimum
    if share.slots < needed:
        raise ConfigError(
            f"{what} needs at least {needed} slots ({share.minimum} each), there are {share.slots}; "
            f"give more memory{' or choose allotment=pool' if pools > 1 else ''}"
        )
