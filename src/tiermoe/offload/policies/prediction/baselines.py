"""Predictors that papers compare with: nothing, the most frequent experts, whole layers, the future of a replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from tiermoe.errors import ConfigError
from tiermoe.offload.policies.prediction.base import Available, Forecasts, LayerByLayer, Predictor, Ranked
from tiermoe.types import Wanted


class Nothing(Predictor):
    """Names nothing."""

    def candidates(self, layer: int, forecasts: Forecasts, available: Available) -> Iterator[Wanted]:
        return iter(())


class MostFrequent(LayerByLayer):
    """The calibration's K most frequent experts of the next layers: what any prediction has to beat. ConfigError
    without a calibration."""

    reads_table: ClassVar[str] = "frequencies"

    def __post_init__(self) -> None:
        if not self.context.frequencies:
            raise ConfigError(
                "prefetch=frequent needs the experts' frequencies and there are none; make them with tiermoe "
                "calibrate MODEL --text FILE"
            )

    def named(self, target: int, forecasts: Forecasts) -> Ranked:
        return self.context.most_frequent(target)[: self.most(self.context.top_k[target])]


class WholeLayer(LayerByLayer):
    """Every expert of the next layers in index order (STI, as EdgeMoE, section 4.1 describes it)."""

    errs: ClassVar[bool] = False

    def named(self, target: int, forecasts: Forecasts) -> Ranked:
        return [(expert, 1.0) for expert in range(self.context.experts[target])]


class Oracle(LayerByLayer):
    """The experts that the next layers will choose: the bound of every prediction. ConfigError outside a replay."""

    errs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.context.future is None:
            raise ConfigError("prefetch=oracle needs the future, which only a replay knows; use tiermoe simulate")
        self._future = self.context.future

    def named(self, target: int, forecasts: Forecasts) -> Ranked:
        return [(expert, 1.0) for expert in self._future(target)]
