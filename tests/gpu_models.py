"""A tiny model whose experts pass through the tiers of a pretended GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from fake_cuda import FakeCuda
from fake_gpu import FakeGpu
from tiermoe.engine import load, service
from tiermoe.engine.budget import plan_memory
from tiermoe.engine.memory_plan import MemoryPlan
from tiny import write

FAMILY = "qwen3_moe"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


@pytest.fixture(scope="session")
def gpu_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"), FAMILY, torch.float32)


@pytest.fixture
def on_fake_gpu(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Any, FakeGpu]]]:
    """Loads a model on the pretended device. Its experts come through `host_slots` pinned slots and a fake GPU's
    copies, late and in any order; None: as many slots as are planned."""
    made: list[tuple[Any, FakeGpu]] = []

    def make(directory: Path, host_slots: int | None = None, **options: Any) -> tuple[Any, FakeGpu]:
        gpu = FakeGpu(seed=host_slots or 0, blocking=True)

        def planned(*arguments: Any) -> MemoryPlan:
            plan = plan_memory(*arguments)
            pools = tuple(replace(pool, slots=host_slots or pool.slots) for pool in plan.host_pools)
            return replace(plan, host_pools=pools)

        monkeypatch.setattr(load, "plan_memory", planned)
        monkeypatch.setattr(service, "CudaCopier", lambda device: gpu)
        given = {"dense_bits": 16, "lanes": 2, "memory": "4GiB", "device": "cuda:0", **options}
        loaded, _ = tiermoe.load(directory, **given)
        made.append((loaded, gpu))
        return made[-1]

    yield make
    for loaded, gpu in made:
        loaded.tiermoe.loader.drain()
        gpu.finish()
        loaded.tiermoe.close()
        assert gpu.violations == []
