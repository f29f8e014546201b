"""MoE-Infinity's prediction: what sequences like the running one activated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import add

from tiermoe.offload.policies.prediction.base import Available, Forecasts, LooksAhead, Ranked
from tiermoe.offload.policies.settings import setting
from tiermoe.types import Routed, Wanted

_Rows = dict[int, Counter[int]]
"""An expert activation matrix: MoE layer → expert → tokens that it served."""


@dataclass(slots=True)
class _Collected:
    """A finished sequence's matrix. Its number is its place in the columns of the collection."""

    ranked: Mapping[int, Ranked]  # layer → experts with their share of the layer's uses, falling
    unit: Mapping[tuple[int, int], float]  # of its rows, each scaled to the length 1
    nearest: int = 0  # times that it was the most similar one


@dataclass(eq=False)
class ActivationMatrix(LooksAhead):
    """The experts of the next `ahead` layers in the collected matrix that is most similar to the running sequence's:
    the mean over all layers of the cosine of two rows is largest, of equals the oldest. Their priority is
    r (1 - d / (L + 1)): r is the share of the layer's uses that the expert served, d the distance of its layer. Of a
    layer as many are named as the pass's tokens can ask for.

    The collection grows: a sequence's matrix is added when the next begins, and takes the place of the one that was
    most similar least often, of equals the oldest, if there are `collection`. It takes some 32 bytes for each expert
    of the model and matrix. Before the first sequence has ended nothing is named.

    Cosines are kept up to date: a layer's choices change one row of the running matrix."""

    collection: int = setting(32, read=int, low=1, high=512)
    _found: list[_Collected] = field(default_factory=list, init=False)
    _columns: dict[tuple[int, int], list[float]] = field(default_factory=dict, init=False)  # `unit` of each matrix
    _running: _Rows = field(default_factory=dict, init=False)
    _products: dict[int, list[float]] = field(default_factory=dict, init=False)  # of the running row with `unit`s
    _lengths: Counter[int] = field(default_factory=Counter, init=False)  # squared, of the running rows
    _similar: list[float] = field(default_factory=list, init=False)  # cosines with each matrix, summed over layers
    # choices of the running pass, each with the matrix that was nearest then
    _passed: dict[int, tuple[Counter[int], int | None]] = field(default_factory=dict, init=False)
    _nearest: int | None = field(default=None, init=False)

    def observe(self, routed: Routed) -> None:
        super().observe(routed)
        if self._passed and routed.layer <= max(self._passed):
            self._passed = {}  # another pass
        chosen = Counter(routed.tokens_per_expert())
        self._count(routed.layer, chosen)
        if self._found:
            self._nearest = self._similar.index(max(self._similar))
            self._found[self._nearest].nearest += 1
        self._passed[routed.layer] = chosen, self._nearest

    def discard_pass(self) -> None:
        for layer, (chosen, nearest) in self._passed.items():
            self._count(layer, {expert: -tokens for expert, tokens in chosen.items()})
            if nearest is not None:
                self._found[nearest].nearest -= 1
        self._passed = {}
        begun = any(self._lengths.values())
        self._nearest = self._similar.index(max(self._similar)) if self._found and begun else None

    def candidates(self, layer: int, forecasts: Forecasts, available: Available) -> Iterator[Wanted]:
        if self._nearest is None:
            return
        ranked, named = self._found[self._nearest].ranked, list[Wanted]()
        for target in self.targets(layer):
            decay = 1 - (target - layer) / (self.context.layers + 1)
            most = self.most(self.context.top_k[target])
            named += [Wanted(target, expert, share * decay) for expert, share in ranked.get(target, ())[:most]]
        named.sort(key=lambda wanted: -wanted.score)
        yield from named

    def new_sequence(self) -> None:
        if any(self._lengths.values()):
            self._collect()
        self._running, self._passed, self._nearest = {}, {}, None
        self._products.clear()
        self._lengths.clear()
        self._similar = [0.0] * len(self._found)

    def _count(self, layer: int, chosen: Mapping[int, int]) -> None:
        """Adds a pass's choices to a row of the running matrix, or takes them back."""
        row = self._running.setdefault(layer, Counter())
        products = before = self._products.get(layer) or [0.0] * len(self._found)
        old, squared = self._lengths[layer], self._lengths[layer]
        for expert, tokens in chosen.items():
            squared += tokens * (2 * row[expert] + tokens)
            row[expert] += tokens
            if column := self._columns.get((layer, expert)):
                one = column if tokens == 1 else [tokens * each for each in column]
                products = list(map(add, products, one))
        self._products[layer], self._lengths[layer] = products, squared
        now = 1 / math.sqrt(squared) if squared else 0.0
        then = 1 / math.sqrt(old) if old else 0.0
        self._similar = [
            total + product * now - last * then
            for total, product, last in zip(self._similar, products, before, strict=True)
        ]

    def _collect(self) -> None:
        """The running matrix becomes one of the collection."""
        ranked: dict[int, Ranked] = {}
        unit: dict[tuple[int, int], float] = {}
        for layer, row in self._running.items():
            uses = {expert: tokens for expert, tokens in row.items() if tokens > 0}
            total, length = sum(uses.values()), math.sqrt(sum(tokens * tokens for tokens in uses.values()))
            falling = sorted(uses.items(), key=lambda used: (-used[1], used[0]))
            ranked[layer] = [(expert, tokens / total) for expert, tokens in falling]
            unit |= {(layer, expert): tokens / length for expert, tokens in falling}
        if len(self._found) < self.collection:
            place = len(self._found)
            self._found.append(_Collected(ranked, unit))
            for column in self._columns.values():
                column.append(0.0)
        else:
            place = min(range(len(self._found)), key=lambda number: self._found[number].nearest)
            for expert in self._found[place].unit:
                self._columns[expert][place] = 0.0
            self._found[place] = _Collected(ranked, unit)
        for expert, value in unit.items():
            self._columns.setdefault(expert, [0.0] * len(self._found))[place] = value
