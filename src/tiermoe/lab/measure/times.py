"""What computing takes here, for replays: seconds of an expert and of everything else, in decode and in a prompt.

Waiting for the link is subtracted, so the experts need not all fit the cache. What a layer does until its loads are
under way and its first expert is computed counts as everything else: no load overlaps it. From then on the layer's time
counts as its experts', with what loading costs the computing thread: threads that read and check experts slow it down.
Times are therefore longer where more experts miss, and fit replays of a cache like the measured one best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from tiermoe.engine.engine import engine_of
from tiermoe.engine.observer import Observer
from tiermoe.lab.measure.texts import Feed
from tiermoe.lab.trace import Times
from tiermoe.types import Ready, Routed

_DECODED = 32
_PROMPTS = 3  # the first is left out: it may be the first that the model does


@torch.inference_mode()
def measure_times(model: Any, ids: torch.Tensor, prompt: int) -> Times:
    """Times of a loaded model on one sequence (n,): the prompt three times, then up to `_DECODED` tokens after it."""
    prefills, decodes = [], []
    with Stopwatch(model) as watch:
        for _ in range(_PROMPTS):
            feed = Feed(model, ids, prompt)
            watch.lap()
            feed.prompt()
            prefills.append(watch.lap())
        for position in range(prompt, min(prompt + _DECODED, len(ids))):
            feed.token(position)
            decodes.append(watch.lap())
    return times_of(prefills[1:], decodes, prompt, engine_of(model).settings.bits_used)


def times_of(
    prefills: Sequence[Lap],
    decodes: Sequence[Lap],
    prompt: int,
    bits: int,
    average: Callable[[Iterable[float]], float] = median,
) -> Times:
    """Times of passes over prompts of `prompt` tokens and over single ones, with experts in `bits`."""
    one = average(lap.experts_s / lap.used for lap in decodes)
    dense = average((lap.seconds - lap.experts_s) / lap.passes for lap in decodes)
    further = average(lap.further(one) for lap in prefills)
    prefill_token = average(lap.beside(one, further) / prompt for lap in prefills)
    layers = min(average(lap.layers_s / lap.passes for lap in decodes), dense)
    prefill_layers = min(average(lap.layers_s / prompt for lap in prefills), prefill_token)
    prefetch = average(lap.prefetch_s / max(lap.layers, 1) for lap in decodes)
    prefill_prefetch = average(lap.prefetch_s / max(lap.layers, 1) / prompt for lap in prefills)
    return Times(dense, {bits: one}, prefill_token, {bits: further}, layers, prefill_layers, prefetch, prefill_prefetch)


@dataclass(frozen=True, slots=True)
class Lap:
    """What one pass took."""

    seconds: float  # without those of prefetching
    experts_s: float  # seconds of its experts
    used: int  # (token, expert) pairs that ran
    active: int  # (layer, expert) pairs that ran
    passes: int = 1  # 2 where a token's little pass was discarded (MoBiLE)
    layers: int = 0  # that ran
    layers_s: float = 0.0  # seconds from the routers' choices to the layers' first experts
    prefetch_s: float = 0.0  # seconds of naming what to read ahead

    def further(self, one: float) -> float:
        """Seconds of each token after an expert's first token, which takes `one`."""
        return max(self.experts_s - self.active * one, 0.0) / max(self.used - self.active, 1)

    def beside(self, one: float, further: float) -> float:
        """Seconds of everything but experts that take `one` and `further`."""
        return max(self.seconds - self.active * one - (self.used - self.active) * further, 0.0)


class Stopwatch(Observer):
    """Times a model's passes and their experts, less the waiting for the link and the naming of what to read ahead,
    which it times apart. A context."""

    def __init__(self, model: Any) -> None:
        engine = engine_of(model)
        self._engine: Any = engine
        self._device = engine.device
        self._experts_s = self._layers_s = 0.0
        self._used = self._active = self._passes = self._layers = 0
        self._layer = -1  # that ran last; a pass begins where it falls
        self._routed = 0.0  # when the running layer's router had spoken
        self._first: float | None = None  # when its first expert could be computed
        self._prefetch_s = engine.scheduler.predicted_s
        self._began = self._now()

    def __enter__(self) -> Stopwatch:
        self._engine.observe(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.observe(None)

    def lap(self) -> Lap:
        """What has passed since the last lap."""
        seconds = self._now() - self._began
        named_s, self._prefetch_s = (
            self._engine.scheduler.predicted_s - self._prefetch_s,
            self._engine.scheduler.predicted_s,
        )
        lap = Lap(
            seconds, self._experts_s, self._used, self._active, max(self._passes, 1), self._layers, self._layers_s,
            named_s,
        )  # fmt: skip
        self._experts_s, self._used, self._active, self._passes, self._layer = 0.0, 0, 0, 0, -1
        self._layers, self._layers_s = 0, 0.0
        self._began = self._now()
        return lap

    def on_route(self, routed: Routed, hidden: torch.Tensor) -> None:
        counts = routed.tokens_per_expert()
        self._used += sum(counts.values())
        self._active += len(counts)
        self._passes += self._layer < 0 or routed.layer <= self._layer
        self._layer = routed.layer
        self._layers += 1
        self._first = None
        self._routed = self._now()

    def on_ready(self, layer: int, ready: Ready) -> None:
        if self._first is None:
            self._first = self._now()
            self._layers_s += self._first - self._routed

    def on_computed(self, layer: int) -> None:
        if self._first is not None:
            self._experts_s += self._now() - self._first

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # so that each part's work is done within it
        return time.perf_counter() - float(self._engine.wait_s) - float(self._engine.scheduler.predicted_s)
