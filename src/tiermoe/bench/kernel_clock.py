"""How long kernels run within a stretch: those of experts, and those of all other weights.

The second are linear layers, and a decoder layer's attention where one call computes all of it. What is left of a
token's time, less waiting for the link, is the framework's own: Python, transformers' modelling code, norms, other
attention, routing, and this program's decisions. Timing every call costs a little, so it is done in a pass of its own
and never in the one that is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from tiermoe.model.decoder import Decoder
from tiermoe.model.linear import PackedLinear
from tiermoe.runtime.neuron_experts import NeuronLayerExperts


class KernelClock:
    """Sums the seconds of a model's kernels while it is entered: `experts_s` and `dense_s` so far."""

    def __init__(self, model: Any) -> None:
        self.experts_s = 0.0
        self.dense_s = 0.0
        self._model = model
        self._undo: list[Callable[[], None]] = []

    @property
    def seconds(self) -> float:
        """Of all kernels."""
        return self.experts_s + self.dense_s

    def __enter__(self) -> KernelClock:
        decoder = self._model.tiermoe.steps.decoder
        own = isinstance(decoder, Decoder)
        for layer in self._model.tiermoe.layers:
            self._watch_experts(layer.run)
        for module in self._model.modules():
            if isinstance(module, torch.nn.Linear | PackedLinear) and not own:
                self._watch_linear(module)
        if isinstance(decoder, Decoder):
            self._undo.append(decoder.watch(lambda part: _Timed(part, self, "dense_s")))
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    def timed(self, name: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The call's result; its seconds are added to `name`."""
        began = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - began)

    def _watch_experts(self, experts: Any) -> None:
        if isinstance(experts, NeuronLayerExperts):
            layer: Any = experts.experts
            for kernel in layer._kernels.values():  # around it they wait for the drive
                self._replace(kernel, "_kernel", kernel._kernel, self._proxy(kernel._kernel))
            return
        held = experts._kernels
        self._replace(experts, "_kernels", held, {bits: self._proxy(one) for bits, one in held.items()})
        if experts.settled is not None:
            self._replace(experts.settled, "_kernel", experts.settled._kernel, self._proxy(experts.settled._kernel))

    def _watch_linear(self, module: Any) -> None:
        began = 0.0

        def before(*_: Any) -> None:
            nonlocal began
            began = time.perf_counter()

        def after(*_: Any) -> None:
            self.dense_s += time.perf_counter() - began

        self._undo += [module.register_forward_pre_hook(before).remove, module.register_forward_hook(after).remove]

    def _proxy(self, kernel: Any) -> _Timed:
        return _Timed(kernel, self, "experts_s")

    def _replace(self, owner: Any, name: str, held: Any, proxy: Any) -> None:
        setattr(owner, name, proxy)
        self._undo.append(lambda: setattr(owner, name, held))


class _Timed:
    """A kernel whose calls are timed, whatever they are named."""

    def __init__(self, kernel: Any, clock: KernelClock, name: str) -> None:
        self._kernel, self._clock, self._name = kernel, clock, name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._clock.timed(self._name, self._kernel, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kernel, name)
        if not callable(found):
            return found
        return lambda *arguments, **named: self._clock.timed(self._name, found, *arguments, **named)
