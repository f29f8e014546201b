"""A pretended GPU and disk: late, in any order, and they tell when a slot in use was overwritten."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tiermoe.engine import service
from tiermoe.errors import LoadError
from tiermoe.offload.slots import DeviceSlots
from tiermoe.types import ExpertKey

BYTES = 4096


def content(key: ExpertKey) -> torch.Tensor:
    """The bytes of an expert on the fake disk."""
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    return torch.randint(0, 256, (BYTES,), dtype=torch.uint8, generator=generator)


class FakeDisk:
    """An `offload.disk.SlotFiller` that takes its time. `gate`: closed, it holds every read that has begun."""

    def __init__(self, seed: int = 0) -> None:
        self.busy_s = 0.0
        self.order: list[ExpertKey] = []
        self.failing: set[ExpertKey] = set()
        self.gate = threading.Event()
        self.gate.set()
        self._random = random.Random(seed)

    @property
    def reads(self) -> Counter[ExpertKey]:
        return Counter(self.order)

    @property
    def bytes_read(self) -> int:
        return BYTES * len(self.order)

    def fill(self, key: ExpertKey, slot: torch.Tensor) -> None:
        self.order.append(key)
        self.gate.wait()
        whole, half = content(key), BYTES // 2
        slot[:half] = whole[:half]
        time.sleep(self._random.random() * 3e-4)
        if key in self.failing:
            raise LoadError(f"reading {key} failed: the fake disk was told so")
        slot[half:BYTES] = whole[half:]

    def roll_back(self) -> None:
        """Reads are counted by their order alone."""

    def close(self) -> None:
        assert self.gate.is_set()


@dataclass(eq=False)
class Copy:
    """A copy that was asked for, with what its host slot held at that moment."""

    host: torch.Tensor
    device: torch.Tensor
    after: int
    held: torch.Tensor
    steps: int = 0

    @property
    def done(self) -> bool:
        return self.steps == 2


class FakeGpu:
    """An `offload.cuda.CudaCopier` and the stream of computation beside it; a thread runs both in random order, as
    far as marks and tickets leave it free, and copies in two halves.

    blocking: `wait_before_use` waits, for computations that do not go through `use`. `violations` says what
    went wrong.
    """

    def __init__(self, seed: int = 0, blocking: bool = False) -> None:
        self.violations: list[str] = []
        self.asked: list[Copy] = []
        self.refuse = False
        self.copy_s = 1e-3
        self._blocking = blocking
        self._random = random.Random(seed)
        self._held = self._ended = False
        self._launched: list[Copy | Callable[[], None]] = []
        self._reached = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def mark(self) -> int:
        return len(self._launched)

    def copy(self, host: torch.Tensor, device: torch.Tensor, after: int) -> Copy:
        if self.refuse:
            raise RuntimeError("the fake GPU refuses to copy")
        with self._changed:
            self.asked.append(Copy(host, device, after, host.clone()))
            self._changed.notify_all()
            return self.asked[-1]

    def ready(self, ticket: Copy) -> bool:
        return ticket.done

    def wait(self, ticket: Copy) -> None:
        with self._changed:
            self._changed.wait_for(lambda: ticket.done)

    def seconds(self, ticket: Copy) -> float:
        assert ticket.done
        return self.copy_s

    def wait_before_use(self, ticket: Copy) -> None:
        if self._blocking:
            self.wait(ticket)
            return
        self._launch(ticket)

    def use(self, slot: torch.Tensor, key: ExpertKey) -> None:
        """Launches a computation with the expert that `slot` should hold when its turn comes."""

        def compute() -> None:
            if not torch.equal(slot[:BYTES], content(key)):
                self.violations.append(f"the slot of {key} held something else when it was computed with")

        self._launch(compute)

    def hold(self) -> None:
        """No copy and no computation makes progress until `release`."""
        with self._changed:
            self._held = True

    def release(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def finish(self) -> None:
        """Waits until everything launched has run."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._reached == len(self._launched) and all(copy.done for copy in self.asked)
            )
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    def _launch(self, operation: Any) -> None:
        with self._changed:
            self._launched.append(operation)
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._ended:
            with self._changed:
                possible = self._possible()
                if not possible:
                    self._changed.wait()
                    continue
                self._random.choice(possible)()
                self._changed.notify_all()
            time.sleep(self._random.random() * 2e-4)

    def _possible(self) -> list[Callable[[], None]]:
        if self._held:
            return []
        steps = [lambda c=c: self._half(c) for c in self.asked if not c.done and c.after <= self._reached]
        if self._reached < len(self._launched):
            following = self._launched[self._reached]
            if not isinstance(following, Copy) or following.done:
                steps.append(self._compute)
        return steps

    def _half(self, copy: Copy) -> None:
        if not torch.equal(copy.host, copy.held):
            self.violations.append("a host slot was overwritten before it was copied")
        part = slice(BYTES // 2) if copy.steps == 0 else slice(BYTES // 2, None)
        copy.device[part] = copy.host[part]
        copy.steps += 1

    def _compute(self) -> None:
        operation = self._launched[self._reached]
        if not isinstance(operation, Copy):
            operation()
        self._reached += 1


def put_on(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tiers_of` for a GPU gives the tiers of this one."""
    monkeypatch.setattr(service, "CudaCopier", lambda device: gpu)
    monkeypatch.setattr(service, "DeviceSlots", lambda count, nbytes, device: DeviceSlots(count, nbytes, "cpu"))
