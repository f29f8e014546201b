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

from fake_cuda import FakeCuda, on_device, scatter, values_of
from fake_gpu import FakeGpu, Stream
from neuron_sources import packed
from patience import until, within
from tiermoe.batch import Batch, decode
from tiermoe.engine.units import GpuNeuronExperts, NeuronCounts, neuron_views
from tiermoe.errors import LoadError
from tiermoe.formats.neurons import record_place
from tiermoe.kernels.neurons import GpuNeuronKernel, NeuronKernel
from tiermoe.offload.disk import SlotFiller
from tiermoe.offload.neuron_link import NeuronLink, Part, neuron_staging_bytes
from tiermoe.offload.neurons import LoadedNeurons, Token, to_bits, to_indices
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
            SlotFiller(self.disk, lambda key: None, lambda key: FORM), {4: HostSlots(host, FORM.slot.nbytes)},
            self.slots, lambda key: FORM.slot.nbytes, self.gpu, lanes,
            active_of=lambda key, x, views: self.kernel.active(self.kernel.activations(x, views))[0], scatter=scatter,
            upper_limit=LIMIT, staged=neuron_staging_bytes([FORM], LIMIT), at_once=2,
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
        missing = [(expert, self.link.neurons.missing(key(expert), self.active(expert, token))) for expert in experts]
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


def pin_nothing(patch: pytest.MonkeyPatch) -> None:
    for name in ("pin_memory", "unpin_memory"):
        patch.setattr(f"tiermoe.offload.slots.{name}", lambda tensor: None)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    pin_nothing(monkeypatch)
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
    with pytest.MonkeyPatch.context() as patch:
        pin_nothing(patch)
        one = Rig(seed=seed, host=host, lanes=lanes)
        walk(one, seed)
        within(one.end)
    assert one.gpu.violations == []


@pytest.mark.parametrize("forgets", ["copies", "computing"])
def test_a_missing_wait_is_found(forgets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that begin before the hidden state is there, or computing before the copies are."""
    pin_nothing(monkeypatch)
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


def test_an_expert_that_goes_on_takes_what_is_there_and_the_host_does_not_wait(fake_cuda: FakeCuda) -> None:
    loads, kernel = Loads(), NeuronKernel(FORM, F.silu, 0.25)
    slots = [on_device(image) for image in IMAGES[:2]]
    hidden = [torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4)]
    views = [FORM.slot.views(each) for each in IMAGES[:2]]
    first, second = ([to_bits(kernel.active(kernel.activations(x, each))[0]) for each in views] for x in hidden)
    token = Token(1, hidden[0])  # another layer's
    for expert, slot in enumerate(slots):
        loads._begin(key(expert), slot)
        loads._end(key(expert), first[expert], NEURONS, token)
    experts = GpuNeuronExperts({4: GpuNeuronKernel(FORM, F.silu, 0.25)}, loads, True, NeuronCounts())
    x, used = hidden[1], [one & other for one, other in zip(first, second, strict=True)]

    def check(taken: list[int], waits: int) -> None:
        fake_cuda.clear()
        found = values_of(experts.forward_one(on_device(x), [neuron_views(FORM, each) for each in slots]))
        for row, own, neurons in zip(found, views, taken, strict=True):
            one = kernel.combine(x, kernel.activations(x, own), to_indices(neurons), own)
            torch.testing.assert_close(row[None], one, rtol=1e-4, atol=1e-5)
        assert sum(fake_cuda.waits.values()) == waits

    check(used, waits=0)
    counts = experts._counts.read()
    sizes = sum(map(int.bit_count, second)), sum(map(int.bit_count, used))
    assert (counts.neurons, counts.active, counts.there) == (2 * NEURONS, *sizes)
    assert counts.left_out == sizes[0] - sizes[1] > 0
    assert not loads.came
    check(second, waits=1)  # the next token finds them cached
    assert {part.key.expert: part.neurons for part in loads.came} == {
        expert: second[expert] & ~first[expert] for expert in (0, 1)
    }


class Loads(LoadedNeurons):
    """Neurons that are all there, whatever was loaded; `came`: what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.came: list[Part] = []

    def to_load(self, key: ExpertKey, missing: int) -> int:
        return missing

    def top_up(self, missing: list[Part]) -> None:
        self.came += missing
        for part in missing:
            self.neurons.add(part.key, part.neurons)


def test_staging_buffers_are_planned_and_given_back(
    gpu_model: Path,
    tmp_path: Path,
    on_fake_gpu: Callable[..., tuple[Any, FakeGpu]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"bits": 4, "preset": "lru", "set": {"unit": "neuron", "theta": 0.2}, "store": tmp_path, "cache": "60%"}
    loaded, _ = on_fake_gpu(gpu_model, 6, **options)
    link, plan = loaded.tiermoe.link, loaded.tiermoe.plan
    planned = {need.part: need.nbytes for need in plan.needs if need.what == "neurons on their way"}
    assert planned == dict.fromkeys(("staging", "activations"), link._pinned.slot_bytes)
    unpinned: list[int] = []
    monkeypatch.setattr("tiermoe.offload.slots.unpin_memory", lambda tensor: unpinned.append(tensor.numel()))
    loaded.tiermoe.close()
    assert sorted(unpinned) == sorted([6 * plan.slot_bytes, planned["staging"]])


def test_a_model_goes_on_after_a_failure_and_an_interruption(
    gpu_model: Path,
    tmp_path: Path,
    on_fake_gpu: Callable[..., tuple[Any, FakeGpu]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"unit": "neuron", "theta": 0.2, "upper_limit": 1.0}
    loaded, gpu = on_fake_gpu(gpu_model, 6, bits=4, preset="lru", set=settings, store=tmp_path, cache="60%")
    engine = loaded.tiermoe

    def answer() -> list[int]:
        cache, found = engine.new_cache(), [5]
        slab = cache.open()
        for at in range(8):
            found.append(int(engine.step(Batch((decode(slab, at, found[-1]),)), cache)[-1].cpu().argmax()))
        return found

    expected = within(answer)
    gpu.failure = LoadError("the fake GPU refuses")
    with pytest.raises(LoadError, match="refuses"):
        within(answer)
    gpu.failure = None
    assert within(answer) == expected
    top_up = NeuronLink._before_use

    def interrupted(link: NeuronLink, ticket: Any) -> None:
        monkeypatch.setattr(NeuronLink, "_before_use", top_up)
        raise KeyboardInterrupt

    monkeypatch.setattr(NeuronLink, "_before_use", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer()
    assert within(answer) == expected
