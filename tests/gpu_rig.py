"""A GPU link between a fake GPU and a fake disk, and a controller over it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from fake_gpu import BYTES, FakeDisk, FakeGpu
from fake_link import each, pools
from patience import within
from tiermoe.offload.gpu import GpuLink
from tiermoe.offload.loader import ExpertLoader
from tiermoe.offload.slots import DeviceSlots, HostSlots
from tiermoe.types import Demand, ExpertKey, Load

LAYERS, EXPERTS = 4, 6


class Rig:
    """A link between fakes, and a controller over it."""

    def __init__(self, device_slots: int, host_slots: int, lanes: int, seed: int = 0) -> None:
        self.disk, self.gpu = FakeDisk(seed), FakeGpu(seed)
        self.device = DeviceSlots(device_slots, BYTES, "cpu")
        host = HostSlots(host_slots, BYTES)
        self.link = GpuLink(self.disk, {4: host}, self.device, lambda key: BYTES, self.gpu, lanes)
        self.controller = ExpertLoader(pools(device_slots), self.link)

    def layer(self, layer: int, experts: list[int]) -> None:
        for expert, slot, *_ in each(self.controller.run_layer(layer, [Demand(expert, 1, 4) for expert in experts])):
            self.gpu.use(self.device.buffer(slot), key(layer, expert))

    def end(self) -> None:
        """Everything has run, nothing was overwritten in use, and nothing keeps a slot."""
        self.controller.drain()
        self.gpu.finish()
        assert self.gpu.violations == []
        self.link.close()
        host = self.link.host
        host.unpin_copied()
        assert not host._caches[4].in_flight
        assert not host._caches[4]._pins


def key(layer: int, expert: int) -> ExpertKey:
    return ExpertKey(layer, expert, 4)


def load(expert: int, slot: int, urgent: bool = True) -> Load:
    return Load(key(0, expert), slot, urgent)


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*args: int, **options: int) -> Rig:
        made.append(Rig(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.disk.gate.set()
        one.gpu.release()
        within(one.end)


def walk(one: Rig, seed: int, steps: int = 24) -> int:
    """Random layers with prefetches; returns the loads that they took."""
    chooser = random.Random(seed)
    for step in range(steps):
        one.layer(step % LAYERS, chooser.sample(range(EXPERTS), chooser.randint(1, 3)))
        ahead = chooser.sample(range(EXPERTS), chooser.randint(0, 2))
        one.controller.prefetch(key((step + 1) % LAYERS, expert) for expert in ahead)
    one.controller.drain()
    return len(one.gpu.asked)
