"""Watching a model while it runs: recording, calibrating and timing, without changing what it computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tiermoe.model.decoder import Decoder
from tiermoe.types import Ready, Routed

DENSE, EXPERTS = "dense", "experts"
"""The kinds of kernels."""

Undo = Callable[[], None]


Watch = Callable[[Callable[[Any], Any]], Undo]
"""Puts wrap(kernel), which is called as the kernel is, in the place of each kernel; returns what puts them back."""


class Observer:
    """Is told of what an engine runs (`Engine.observe`), one engine at a time; each method does nothing here.

    layers: it is told of layers, so none may run in one call that nobody can look into. kernels: it is told of kernels,
    each of which then runs under a clock. weights: `Routed.weights` are filled. whole_rankings: later layers' routers
    rank all of their experts (`Engine.forecaster`)."""

    layers: bool = True
    kernels: bool = False
    weights: bool = False
    whole_rankings: bool = False

    def on_route(self, routed: Routed, hidden: torch.Tensor) -> None:
        """A layer's router has chosen; hidden: the layer's input (T, H)."""

    def on_ready(self, layer: int, ready: Ready) -> None:
        """An expert of the layer can be computed. It lies in its slot until the next one of another group is ready."""

    def on_computed(self, layer: int) -> None:
        """The layer's experts are computed and summed."""

    def on_kernel(self, kind: str, seconds: float) -> None:
        """A kernel has run: DENSE (a linear layer, or attention where one call computes all of it) or EXPERTS."""


class Timed:
    """A kernel whose calls are timed, whatever they are named. note: called with the seconds of each."""

    def __init__(self, kernel: Any, note: Callable[[float], None]) -> None:
        self._kernel, self._note = kernel, note

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._run(self._kernel, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kernel, name)
        if not callable(found):
            return found
        return lambda *arguments, **named: self._run(found, *arguments, **named)

    def _run(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            self._note(time.perf_counter() - began)


def time_kernels(decoder: Any, watches: Iterable[Watch], observer: Observer) -> list[Undo]:
    """Puts every kernel of a decoder (one of ours or `GenericDecoder`) and of its MoE layers' experts (`watches`) under
    a clock that tells `observer`. Returns what ends it."""

    def dense(seconds: float) -> None:
        observer.on_kernel(DENSE, seconds)

    def experts(kernel: Any) -> Timed:
        return Timed(kernel, lambda seconds: observer.on_kernel(EXPERTS, seconds))

    if isinstance(decoder, Decoder):
        undo = decoder.watch(lambda part: Timed(part, dense))
    else:
        undo = decoder.time_linears(dense)
    return [undo, *(watch(experts) for watch in watches)]
