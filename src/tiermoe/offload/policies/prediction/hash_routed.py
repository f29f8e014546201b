"""Predictors for layers that are routed by a hash of the token: exact, from before the first layer on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

from tiermoe.errors import ConfigError
from tiermoe.offload.policies.prediction.base import Available, Forecasts, LooksAhead
from tiermoe.offload.policies.prediction.path import ActivationPath
from tiermoe.types import Wanted


class HashRouted(LooksAhead):
    """The experts of hash-routed layers (EdgeMoE, section 3.1; DeepSeek-V4's first layers), those of most tokens
    first, ties by index. ConfigError for a model without such layers."""

    errs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.context.hash_tables:
            raise ConfigError(
                "prefetch=hash needs layers that are routed by a hash of the token, and this model has none; take "
                "prefetch=next-gate"
            )

    def candidates(self, layer: int, forecasts: Forecasts, available: Available) -> Iterator[Wanted]:
        for target in self.targets(layer):
            table = self.context.hash_tables.get(target)
            if table is None:
                continue
            counts = Counter(expert for token in forecasts.token_ids() for expert in table[token])
            for expert, count in sorted(counts.items(), key=lambda counted: (-counted[1], counted[0])):
                yield Wanted(target, expert, float(count))


class HashThenPath(ActivationPath):
    """Hash-routed layers exactly, as `HashRouted` names them, the others by the activation path (EdgeMoE, sections 3.1
    and 3.3.2). ConfigError without either."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hash_routed = HashRouted(self.context)

    def candidates(self, layer: int, forecasts: Forecasts, available: Available) -> Iterator[Wanted]:
        if layer + 1 in self.context.hash_tables:
            yield from self._hash_routed.candidates(layer, forecasts, available)
        else:
            yield from super().candidates(layer, forecasts, available)
