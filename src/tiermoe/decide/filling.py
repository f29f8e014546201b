"""What the background reads into slots that are free, in which order, by how often each expert was used in this run and
in the ones before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tiermoe.decide.pools import Pools
from tiermoe.types import Demand, ExpertKey

WINDOW = 1 << 15
"""Uses of a layer's experts after which nothing is left of what was recorded before them: 4,096 tokens of 8 experts."""


def most_used(experts: Sequence[int], bits: int, uses: Sequence[Sequence[float]], everything: bool) -> list[ExpertKey]:
    """The experts of a model in the precision `bits`, most used first, of equal ones in their order. experts: how many
    each layer has. uses: of each layer's experts; empty: nothing is known. everything: those never used too."""
    found = [
        (-(uses[layer][expert] if uses else 0.0), layer, expert)
        for layer, count in enumerate(experts)
        for expert in range(count)
    ]
    kept = [(layer, expert) for used, layer, expert in sorted(found) if used or everything]
    return [ExpertKey(layer, expert, bits) for layer, expert in kept]


def that_fit(cache: Pools, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
    """Of absent keys, in their order, as many of each pool as it has free slots."""
    free: dict[int, int] = {}
    fitting = []
    for key in keys:
        pool = cache.pool(key)
        free.setdefault(pool, cache.free(pool))
        if free[pool]:
            free[pool] -= 1
            fitting.append(key)
    return fitting


class Background:
    """The keys whose background loads have not ended, by pool."""

    def __init__(self, cache: Pools) -> None:
        self._cache = cache
        self._pools: dict[int, dict[ExpertKey, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: ExpertKey) -> bool:
        return bool(self._count) and key in self._pools.get(self._cache.pool(key), ())

    def __iter__(self) -> Iterator[ExpertKey]:
        return iter([key for pool in self._pools.values() for key in pool])

    def add(self, key: ExpertKey) -> None:
        """A load of `key` is submitted, less wanted than those of its pool before it."""
        self._pools.setdefault(self._cache.pool(key), {})[key] = None
        self._count += 1

    def remove(self, key: ExpertKey) -> None:
        del self._pools[self._cache.pool(key)][key]
        self._count -= 1

    def least_wanted(self, pool: int) -> Iterator[ExpertKey]:
        """Those of a pool, the least wanted first."""
        return reversed(self._pools.get(pool, {}))


class Uses:
    """Tokens that each expert has served: `counts[layer][expert]`. experts: how many each layer has."""

    def __init__(self, experts: Sequence[int]) -> None:
        self.counts = [[0] * count for count in experts]
        self._noted: list[tuple[int, Sequence[Demand]]] = []  # in the running pass

    def begin_pass(self) -> None:
        """What was noted before stays."""
        self._noted.clear()

    def note(self, layer: int, demands: Sequence[Demand]) -> None:
        """The router of a layer has spoken."""
        self._noted.append((layer, demands))
        self._add(layer, demands, 1)

    def take_back(self) -> None:
        """The running pass does not count."""
        for layer, demands in self._noted:
            self._add(layer, demands, -1)
        self._noted.clear()

    def _add(self, layer: int, demands: Sequence[Demand], times: int) -> None:
        row = self.counts[layer]
        for demand in demands:
            row[demand.expert] += times * demand.tokens


def merged(earlier: Sequence[Sequence[float]], uses: Sequence[Sequence[float]]) -> list[list[float]]:
    """The uses of a run added to those of the runs before it, which fade by as much of `WINDOW` as the run fills; the
    run's own where there are none. Rows of experts, by layer."""
    if not earlier:
        return [list(row) for row in uses]
    result = []
    for old, new in zip(earlier, uses, strict=True):
        kept = max(0.0, 1 - sum(new) / WINDOW)
        result.append([kept * before + now for before, now in zip(old, new, strict=True)])
    return result
