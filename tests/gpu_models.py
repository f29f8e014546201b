"""A tiny model whose experts pass through the tiers of a fake GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from fake_gpu import FakeGpu
from tiermoe.engine import load, loading, reading, service
from tiermoe.kernels import machine_layout
from tiermoe.memory import needs, plan
from tiermoe.model import prepare_store
from tiermoe.tiers.assemble import Tiers
from tiermoe.tiers.gpu import GpuLink
from tiermoe.tiers.slots import DeviceSlots, HostSlots, SlotRuns
from tiny import write

FAMILY = "qwen3_moe"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


@pytest.fixture(scope="session")
def gpu_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"), FAMILY, torch.float32)


@pytest.fixture
def layout_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """4-bit codes as a GPU's kernels take them; on the CPU the reference kernel computes with them."""
    for module in (plan, needs, prepare_store, reading, load, loading, service):
        monkeypatch.setattr(module, "machine_layout", lambda device: machine_layout("cuda"))


@pytest.fixture
def on_fake_gpu(layout_of_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Any, FakeGpu]]]:
    """Loads a model whose experts pass through the fake GPU's tiers."""
    made: list[tuple[Any, FakeGpu]] = []

    def make(directory: Path, host_slots: int, **options: Any) -> tuple[Any, FakeGpu]:
        gpu = FakeGpu(seed=host_slots, blocking=True)

        def assemble(sizes, filler, lanes, bytes_of, device, _):
            slots = SlotRuns([DeviceSlots(count, nbytes, "cpu") for count, nbytes in sizes if count])
            (_, largest), (_, smallest) = sizes[0], sizes[-1]
            host = dict.fromkeys((16, 8, 4), HostSlots(host_slots, largest)) | {2: HostSlots(host_slots, smallest)}
            link = GpuLink(filler, host, slots, bytes_of, gpu, lanes)
            return Tiers(slots, link)

        monkeypatch.setattr(reading, "page_cache_room", lambda: 0)  # no slots in main memory that are mapped files
        monkeypatch.setattr(service, "assemble_tiers", assemble)
        loaded, _ = tiermoe.load(directory, memory="4GiB", lanes=2, device="cpu", **{"dense_bits": 16, **options})
        made.append((loaded, gpu))
        return made[-1]

    yield make
    for loaded, gpu in made:
        loaded.tiermoe.controller.drain()
        gpu.finish()
        loaded.tiermoe.close()
        assert gpu.violations == []
