"""A pretended GPU and disk: late, in any order, and they tell when a slot in use was overwritten."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from tiermoe.engine import service
from tiermoe.errors import LoadError
from tiermoe.offload.cuda import CudaCopier, Ticket
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
    urgent: bool
    held: torch.Tensor
    steps: int = 0

    @property
    def done(self) -> bool:
        return self.steps == 2


class Stream:
    """A stream of a fake GPU: copies, computations, records of events and waits for these, in their order."""

    def __init__(self, gpu: FakeGpu, priority: int = 0) -> None:
        self.urgent = priority < 0
        self.operations: list[Copy | Callable[[], None] | tuple[str, Event]] = []
        self.reached = 0
        self._gpu = gpu

    def launch(self, operation: Copy | Callable[[], None] | tuple[str, Event]) -> None:
        with self._gpu.changed:
            self.operations.append(operation)
            self._gpu.changed.notify_all()

    def wait_event(self, event: Event) -> None:
        self.launch(("wait", event))


class Event:
    """An event of a fake GPU. `time`: by its clock, None until it is reached."""

    def __init__(self, gpu: FakeGpu, enable_timing: bool = False, blocking: bool = False) -> None:
        self.time: float | None = None
        self.recorded = False
        self._gpu = gpu

    def record(self, stream: Stream) -> None:
        assert not self.recorded
        self.recorded = True
        stream.launch(("record", self))

    def query(self) -> bool:
        return self.time is not None

    def synchronize(self) -> None:
        with self._gpu.changed:
            self._gpu.changed.wait_for(self.query)

    def elapsed_time(self, later: Event) -> float:
        assert self.time is not None
        assert later.time is not None
        return 1e3 * (later.time - self.time)


class FakeGpu(CudaCopier):
    """The program's own `CudaCopier` over streams of a fake GPU: a thread runs the next operation of any of them in
    random order, as far as events leave it free, and copies in two halves.

    blocking: `wait_before_use` waits, for computations that do not go through `use`. `failure`: raised by what is asked
    of it. `copy_s`: what a copy takes of the GPU's clock. `violations` says what went wrong.
    """

    def __init__(self, seed: int = 0, blocking: bool = False) -> None:
        self.violations: list[str] = []
        self.asked: list[Copy] = []
        self.failure: Exception | None = None
        self.copy_s = 1e-3
        self.changed = threading.Condition()
        self._clock = 0.0
        self._blocking = blocking
        self._random = random.Random(seed)
        self._held = self._held_speculative = self._ended = False
        self._computing = Stream(self)
        self._streams = [self._computing]
        super().__init__("cpu", SimpleNamespace(
            Stream=self._new_stream, Event=functools.partial(Event, self),
            current_stream=lambda device: self._computing,
        ))  # fmt: skip
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _launch(self, work: Callable[[], object], stream: Stream) -> None:
        """Takes a plain copy, or whatever else a stream does when its turn comes."""
        if self.failure is not None:
            raise self.failure
        if not isinstance(work, functools.partial):
            stream.launch(work)
            return
        (host,), device = work.args, work.func.__self__
        assert work.keywords == {"non_blocking": True}
        copy = Copy(host, device, stream.urgent, host.clone())
        self.asked.append(copy)
        stream.launch(copy)

    def wait_before_use(self, ticket: Ticket) -> Ticket | None:
        stall = super().wait_before_use(ticket)
        if self._blocking:
            self.wait(ticket)
        return stall

    def use(self, slot: torch.Tensor, key: ExpertKey) -> None:
        """Launches a computation with the expert that `slot` should hold when its turn comes."""

        def compute() -> None:
            if not torch.equal(slot[:BYTES], content(key)):
                self.violations.append(f"the slot of {key} held something else when it was computed with")

        self._computing.launch(compute)

    @property
    def urgent(self) -> Stream:
        """The stream of urgent copies."""
        return next(each for each in self._streams if each.urgent)

    def hold(self, speculative_alone: bool = False) -> None:
        """No copy and no computation makes progress until `release`, or no speculative copy does."""
        with self.changed:
            self._held, self._held_speculative = not speculative_alone, True

    def release(self) -> None:
        with self.changed:
            self._held = self._held_speculative = False
            self.changed.notify_all()

    def finish(self) -> None:
        """Waits until everything launched has run."""
        with self.changed:
            self.changed.wait_for(lambda: all(each.reached == len(each.operations) for each in self._streams))
            self._ended = True
            self.changed.notify_all()
        self._thread.join()

    def _new_stream(self, device: torch.device, priority: int = 0) -> Stream:
        self._streams.append(Stream(self, priority))
        return self._streams[-1]

    def _run(self) -> None:
        while not self._ended:
            with self.changed:
                possible = [] if self._held else [stream for stream in self._streams if self._goes_on(stream)]
                if not possible:
                    self.changed.wait()
                    continue
                self._advance(self._random.choice(possible))
                self.changed.notify_all()
            time.sleep(self._random.random() * 2e-4)

    def _goes_on(self, stream: Stream) -> bool:
        if stream.reached == len(stream.operations):
            return False
        match stream.operations[stream.reached]:
            case ("wait", event):
                return event.query() or not event.recorded  # as CUDA has it
            case Copy():
                return stream.urgent or not self._held_speculative
        return True

    def _advance(self, stream: Stream) -> None:
        operation = stream.operations[stream.reached]
        match operation:
            case Copy():
                self._half(operation)
                if not operation.done:
                    return
            case ("record", event):
                event.time = self._clock
            case ("wait", _):
                pass
            case compute:
                try:
                    compute()
                except Exception as error:
                    self.violations.append(repr(error))
        stream.reached += 1

    def _half(self, copy: Copy) -> None:
        if not torch.equal(copy.host, copy.held):
            self.violations.append("a host slot was overwritten before it was copied")
        part = slice(BYTES // 2) if copy.steps == 0 else slice(BYTES // 2, None)
        copy.device[part] = copy.host[part]
        copy.steps += 1
        self._clock += self.copy_s / 2


def put_on(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tiers_of` for a GPU gives the tiers of this one."""
    monkeypatch.setattr(service, "CudaCopier", lambda device: gpu)
    monkeypatch.setattr(service, "DeviceSlots", lambda count, nbytes, device: DeviceSlots(count, nbytes, "cpu"))
