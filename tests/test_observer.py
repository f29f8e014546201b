"""What an observer of a running engine is told, and that the model computes the same meanwhile and afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from small_engines import NATIVE
from tiermoe.batch import Batch, verify
from tiermoe.engine.observer import DENSE, EXPERTS, Observer
from tiermoe.types import Ready, Routed


class Clock(Observer):
    """Seconds of kernels by kind."""

    layers, kernels = False, True

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def on_kernel(self, kind: str, seconds: float) -> None:
        self.seconds[kind] += seconds


class Told(Observer):
    """Notes everything."""

    weights = True

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_route(self, routed: Routed, hidden: torch.Tensor) -> None:
        assert len(routed.experts) == len(routed.weights) == len(hidden)
        self.events.append((routed.layer, set(routed.tokens_per_expert())))

    def on_ready(self, layer: int, ready: Ready) -> None:
        self.events.append((layer, ready.expert))

    def on_computed(self, layer: int) -> None:
        self.events.append((layer, "computed"))


@pytest.fixture(params=["auto", "generic"])
def engine(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Iterator[Any]:
    model, _ = tiermoe.load(
        tiny_model("qwen3_moe", torch.bfloat16, **NATIVE), memory="4GiB", device="cpu", bits=4, dense_bits=4, lanes=1,
        cache="60%", decoder=request.param,
    )  # fmt: skip
    yield model.tiermoe
    model.tiermoe.close()


def logits(engine: Any, count: int) -> torch.Tensor:
    cache = engine.new_cache()
    found: torch.Tensor = engine.step(Batch((verify(cache.open(), 0, range(20, 20 + count)),)), cache, every=True)
    return found


@pytest.mark.parametrize("count", [1, 4])
def test_layers_are_told_in_the_order_they_run(engine: Any, count: int) -> None:
    before, told = logits(engine, count), Told()
    engine.observe(told)
    within = logits(engine, count)
    seen = list(told.events)
    engine.observe(None)
    assert torch.equal(before, within)
    assert torch.equal(before, logits(engine, count))
    assert told.events == seen
    assert not engine.context.needs_weights
    layer = 0
    while seen:
        at, chosen = seen.pop(0)
        ready = [seen.pop(0) for _ in chosen]
        assert (at, set(ready)) == (layer, {(layer, expert) for expert in chosen})
        assert seen.pop(0) == (layer, "computed")
        layer = (layer + 1) % len(engine.store.layers)
    assert layer == 0


def test_kernels_of_few_tokens_are_timed(engine: Any) -> None:
    """Whichever of a layer's calls computes them."""
    before = logits(engine, 4)
    engine.observe(clock := Clock())
    within = logits(engine, 4)
    engine.observe(None)
    counted = clock.seconds.copy()
    assert min(counted[EXPERTS], counted[DENSE]) > 0
    assert torch.equal(before, within)
    assert torch.equal(before, logits(engine, 4))
    assert clock.seconds == counted
