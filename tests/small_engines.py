"""Engines over small checkpoints whose sizes the native kernels take; tokens fed to them; what their routers chose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tiermoe
from tiermoe.batch import Batch, decode, prompt
from tiermoe.engine.observer import Observer
from tiermoe.types import Routed

NATIVE = {"hidden_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4, "head_dim": 32}
"""Sizes of a Qwen3-MoE that the native kernels take."""


def tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_of(directory: Path, **options: Any) -> Any:
    return tiermoe.load(directory, memory="4GiB", device="cpu", lanes=1, **options)[0].tiermoe


def logits_of_steps(engine: Any, ids: list[int], first: int, every: bool = False) -> torch.Tensor:
    """Logits (1 + len(ids) - first, vocabulary) of a prompt of the first tokens, then of each of the others alone.
    every: (len(ids), vocabulary), of each of the first tokens too."""
    cache = engine.new_cache()
    slab = cache.open()
    steps = [engine.step(Batch((prompt(slab, ids[:first]),)), cache, every)]
    steps += [engine.step(Batch((decode(slab, at, ids[at]),)), cache) for at in range(first, len(ids))]
    return torch.cat(steps)


def alone(engine: Any, ids: list[int], read: int) -> torch.Tensor:
    """Logits (len(ids) - read, vocabulary) after each token beyond the first `read`, decoded one by one."""
    return logits_of_steps(engine, ids, read)[1:]


def greedy(engine: Any, ids: list[int], count: int) -> list[int]:
    """`count` tokens after `ids`, one by one."""
    cache = engine.new_cache(1, len(ids) + count)
    slab = cache.open()
    found = [int(engine.step(Batch((prompt(slab, ids),)), cache).argmax())]
    while len(found) < count:
        row = decode(slab, len(ids) + len(found) - 1, found[-1])
        found.append(int(engine.step(Batch((row,)), cache).argmax()))
    return found


class OnRoute(Observer):
    """Calls `note` with each layer's routing and its input, with gate weights where `weights` says so."""

    def __init__(self, note: Callable[[Routed, torch.Tensor], Any], weights: bool = False) -> None:
        self.on_route = note
        self.weights = weights


def finish(model: Any) -> None:
    """Waits until all that was submitted has arrived, prefetches too: as if the link were fast enough."""
    controller = model.tiermoe.loader
    while controller.cache.in_flight:
        controller.record(controller.link.wait())
