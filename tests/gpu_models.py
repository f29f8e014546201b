"""A tiny model whose experts pass through the tiers of a fake GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from fake_gpu import FakeGpu, put_on
from tiermoe.engine import load, reading, service
from tiermoe.engine.budget import plan_memory
from tiermoe.engine.memory_plan import MemoryPlan
from tiermoe.engine.service import tiers_of
from tiermoe.offload import slots
from tiny import write

FAMILY = "qwen3_moe"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


@pytest.fixture(scope="session")
def gpu_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"), FAMILY, torch.float32)


@pytest.fixture
def on_fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Any, FakeGpu]]]:
    """Loads a model whose experts pass through the fake GPU's tiers."""
    made: list[tuple[Any, FakeGpu]] = []

    def make(directory: Path, host_slots: int, **options: Any) -> tuple[Any, FakeGpu]:
        gpu = FakeGpu(seed=host_slots, blocking=True)

        def planned(*arguments: Any) -> MemoryPlan:
            plan = plan_memory(*arguments)
            return replace(plan, host_pools=tuple(replace(pool, slots=host_slots) for pool in plan.pools))

        def on_the_gpu(sizes, filler, lanes, bytes_of, device, pinned, learned):
            return tiers_of(sizes, filler, lanes, bytes_of, "cuda", pinned)

        monkeypatch.setattr(load, "plan_memory", planned)
        monkeypatch.setattr(service, "tiers_of", on_the_gpu)
        monkeypatch.setattr(service, "peak_memory", lambda device: 0)
        put_on(gpu, monkeypatch)
        for name in ("pin_memory", "unpin_memory"):
            monkeypatch.setattr(slots, name, lambda tensor: None)
        monkeypatch.setattr(reading, "page_cache_room", lambda: 0)  # no slots in main memory that are mapped files
        loaded, _ = tiermoe.load(directory, memory="4GiB", lanes=2, device="cpu", **{"dense_bits": 16, **options})
        made.append((loaded, gpu))
        return made[-1]

    yield make
    for loaded, gpu in made:
        loaded.tiermoe.loader.drain()
        gpu.finish()
        loaded.tiermoe.close()
        assert gpu.violations == []
