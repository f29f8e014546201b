"""How the slots of a cache are divided among the MoE layers, and how they move between them. `ALLOTMENTS` is the one
table of names."""

from __future__ import annotations

import heapq
import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from tiermoe.errors import ConfigError
from tiermoe.offload.policies.eviction import Eviction
from tiermoe.offload.policies.registry import Registry, a_function
from tiermoe.types import ExpertKey


@dataclass(frozen=True, slots=True)
class Pool:
    """Slots that one eviction policy rules."""

    slots: int
    bits: frozenset[int] | None  # precisions of the copies; None: any
    layers: range  # MoE layers whose experts the pool caches
    kept: int = 0  # slots that stay if slots move between the pools of the same `bits`; 0: none moves


@dataclass(frozen=True, slots=True)
class Share:
    """Slots to divide among all MoE layers."""

    slots: int
    experts: Sequence[int]  # of each MoE layer
    boundary: int = 0  # layers below it are shallow
    minimum: int = 1  # slots that a pool has at least
    bits: frozenset[int] | None = None  # as `Pool.bits`
    recall: Sequence[float] = ()  # of each MoE layer, the share of a token's experts that a prediction names
    uses: Sequence[float] = ()  # of each MoE layer, experts that a token runs, a mean


def one_pool(share: Share) -> list[Pool]:
    """One pool for all layers. ConfigError if it would have fewer than the minimum."""
    _check_slots(share, 1, "one pool for all MoE layers")
    return [Pool(share.slots, share.bits, range(len(share.experts)))]


def even(share: Share) -> list[Pool]:
    """A pool for each layer, of equal sizes; what does not divide goes one each to the first layers. ConfigError if
    a layer would have fewer than the minimum."""
    _check_layers(share)
    return _pools(_evenly(share.slots, len(share.experts)), share.bits)


def by_use(share: Share) -> list[Pool]:
    """`even` at first; slots move to the layers whose experts are used most, and the minimum stays."""
    return [replace(pool, kept=share.minimum) for pool in even(share)]


def shallow_first(share: Share) -> list[Pool]:
    """Layers below the boundary whole, in order as far as the slots go; the others share the rest evenly:
    (slots - boundary E) / (L - boundary) each (Fate, section 4.4). Every layer has at least the minimum, so that it can
    run. Slots that are left if every layer is shallow and whole are shared evenly. ConfigError if there are too
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
    far as the slots go, then one pool for all later layers, in which the running layer has its minimum. No layer
    is set apart if that leaves less. ConfigError if there are fewer slots than one minimum."""
    _check_boundary(share)
    _check_slots(share, 1, "one pool for all MoE layers")
    sizes: list[int] = []
    left = share.slots - share.minimum
    while len(sizes) < share.boundary and left >= share.minimum:
        sizes.append(min(share.experts[len(sizes)], left))
        left -= sizes[-1]
    rest = Pool(left + share.minimum, share.bits, range(len(sizes), len(share.experts)))
    return [*_pools(sizes, share.bits), rest]


def expected_loads(experts: int, uses: float, recall: float, slots: int) -> float:
    """Loads on demand of a token in a layer of which any `slots` of `experts` are cached, each expert as likely used
    (AdapMoE). Of m missing experts a right prediction, with the probability `recall`, leaves m - 1 to load, since one
    is read ahead, and a wrong one all m. uses: experts of a token; 2.25 are two in three quarters of the tokens, else
    three."""
    few = math.floor(uses)
    return (few + 1 - uses) * _loads(experts, few, recall, slots) + (uses - few) * _loads(
        experts, few + 1, recall, slots
    )


def _loads(experts: int, k: int, recall: float, slots: int) -> float:
    absent, total = experts - slots, 0.0
    for missing in range(max(k - slots, 0), min(k, absent) + 1):
        ways = math.comb(absent, missing) * math.comb(slots, k - missing) / math.comb(experts, k)
        total += ways * (missing - recall * min(missing, 1))
    return total


def by_expected_loads(share: Share) -> list[Pool]:
    """The sizes of the least sum of `expected_loads` (AdapMoE's dynamic program; a further slot of a layer saves less
    than the one before, so that giving each to the layer where it saves most finds the same, of equal ones the first
    layer). Slots that are left if every expert has one are shared evenly. ConfigError for too few slots, and for
    recalls of another number of layers."""
    _check_layers(share)
    layers = len(share.experts)
    for name, numbers in (("layer_recall", share.recall), ("layer_uses", share.uses)):
        if len(numbers) != layers:
            raise ConfigError(
                f"{name} has {len(numbers)} numbers and the model {layers} MoE layers; give one for each, or calibrate"
            )
    sizes = [share.minimum] * layers
    costs = [
        [expected_loads(count, min(uses, count), recall, slots) for slots in range(count + 1)]
        for count, uses, recall in zip(share.experts, share.uses, share.recall, strict=True)
    ]
    saved = [(row[size + 1] - row[size], layer) for layer, (row, size) in enumerate(zip(costs, sizes, strict=True))
             if size < share.experts[layer]]  # fmt: skip
    heapq.heapify(saved)
    left = share.slots - sum(sizes)
    while left and saved:
        _, layer = heapq.heappop(saved)
        sizes[layer] += 1
        left -= 1
        size, row = sizes[layer], costs[layer]
        if size < share.experts[layer]:
            heapq.heappush(saved, (row[size + 1] - row[size], layer))
    for layer, extra in enumerate(_evenly(left, layers)):
        sizes[layer] += extra
    return _pools(sizes, share.bits)


ALLOTMENTS = Registry[Callable[[Share], list[Pool]]]("ALLOTMENTS", a_function, {
    "pool": one_pool,
    "even": even,
    "by-use": by_use,
    "shallow": shallow_first,
    "expected-loads": by_expected_loads,
})  # fmt: skip


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


@dataclass(slots=True, eq=False)
class SlotPool:
    """Room for `slots` of the largest copies under one eviction policy, each of size `unit`. `spare`: how much of it
    nobody has. `free`: slots in which nothing lies, one list for all pools of the same precisions. `evictable`: whether
    a key of this pool may leave now. `borrowed`: slots beyond `slots` until its layer has run."""

    number: int
    eviction: Eviction
    slots: int
    unit: int
    spare: int
    free: list[int]
    evictable: Callable[[ExpertKey], bool]
    borrowed: int = 0
    wanted: int = field(init=False)  # its share of the slots, if pools share them

    def __post_init__(self) -> None:
        self.wanted = self.slots

    def take(self, size: int) -> int:
        """A slot for a copy of `size`, which the pool has to spare."""
        self.spare -= size
        return self.free.pop()

    def put_back(self, slot: int, size: int) -> None:
        """A slot in which a copy of `size` lay is free."""
        self.free.append(slot)
        self.spare += size

    def give(self, other: SlotPool) -> None:
        """Room for one of the largest copies, which this pool has to spare."""
        self.slots -= 1
        self.spare -= self.unit
        other.slots += 1
        other.spare += self.unit


class SlotShares:
    """Slots that move between the pools of one precision, one pool a layer, to where experts are used most. minimum:
    slots that each layer keeps.

    Routing is more even in some layers than in others. With as many slots in each, layers that keep to few experts hold
    some that nobody asks for while others miss. One pool for all would hold the most used experts of the model, but
    then what a layer has just read is first to leave when the next layers miss: before its own layer runs again. So a
    layer evicts its own, and how many slots it has follows from the uses of all layers' experts."""

    def __init__(self, pools: Sequence[SlotPool], minimum: int) -> None:
        self._pools = pools
        self._minimum = minimum

    def follow(self, uses: Sequence[Sequence[float]]) -> None:
        """The shares are those of `uses` from now on. Free slots move at once, others when a layer misses."""
        sizes = most_used_slots(sum(pool.slots for pool in self._pools), uses, self._minimum)
        for pool, size in zip(self._pools, sizes, strict=True):
            pool.wanted = size
        givers = [pool for pool in self._pools for _ in range(min(pool.spare // pool.unit, pool.slots - pool.wanted))]
        for pool in self._pools:
            while givers and pool.slots < pool.wanted:
                givers.pop().give(pool)

    def givers(self, taker: SlotPool) -> list[SlotPool]:
        """Who gives a slot to `taker`: the pool with most free slots beyond its minimum, before anybody leaves;
        if none is and `taker` is below its share, pools above theirs, the furthest above first."""
        giver, most = None, 0
        for pool in self._pools:
            spare = min(pool.spare // pool.unit, pool.slots - self._minimum)
            if spare > most:
                giver, most = pool, spare
        if giver is not None:
            return [giver]
        if taker.slots >= taker.wanted:
            return []
        above = [pool for pool in self._pools if pool.slots > pool.wanted]
        return sorted(above, key=lambda pool: pool.slots - pool.wanted, reverse=True)


def slot_numbers(slots: int, sizes: Sequence[int]) -> int:
    """How many copies of `sizes` bytes can lie in the bytes of `slots` of the largest."""
    return slots * max(sizes) // min(sizes)


def most_used_slots(slots: int, uses: Sequence[Sequence[float]], minimum: int) -> list[int]:
    """Slots of each layer: `minimum`, and one for each of its other experts that is among the most used of all layers,
    as far as `slots` go; of equally used ones those of all layers in turn. uses: a row of at least `minimum` experts a
    layer. The sum is less than `slots` only if every expert has one."""
    others = [sorted(row, reverse=True)[minimum:] for row in uses]
    ranked = sorted(chain.from_iterable(others), reverse=True)
    left = slots - minimum * len(uses)
    if left >= len(ranked):
        return [minimum + len(row) for row in others]
    threshold = ranked[left]  # of the first that has none
    sizes = [minimum + bisect_left(row, -threshold, key=operator.neg) for row in others]
    equal = [row.count(threshold) for row in others]
    turns = [layer for turn in range(max(equal)) for layer, count in enumerate(equal) if count > turn]
    for layer in turns[: slots - sum(sizes)]:
        sizes[layer] += 1
    return sizes
