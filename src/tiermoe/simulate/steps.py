"""The passes that a composition makes of a trace, and their future."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiermoe.decide.composition import Composition
from tiermoe.decide.prediction.protocol import Ranked
from tiermoe.decide.routing import is_confident, little
from tiermoe.trace.schema import LayerTrace, Pass, Trace
from tiermoe.types import ExpertKey, Routed


@dataclass(slots=True)
class Step:
    """One pass to run. recalled: the layers of the discarded little pass at the same position. discarded: this is such
    a pass."""

    phase: str
    sequence: int
    size: int
    tokens: list[int]
    layers: list[LayerTrace]
    recalled: list[LayerTrace] | None = None
    discarded: bool = False

    @property
    def running(self) -> list[int]:
        """The MoE layers that run, in order."""
        return [layer for layer, traced in enumerate(self.layers) if traced.experts]

    def routed(self, layer: int) -> Routed:
        """The router's choice for `layer`."""
        return Routed(layer, self.phase, self.layers[layer].experts, self.layers[layer].weights)


def steps_of(trace: Trace, composition: Composition) -> list[Step]:
    """The passes that run, in order. What was routed for all K stands for what would have been routed: with fewer
    experts the model's hidden states, and so later choices, would differ a little."""
    steps = []
    for passed in trace.passes:
        if passed.phase == "decode" and composition.routing == "half":
            steps.append(_step(passed, _little(passed.layers, composition.little)))
        elif passed.phase == "decode" and composition.routing == "confident" and passed.little is not None:
            sure = is_confident(passed.little.confidence, composition.gamma)
            steps.append(_step(passed, _little(passed.little.layers, composition.little), discarded=not sure))
            if not sure:
                steps.append(_step(passed, passed.layers, recalled=passed.little.layers))
        else:
            steps += _parted(_step(passed, passed.layers), trace.header.encoder_layers)
    return [step for step in steps if step.running]


def _step(
    passed: Pass, layers: list[LayerTrace], recalled: list[LayerTrace] | None = None, discarded: bool = False
) -> Step:
    return Step(passed.phase, passed.sequence, passed.size, passed.tokens, layers, recalled, discarded)


def _parted(step: Step, encoder_layers: int) -> list[Step]:
    """An encoder and the decoder behind it make passes of their own; the decoder's first token is a decoded one."""
    if not any(layer < encoder_layers for layer in step.running):
        return [step]
    nothing = LayerTrace([], [])
    decoder = step.layers[encoder_layers:]
    encoded = replace(step, layers=step.layers[:encoder_layers] + [nothing] * len(decoder))
    size = max((len(layer.experts) for layer in decoder), default=0)
    if not size:
        return [encoded]
    phase = "decode" if size == 1 else "prefill"
    layers = [nothing] * encoder_layers + decoder
    return [encoded, replace(step, phase=phase, size=size, tokens=[], layers=layers)]


def _little(layers: Sequence[LayerTrace], count: int | None) -> list[LayerTrace]:
    """The layers as a little pass of `count` experts (None: K/2) runs them."""
    passes = []
    for layer in layers:
        kept = [little(gates, count) for gates in layer.weights]
        experts = [[row[place] for place in places] for row, places in zip(layer.experts, kept, strict=True)]
        weights = [[row[place] for place in places] for row, places in zip(layer.weights, kept, strict=True)]
        passes.append(replace(layer, experts=experts, weights=weights))
    return passes


class Recorded:
    """Implements `Forecasts` from what a step's trace recorded; `layer` is the one that runs (-1: none yet)."""

    def __init__(self, step: Step) -> None:
        self.layer = -1
        self._step = step

    def ranked(self, target: int) -> Ranked:
        if self.layer < 0:
            return ()
        return self._step.layers[self.layer].forecasts.get(target - self.layer, ())

    def counted(self, target: int) -> Ranked:
        if self.layer < 0:
            return ()
        return self._step.layers[self.layer].counts.get(target - self.layer, ())

    def token_ids(self) -> Sequence[int]:
        return self._step.tokens

    def recalled(self, target: int) -> Ranked:
        if self._step.recalled is None or target >= len(self._step.recalled):
            return ()
        layer = self._step.recalled[target]
        return [pair for row in zip(layer.experts, layer.weights, strict=True) for pair in zip(*row, strict=True)]


class Future:
    """When each expert is asked for next. The replay says where it stands by `begin` and `at`."""

    def __init__(self, steps: Sequence[Step], layers: int) -> None:
        self._layers = layers
        self._steps = steps
        self._now = 0
        self._step = 0
        self._following: list[dict[int, float]] = []
        self._next: list[dict[int, float]] = [{} for _ in range(layers)]
        for step in reversed(steps):
            for layer in reversed(range(layers)):
                self._following.append(self._note(len(self._following), step, layer))
        self._total = len(self._following)
        self._following.reverse()

    def _note(self, back: int, step: Step, layer: int) -> dict[int, float]:
        """Expert → its next use after this layer's run, as a count from the end; later uses are noted already."""
        upcoming = self._next[layer]
        chosen = {expert for token in step.layers[layer].experts for expert in token}
        after = {expert: upcoming.get(expert, math.inf) for expert in chosen}
        upcoming.update(dict.fromkeys(chosen, -float(back)))
        return after

    def begin(self, step: int) -> None:
        """Step number `step` begins. All must, in order."""
        self._step = step

    def at(self, layer: int) -> None:
        """Layer `layer` of the step runs now. All that run must be named, in order."""
        self._now = self._step * self._layers + layer
        self._next[layer].update(self._following[self._now])

    def next_use(self, key: ExpertKey) -> float:
        """Implements `NextUse`: layers from now until the key's next request; infinity where there is none."""
        use = self._next[key.layer].get(key.expert, math.inf)
        return use if use == math.inf else use + self._total - 1 - self._now

    def choices(self, layer: int) -> list[int]:
        """What `layer` of the running step chooses, by number of tokens (`prediction.context.Future`)."""
        counts = self._steps[self._step].routed(layer).tokens_per_expert()
        return sorted(counts, key=lambda expert: -counts[expert])
