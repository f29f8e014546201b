"""Fate's predictor (sections 4.2 and 4.3): every expert whose predicted weight lies above a percentile of its layer's
weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from tiermoe.errors import ConfigError
from tiermoe.offload.policies.prediction.base import Available, Forecasts, LooksAhead, Ranked
from tiermoe.offload.policies.settings import setting
from tiermoe.types import Wanted

_MOST = 1 << 16


def count_above(percentile: float, experts: int) -> int:
    """How many of `experts` different weights are above their percentile (0 to 100, linear interpolation as numpy's
    default): the percentile lies at position percentile / 100 * (experts - 1) of the ascending weights."""
    return experts - 1 - math.floor(percentile * (experts - 1) / 100)


def _window(given: Any) -> int | tuple[int, ...]:
    """3, or 3,2,2,0. ValueError for what no number of transfers is."""
    several = given.split(",") if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
    numbers = tuple(map(int, several))
    if not numbers or min(numbers) < 0 or max(numbers) > _MOST:
        raise ValueError
    return numbers if len(numbers) > 1 else numbers[0]


@dataclass(eq=False)
class AbovePercentile(LooksAhead):
    """By falling weight, in decode at most `window` experts that are not available: N_prefetch = floor(T_window / T_io)
    transfers fit the time of the running layer. No time bounds a prefill, whose experts come by falling `popularity`.
    ConfigError for a window of another number of layers."""

    percentile: float = setting(75.0, low=0, high=100)
    # transfers while a layer runs, of each MoE layer or one number for all; 0: none, None: no bound
    window: int | tuple[int, ...] | None = setting(
        None, read=_window, kind=f"transfers from 0 to {_MOST}, one number or one for each MoE layer like 3,2,2,0",
        calibrated=True,
    )  # fmt: skip
    # of a prefill: 'counts' of the tokens that choose an expert, naming only chosen ones (the paper's), or 'weights',
    # summed over the tokens, of as many experts as may be above the percentile of one
    popularity: str = setting("counts", read=str, one_of=("counts", "weights"))
    asks_routers: ClassVar[bool] = True
    ranks_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.window, tuple) and len(self.window) != self.context.layers:
            raise ConfigError(
                f"window has {len(self.window)} numbers and the model {self.context.layers} MoE layers; give one for "
                f"each, or one for all"
            )

    def candidates(self, layer: int, forecasts: Forecasts, available: Available) -> Iterator[Wanted]:
        if layer < 0:
            return
        transfers = self.window[layer] if isinstance(self.window, tuple) else self.window
        if self.phase != "decode":
            transfers = None
        for target in self.targets(layer):
            count = self.most(count_above(self.percentile, self.context.experts[target]))
            for expert, weight in self.ranking(target, forecasts)[:count]:
                if transfers is not None and not available(target, expert):
                    if transfers == 0:
                        continue
                    transfers -= 1
                yield Wanted(target, expert, weight)

    def ranking(self, target: int, forecasts: Forecasts) -> Ranked:
        if self.phase == "prefill" and self.popularity == "counts":
            return forecasts.counted(target)
        return forecasts.ranked(target)
