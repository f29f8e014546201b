"""How often each expert is used, in this run and in the ones before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiermoe.types import Demand

WINDOW = 1 << 15
"""Uses of a layer's experts after which nothing is left of what was recorded before them: 4,096 tokens of 8 experts."""


class Uses:
    """Tokens that each expert has served: `counts[layer][expert]`. experts: how many each layer has."""

    def __init__(self, experts: Sequence[int]) -> None:
        self.counts = [[0] * count for count in experts]

    def note(self, layer: int, demands: Iterable[Demand]) -> None:
        """The router of a layer has spoken."""
        row = self.counts[layer]
        for demand in demands:
            row[demand.expert] += demand.tokens


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
