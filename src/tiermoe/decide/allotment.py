"""How the slots of a cache are divided among the MoE layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tiermoe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pool:
    """`slots` slots for the experts of the MoE layers `layers`, for copies of `bits` alone (None: any precision).
    `kept`: how many of them stay where they move between the pools of the same `bits` (`shares`); 0: none moves."""

    slots: int
    bits: frozenset[int] | None
    layers: range
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """What there is to divide: `slots` slots for copies of `bits` (None: any), over MoE layers with `experts[l]`
    experts each. Layers below `boundary` are shallow. No pool gets fewer than `minimum` slots."""

    slots: int
    experts: Sequence[int]
    boundary: int = 0
    minimum: int = 1
    bits: frozenset[int] | None = None


def one_pool(slots: int, layers: int, minimum: int = 1, bits: frozenset[int] | None = None) -> list[Pool]:
    """One pool for all layers. ConfigError where it would have fewer than `minimum` slots."""
    _check(slots, 1, minimum, "one pool for all MoE layers")
    return [Pool(slots, bits, range(layers))]


def even(slots: int, layers: int, minimum: int = 1, bits: frozenset[int] | None = None) -> list[Pool]:
    """The same for each layer, what does not divide one each to the first layers. ConfigError where a layer would have
    fewer than `minimum` slots."""
    _check(slots, layers, minimum, f"a pool for each of {layers} MoE layers")
    return _pools(_evenly(slots, layers), bits)


def by_use(slots: int, layers: int, minimum: int = 1, bits: frozenset[int] | None = None) -> list[Pool]:
    """As `even` at first; slots move to the layers whose experts are used most, `minimum` stay (`shares.most_used`)."""
    return [replace(pool, kept=minimum) for pool in even(slots, layers, minimum, bits)]


def shallow_first(
    slots: int, experts: Sequence[int], boundary: int, minimum: int = 1, bits: frozenset[int] | None = None
) -> list[Pool]:
    """Layers below `boundary` whole, in order as far as the slots go; the others share the rest evenly:
    (slots - boundary E) / (L - boundary) each (Fate, section 4.4). Every layer has at least `minimum` slots, so that it
    can run; what is left where every layer is shallow and whole is shared evenly. ConfigError where there are too few
    slots, or fewer layers than `boundary`."""
    layers = len(experts)
    _check_boundary(boundary, layers)
    _check(slots, layers, minimum, f"a pool for each of {layers} MoE layers")
    sizes = [minimum] * layers
    left = slots - minimum * layers
    for layer in range(boundary):
        extra = min(max(experts[layer] - minimum, 0), left)
        sizes[layer] += extra
        left -= extra
    first = boundary if boundary < layers else 0
    for layer, extra in enumerate(_evenly(left, layers - first), first):
        sizes[layer] += extra
    return _pools(sizes, bits)


def shallow_and_shared(share: Share) -> list[Pool]:
    """`shallow_first` for slots that do not give every layer its minimum: layers below the boundary whole, in order as
    far as the slots go, and one pool for all behind them, in which the running layer has its minimum. No layer is set
    apart where that leaves less. ConfigError where there are fewer slots than one minimum."""
    _check_boundary(share.boundary, len(share.experts))
    _check(share.slots, 1, share.minimum, "one pool for all MoE layers")
    sizes: list[int] = []
    left = share.slots - share.minimum
    while len(sizes) < share.boundary and left >= share.minimum:
        sizes.append(min(share.experts[len(sizes)], left))
        left -= sizes[-1]
    rest = Pool(left + share.minimum, share.bits, range(len(sizes), len(share.experts)))
    return [*_pools(sizes, share.bits), rest]


ALLOTMENTS: dict[str, Callable[[Share], list[Pool]]] = {
    "pool": lambda share: one_pool(share.slots, len(share.experts), share.minimum, share.bits),
    "even": lambda share: even(share.slots, len(share.experts), share.minimum, share.bits),
    "by-use": lambda share: by_use(share.slots, len(share.experts), share.minimum, share.bits),
    "shallow": lambda share: shallow_first(share.slots, share.experts, share.boundary, share.minimum, share.bits),
}


def _evenly(slots: int, layers: int) -> list[int]:
    each, over = divmod(slots, layers)
    return [each + (layer < over) for layer in range(layers)]


def _pools(sizes: Sequence[int], bits: frozenset[int] | None) -> list[Pool]:
    return [Pool(size, bits, range(layer, layer + 1)) for layer, size in enumerate(sizes)]


def _check_boundary(boundary: int, layers: int) -> None:
    if not 0 <= boundary <= layers:
        raise ConfigError(f"boundary must be from 0 to {layers}, the model's MoE layers, got {boundary}")


def _check(slots: int, pools: int, minimum: int, what: str) -> None:
    needed = pools * minimum
    if slots < needed:
        raise ConfigError(
            f"{what} needs at least {needed} slots ({minimum} each), there are {slots}; "
            f"give more memory{' or choose allotment=pool' if pools > 1 else ''}"
        )
