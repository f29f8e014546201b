"""Every expert whose predicted weight lies above a percentile of its layer's weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tiermoe.decide.prediction.protocol import Forecasts, Here, LooksAhead
from tiermoe.decide.settings import setting
from tiermoe.types import Wanted


def count_above(percentile: float, experts: int) -> int:
    """How many of `experts` different weights are above their percentile (0 to 100, linear interpolation as numpy's
    default): the percentile lies at position percentile / 100 * (experts - 1) of the ascending weights."""
    return experts - 1 - math.floor(percentile * (experts - 1) / 100)


@dataclass(eq=False)
class AbovePercentile(LooksAhead):
    """By falling weight, in decode at most `window` that are not here: N_prefetch = floor(T_window / T_io) transfers
    fit the time (Fate, sections 4.2 and 4.3). In prefill no time bounds it, and each token has its own experts above
    the percentile: as many as these can be together, by summed weight. `percentile`: 0 to 100. `window`: transfers,
    None: no bound."""

    percentile: float = setting(75.0, low=0, high=100)
    window: int | None = setting(None, read=int, low=0, high=1 << 16, calibrated=True)
    asks_routers: ClassVar[bool] = True
    ranks_all: ClassVar[bool] = True

    def candidates(self, layer: int, forecasts: Forecasts, here: Here) -> Iterator[Wanted]:
        if layer < 0:
            return
        transfers = self.window if self.phase == "decode" else None
        for target in self.targets(layer):
            count = self.most(count_above(self.percentile, self.context.experts[target]))
            for expert, weight in forecasts.ranked(target)[:count]:
                if transfers is not None and not here(target, expert):
                    if transfers == 0:
                        continue
                    transfers -= 1
                yield Wanted(target, expert, weight)
