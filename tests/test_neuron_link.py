"""W1 and active neurons on their way to a GPU, against a fake GPU and the whole experts; then in a model, against the
CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tiermoe
from fake_cuda import scatter
from fake_gpu import FakeGpu, Stream
from neuron_sources import packed
from patience import until, within
from tiermoe.errors import LoadError
from tiermoe.formats.neurons import record_place
from tiermoe.kernels.neurons import NeuronKernel
from tiermoe.offload.disk import SlotFiller
from tiermoe.offload.neuron_link import NeuronLink, Part, staging_bytes
from tiermoe.offload.neurons import Token, to_bits, to_indices
from tiermoe.offload.policies.neurons import to_load, whole
from tiermoe.offload.slots import DeviceSlots, HostSlots
from tiermoe.types import ExpertKey, Load

HIDDEN, NEURONS, EXPERTS, LIMIT = 128, 160, 5, 0.75
FORM, _ = packed(HIDDEN, NEURONS, 4, torch.float32)
PLACE = record_place(FORM)


def image(expert: int) -> torch.Tensor:
    """The bytes of an expert."""
    slot = torch.zeros(FORM.slot.nbytes, dtype=torch.uint8)
    _, views = packed(HIDDEN, NEURONS, 4, torch.float32, seed=expert)
    for part, fields in FORM.slot.views(slot).items():
        for name, field in fields.items():
            field.copy_(views[part][name])
    return slot


IMAGES = [image(expert) for expert in range(EXPERTS)]


class Images:
    """Reads experts without a drive. `failing`: those that cannot be read."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self.failing: set[int] = set()

    def read(self, extent: Any, target: memoryview, key: ExpertKey) -> None:
        if key.expert in self.failing:
            raise LoadError(f"{key} cannot be read")
        target[: FORM.slot.nbytes] = IMAGES[key.expert].numpy().data

    def close(self) -> None:
        """Nothing is open."""


class Rig:
    """A link between whole experts and a fake GPU, whose slots begin with what is no expert."""

    def __init__(self, seed: int = 0, theta: float = 0.25, slots: int = EXPERTS, host: int = 3, lanes: int = 2) -> None:
        self.gpu, self.disk, self.kernel = FakeGpu(seed), Images(), NeuronKernel(FORM, F.silu, theta)
        self.slots = DeviceSlots(slots, FORM.slot.nbytes, "cpu")
        self.slots._tensor.fill_(0xFF)
        self.link = NeuronLink(
            SlotFiller(self.disk, lambda key: None, lambda key: FORM), {4: HostSlots(host, FORM.slot.nbytes)}, self.slots, lambda key: FORM.slot.nbytes, self.gpu, lanes,
            active_of=lambda key, x, views: self.kernel.active(self.kernel.activations(x, views))[0], scatter=scatter,
            upper_limit=LIMIT, staged=staging_bytes([FORM], LIMIT), at_once=2,
        )  # fmt: skip

    def run(self, seed: int, layer: int = 0) -> Token:
        """A layer runs on a hidden state that a computation before it gives."""
        hidden, values = torch.zeros(1, HIDDEN), torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(seed))
        self.gpu._computing.launch(lambda: hidden.copy_(values))
        self.link.token = Token(layer, hidden)
        return Token(layer, values)

    def active(self, expert: int, token: Token) -> int:
        return to_bits(self.kernel.active(self.kernel.activations(token.hidden, FORM.slot.views(IMAGES[expert])))[0])

    def load(self, expert: int, slot: int, urgent: bool = True) -> None:
        self.link.submit(Load(key(expert), slot, urgent))
        finished = within(self.link.wait)
        if finished.error is not None:
            raise finished.error

    def use(self, expert: int, slot: int) -> None:
        """Launches a computation that reads W1 and all neurons that are there."""
        buffer, there = self.slots.buffer(slot), to_indices(self.link.neurons.present(key(expert)))

        def compute() -> None:
            found, wanted = (FORM.slot.views(each)["neurons"]["records"][there] for each in (buffer, IMAGES[expert]))
            gate = slice(PLACE.slot_at)
            if not (torch.equal(found, wanted) and torch.equal(buffer[gate], IMAGES[expert][gate])):
                self.gpu.violations.append(f"expert {expert} was not there when it was computed with")

        self.gpu._computing.launch(compute)

    def top_up(self, *experts: int, token: Token) -> None:
        missing = [
            (expert, self.link.neurons.missing(key(expert), self.active(expert, token))) for expert in experts
        ]
        parts = [
            Part(key(expert), self.slots.buffer(expert), self.link.to_load(key(expert), each))
            for expert, each in missing
            if each
        ]
        if parts:
            within(lambda: self.link.top_up(parts))

    def end(self) -> None:
        self.gpu.finish()
        self.link.close()
        self.link.host.unpin_copied()
        assert not self.link.host._caches[4]._pins


def key(expert: int) -> ExpertKey:
    return ExpertKey(0, expert, 4)


@pytest.fixture(autouse=True)
def nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pin_memory", "unpin_memory"):
        monkeypatch.setattr(f"tiermoe.offload.slots.{name}", lambda tensor: None)


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(**options))
        return made[-1]

    yield make
    for one in made:
        within(one.end)
        assert one.gpu.violations == []


@pytest.mark.parametrize("theta", [0.0, 0.25, 0.6, 1e9])
def test_a_load_for_a_token_brings_w1_and_its_active_neurons(theta: float, rig: Callable[..., Rig]) -> None:
    one = rig(theta=theta)
    token = one.run(3)
    active = one.active(2, token)
    wanted = to_load(active, NEURONS, LIMIT)
    one.load(2, 1)
    one.use(2, 1)
    one.gpu.finish()
    assert one.link.neurons.present(key(2)) == wanted
    absent = to_indices(whole(NEURONS) & ~wanted)
    assert bool((FORM.slot.views(one.slots.buffer(1))["neurons"]["records"][absent] == 0xFF).all())
    gathered = 0 if wanted == whole(NEURONS) else -(-24 * wanted.bit_count() // 16) * 16
    records = FORM.slot.nbytes - PLACE.slot_at if wanted == whole(NEURONS) else wanted.bit_count() * PLACE.record_bytes
    assert one.link.counters().bytes_copied == PLACE.slot_at + (gathered + records if wanted else 0)
    assert (one.link.asked, one.link.spared) == (NEURONS, NEURONS - wanted.bit_count())
    assert one.link.holder(one.slots.buffer(1)) == key(2)
    chosen = one.link.chosen_by(key(2))
    assert chosen is one.link.token
    assert one.link.chosen_by(key(2)) is None


def test_a_load_for_several_tokens_brings_the_whole_expert(rig: Callable[..., Rig]) -> None:
    one = rig()
    one.link.expect(0, torch.zeros(3, HIDDEN))
    one.load(2, 1)
    assert one.link.neurons.present(key(2)) == whole(NEURONS)
    one.use(2, 1)


def test_missing_neurons_of_cached_experts_come_together(rig: Callable[..., Rig]) -> None:
    one = rig(host=1)  # which the second expert takes from the first
    first = one.run(3)
    for expert in (0, 1):
        one.load(expert, expert)
    second, before = one.run(4), len(one.gpu.asked)
    assert all(one.active(expert, second) & ~one.active(expert, first) for expert in (0, 1))
    one.top_up(0, 1, token=second)
    for expert in (0, 1):
        assert one.link.neurons.present(key(expert)) == one.active(expert, first) | one.active(expert, second)
        one.use(expert, expert)
    assert len(one.gpu.asked) == before  # no plain copy
    within(lambda: one.link.top_up([Part(key(0), one.slots.buffer(0), whole(NEURONS))]))
    assert one.link.neurons.present(key(0)) == whole(NEURONS)
    one.use(0, 0)


def walk(one: Rig, seed: int) -> None:
    """Random tokens, loads, predictions and top-ups, each computed with."""
    chooser, there = random.Random(seed), set[int]()
    for step in range(12):
        token = one.run(chooser.randrange(50), layer=step % 2)
        chosen = chooser.sample(range(EXPERTS), 2)
        for expert in chosen:
            if expert not in there or chooser.random() < 0.2:
                one.load(expert, expert, urgent=chooser.random() < 0.7)
                there.add(expert)
        one.top_up(*chosen, token=token)
        for expert in chosen:
            assert not one.link.neurons.missing(key(expert), one.active(expert, token))
            one.use(expert, expert)


@settings(max_examples=20, deadline=None, phases=[Phase.generate])  # a hang takes long to shrink
@given(st.integers(0, 2**20), st.integers(1, 6), st.integers(1, 3))
def test_every_computation_sees_its_neurons(seed: int, host: int, lanes: int) -> None:
    one = Rig(seed=seed, host=host, lanes=lanes)
    walk(one, seed)
    within(one.end)
    assert one.gpu.violations == []


@pytest.mark.parametrize("forgets", ["copies", "computing"])
def test_a_missing_wait_is_found(forgets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that begin before the hidden state is there, or computing before the copies are."""
    wait_event = Stream.wait_event

    def forget(stream: Stream, event: Any) -> None:
        if (stream is stream._gpu._computing) == (forgets == "copies"):
            wait_event(stream, event)

    def goes_wrong(seed: int) -> bool:
        one = Rig(seed=seed)
        one.gpu.hold()
        token = one.run(seed)
        one.link.submit(Load(key(0), 0, True))
        until(lambda: one.gpu.urgent.operations)
        one.gpu.release()
        within(one.link.wait)
        one.use(0, 0)
        within(one.end)
        return bool(one.gpu.violations) or bool(one.link.neurons.missing(key(0), one.active(0, token)))

    assert not any(goes_wrong(seed) for seed in range(10))
    monkeypatch.setattr(Stream, "wait_event", forget)
    assert any(goes_wrong(seed) for seed in range(50))


def test_what_cannot_be_read_or_copied_comes_back_and_the_link_goes_on(rig: Callable[..., Rig]) -> None:
    one = rig(host=1)
    one.run(3)
    one.disk.failing = {1}
    with pytest.raises(LoadError, match="expert 1"):
        one.load(1, 1)
    one.load(0, 0)
    one.disk.failing = {0}
    one.load(1, 1)
    with pytest.raises(LoadError, match="expert 0"):
        one.top_up(0, token=one.run(4))  # main memory has no room for both
    one.disk.failing.clear()
    one.gpu.failure = RuntimeError("the fake GPU refuses")
    for attempt in (lambda: one.load(2, 2), lambda: one.top_up(0, token=one.run(4))):
        with pytest.raises(RuntimeError, match="refuses"):
            attempt()
    one.gpu.failure = None
    one.load(2, 2)
    one.top_up(0, token=one.run(4))
    for expert in (0, 1, 2):
        one.use(expert, expert)


def test_an_interrupted_load_is_rolled_back(rig: Callable[..., Rig]) -> None:
    one = rig(host=2)
    one.run(3)
    one.gpu.hold()
    for expert in range(3):
        one.link.submit(Load(key(expert), expert, True))
    until(lambda: one.gpu.urgent.operations)
    one.gpu.release()
    within(one.link.roll_back)
    assert one.link.poll() is None
    one.load(2, 2)
    one.use(2, 2)
