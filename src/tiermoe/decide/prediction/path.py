"""Which experts usually follow those of the previous layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from tiermoe.decide.prediction.known import HashRouted
from tiermoe.decide.prediction.paths import path_key
from tiermoe.decide.prediction.protocol import Forecasts, Here, Predictor
from tiermoe.decide.settings import setting
from tiermoe.errors import ConfigError
from tiermoe.types import Routed, Wanted


@dataclass(eq=False)
class ActivationPath(Predictor):
    """Experts of the next layer by falling probability after the last `path` layers, the running one included
    (EdgeMoE, section 3.3.2; with one layer EAP of Fate, section 5.1). A path that was never seen falls back to a
    shorter one, then to the layer's frequencies.

    The path is a token's: a pass over several tokens names nothing, except that in an encoder, where all of them are
    re-batched by expert, the whole next layer is named in order, its first one when a request begins (section 3.3.3:
    the initial buffer). For an encoder alone, which needs no paths, the cache begins with the experts of the highest
    frequency (there). Raises ConfigError without a calibration."""

    path: int = setting(2, read=int, low=1, high=2)
    reads_table: ClassVar[str] = "paths"

    def __post_init__(self) -> None:
        if not self.context.paths and not self._encoder_alone:
            raise ConfigError(
                "prefetch=path needs activation paths and there are none; make them with tiermoe calibrate MODEL "
                "--text FILE, or take prefetch=next-gate"
            )
        self._active: dict[int, list[int]] = {}

    @property
    def _encoder_alone(self) -> bool:
        return self.context.encoder_layers == self.context.layers

    def first(self) -> list[Wanted]:
        if not self._encoder_alone:
            return []
        used = sorted((-times, place) for place, times in self.context.frequencies.items() if times > 0)
        return [Wanted(*place, -times) for times, place in used]

    def observe(self, routed: Routed) -> None:
        super().observe(routed)
        if self._active and routed.layer <= max(self._active):
            self._active.clear()  # another pass
        if self.tokens == 1 and routed.layer >= self.context.encoder_layers:
            self._active[routed.layer] = list(routed.tokens_per_expert())

    def candidates(self, layer: int, forecasts: Forecasts, here: Here) -> Iterator[Wanted]:
        target = layer + 1
        if target >= self.context.layers:
            return
        if target < self.context.encoder_layers:
            for expert in range(self.context.experts[target]):
                yield Wanted(target, expert, 1.0)
        elif layer in self._active:
            following = self._following(layer)
            total = sum(count for _, count in following)
            for expert, count in following:
                yield Wanted(target, expert, count / total)

    def new_sequence(self) -> None:
        self._active.clear()

    def _following(self, layer: int) -> list[tuple[int, float]]:
        """Experts of the next layer with counts, falling; ties: lower index first."""
        known = self.context.paths.get(layer + 1, {})
        for length in range(self.path, 0, -1):
            path = range(layer - length + 1, layer + 1)
            if all(previous in self._active for previous in path):
                key = path_key(self._active[previous] for previous in path)
                if key in known:
                    return _falling(known[key].items())
        return self.context.most_frequent(layer + 1)


class HashThenPath(ActivationPath):
    """Layers that are routed by a hash of the token exactly, as `HashRouted` names them, the others by the path
    (EdgeMoE, sections 3.1 and 3.3.2). Raises ConfigError without either."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hashed = HashRouted(self.context)

    def candidates(self, layer: int, forecasts: Forecasts, here: Here) -> Iterator[Wanted]:
        if layer + 1 in self.context.hash_tables:
            yield from self._hashed.candidates(layer, forecasts, here)
        else:
            yield from super().candidates(layer, forecasts, here)


def _falling(counts: Iterable[tuple[int, int]]) -> list[tuple[int, float]]:
    return sorted(((expert, float(count)) for expert, count in counts), key=lambda seen: (-seen[1], seen[0]))
