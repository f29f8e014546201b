"""Predictions that ask no router: nothing, the most frequent, whole layers, hashed tokens, the future of a replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

from tiermoe.decide.prediction.protocol import Forecasts, Here, LooksAhead, Predictor
from tiermoe.errors import ConfigError
from tiermoe.types import Wanted


class Nothing(Predictor):
    """Names nothing."""

    def candidates(self, layer: int, forecasts: Forecasts, here: Here) -> Iterator[Wanted]:
        return iter(())


class MostFrequent(LooksAhead):
    """Always the calibration's K most frequent experts of the next layers: what any prediction has to beat. Raises
    ConfigError without a calibration."""

    reads_table: ClassVar[str] = "frequencies"

    def __post_init__(self) -> None:
        if not self.context.frequencies:
            raise ConfigError(
                "prefetch=frequent needs the experts' frequencies and there are none; make them with tiermoe "
                "calibrate MODEL --text FILE"
            )

    def candidates(self, layer: int, forecasts: Forecasts, here: Here) -> Iterator[Wanted]:
        for target in self.targets(layer) if layer >= 0 else ():
            count = self.most(self.context.top_k[target])
            for expert, frequency in self.context.most_frequent(target)[:count]:
                yield Wanted(target, expert, frequency)


class WholeLayer(LooksAhead):
    """Every expert of the next layers in index order (STI, as EdgeMoE, section 4.1 describes it)."""

    errs: ClassVar[bool] = False

    def candidates(self, layer: int, forecasts: Forecasts, here: Here) -> Iterator[Wanted]:
        for target in self.targets(layer) if layer >= 0 else ():
            for expert in range(self.context.experts[target]):
                yield Wanted(target, expert, 1.0)


class HashRouted(LooksAhead):
    """The experts of layers that are routed by the token alone, exactly, from before the first layer on (EdgeMoE,
    section 3.1; DeepSeek-V4's first layers): those of most tokens first, ties by index. Raises ConfigError for a model
    without such layers."""

    errs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.context.hash_tables:
            raise ConfigError(
                "prefetch=hash needs layers that are routed by a hash of the token, and this model has none; take "
                "prefetch=next-gate"
            )

    def candidates(self, layer: int, forecasts: Forecasts, here: Here) -> Iterator[Wanted]:
        for target in self.targets(layer):
            table = self.context.hash_tables.get(target)
            if table is None:
                continue
            counts = Counter(expert for token in forecasts.token_ids() for expert in table[token])
            for expert, count in sorted(counts.items(), key=lambda counted: (-counted[1], counted[0])):
                yield Wanted(target, expert, float(count))


class Oracle(LooksAhead):
    """The experts that the next layers will choose: the bound of every prediction. Raises ConfigError outside a
    replay."""

    errs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.context.future is None:
            raise ConfigError("prefetch=oracle needs the future, which only a replay knows; use tiermoe simulate")
        self._future = self.context.future

    def candidates(self, layer: int, forecasts: Forecasts, here: Here) -> Iterator[Wanted]:
        for target in self.targets(layer) if layer >= 0 else ():
            for expert in self._future(target):
                yield Wanted(target, expert, 1.0)
