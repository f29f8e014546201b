"""Loading parts of experts, and computing with what is there: the result never depends on the cache. Sets of neurons
against plain loops."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny
from measures import relative_error
from neuron_sources import EXPERTS, HIDDEN, NEURONS, GatedExperts, gated_store
from tiermoe.engine.moe import MoELayer
from tiermoe.engine.units import LayerKernels, NeuronCounts, NeuronExpert, neuron_views
from tiermoe.errors import LoadError, ModelError
from tiermoe.formats.neurons import record_place
from tiermoe.formats.pack import pack_experts
from tiermoe.formats.store import Store, open_store
from tiermoe.kernels.neurons import NeuronKernel
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.hf.experts import gate_of, is_shell
from tiermoe.offload.neurons import NeuronFiller, PartReader, to_bits, to_indices
from tiermoe.offload.policies.neurons import NeuronCache, runs, to_load, whole
from tiermoe.offload.reader import ExtentReader, HeldReader
from tiermoe.offload.slots import HostSlots
from tiermoe.types import ExpertKey, Extent, Ready

KEYS = {4: "4-hqq-neuron", 2: "2-hqq-neuron"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    source = GatedExperts()
    made = gated_store(tmp_path_factory.mktemp("neurons") / "store", source)
    for bits in KEYS:
        pack_experts(made, source, bits, "hqq", unit="neuron")
    return made


class Unit:
    """The neuron unit over a store, with slots of its own."""

    def __init__(
        self,
        store: Store,
        theta: float = 0.25,
        limit: float = 1.0,
        gap: int = 0,
        reader: Callable[[Store], PartReader] = lambda _: ExtentReader(),
        slots: int = 4,
        proceed: bool = False,
    ) -> None:
        self.store = store
        self.kernels = {
            (bits, layer): NeuronKernel(store.expert_format(key, layer), F.silu, theta)
            for bits, key in KEYS.items()
            for layer in range(2)
        }
        self.reader = reader(store)
        self.counts = NeuronCounts()
        self.filler = NeuronFiller(self.reader, self.extent, self.form, self.active, limit, gap)
        self.slots = HostSlots(slots, max(self.form(ExpertKey(0, 0, bits)).slot.nbytes for bits in KEYS))
        self.experts = {
            place: NeuronExpert(kernel, self.filler, proceed, self.counts) for place, kernel in self.kernels.items()
        }

    def extent(self, key: ExpertKey) -> Extent:
        return self.store.precisions[KEYS[key.bits]].layers[key.layer].extents[key.expert]

    def form(self, key: ExpertKey):
        return self.store.expert_format(KEYS[key.bits], key.layer)

    def active(self, key: ExpertKey, hidden: torch.Tensor, views) -> torch.Tensor:
        kernel = self.kernels[key.bits, key.layer]
        return kernel.active(kernel.activations(hidden, views))[0]

    def load(self, key: ExpertKey, slot: int) -> torch.Tensor:
        self.filler.fill(key, self.slots.buffer(slot))
        return self.slots.buffer(slot)

    def run(self, key: ExpertKey, slot: int, x: torch.Tensor) -> torch.Tensor:
        return self.experts[key.bits, key.layer](x, neuron_views(self.form(key), self.slots.buffer(slot)))

    def present(self, key: ExpertKey) -> int:
        every = whole(NEURONS)
        return every & ~self.filler.neurons.missing(key, every)


def hidden(seed: int, tokens: int = 1) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16) / 8


def held(store: Store) -> HeldReader:
    experts = [
        (ExpertKey(layer, expert, bits), extent)
        for bits, key in KEYS.items()
        for layer, packed in enumerate(store.precisions[key].layers)
        for expert, extent in enumerate(packed.extents)
    ]
    return HeldReader(ExtentReader(), experts)


READERS = {"direct": lambda _: ExtentReader(), "buffered": lambda _: ExtentReader(direct=False), "held": held}


def records(unit: Unit, key: ExpertKey, slot: torch.Tensor) -> torch.Tensor:
    return unit.form(key).slot.views(slot)["neurons"]["records"]


@pytest.mark.parametrize("reader", list(READERS))
@pytest.mark.parametrize(("theta", "bits"), [(0.25, 4), (2.0, 2)])
def test_a_load_brings_the_gate_and_the_active_neurons(theta: float, reader: str, bits: int, store: Store) -> None:
    unit, key, x = Unit(store, theta, reader=READERS[reader]), ExpertKey(1, 2, bits), hidden(3)
    unit.filler.expect(0, hidden(1, tokens=5))
    full = unit.load(key, 1)
    assert unit.present(key) == whole(NEURONS)
    active = to_bits(unit.active(key, x, unit.form(key).slot.views(full)))
    assert 0 < active.bit_count() < NEURONS
    unit.filler.expect(1, x)
    unit.slots.buffer(0).fill_(0xAA)
    before = unit.reader.bytes_read
    part = unit.load(key, 0)
    present, place = to_indices(unit.present(key)), record_place(unit.form(key))
    assert active & ~unit.present(key) == 0
    assert torch.equal(records(unit, key, part)[present], records(unit, key, full)[present])
    for name, field in unit.form(key).slot.views(full)["gate"].items():
        assert torch.equal(unit.form(key).slot.views(part)["gate"][name], field)
    if reader == "held":
        assert unit.present(key) == active
        assert unit.reader.bytes_read - before == place.stored_at + active.bit_count() * place.record_bytes
    else:
        pages = {
            page
            for neuron in to_indices(active).tolist()
            for page in range(
                (place.stored_at + neuron * place.record_bytes) // 4096,
                (place.stored_at + (neuron + 1) * place.record_bytes - 1) // 4096 + 1,
            )
        }
        assert unit.reader.bytes_read - before == place.stored_at + 4096 * len(pages)


def test_gaps_are_read_through_and_count_as_there(store: Store) -> None:
    key, x = ExpertKey(0, 1, 4), hidden(3)
    read = []
    for gap in (0, 1 << 20):
        unit = Unit(store, theta=0.6, gap=gap, reader=held)
        unit.filler.expect(0, x)
        unit.load(key, 0)
        read.append(to_indices(unit.present(key)).tolist())
    few, through = read
    assert len(few) < len(through)
    assert through == list(range(few[0], few[-1] + 1))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, EXPERTS - 1), st.integers(0, 5)), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.25, 0.5]),
    st.sampled_from([0.3, 1.0]),
    st.sampled_from([0, 700]),
    st.sampled_from([4, 2]),
)
def test_results_do_not_depend_on_the_cache(
    store: Store, steps: list[tuple[int, int, int]], theta: float, limit: float, gap: int, bits: int
) -> None:
    """Any order of loads, predicted or not, hits and evictions, in two slots, against one token on a whole expert."""
    unit, alone = Unit(store, theta, limit, gap, slots=2), Unit(store, theta)
    choose = random.Random(len(steps))
    slots: dict[int, ExpertKey] = {}
    for layer, expert, seed in steps:
        key, x = ExpertKey(layer, expert, bits), hidden(seed)
        if key not in slots.values():
            # loaded for this very token, predicted from another layer's, or by a prompt
            unit.filler.expect(*choose.choice([(layer, x), (1 - layer, hidden(seed + 1)), (layer, hidden(seed, 3))]))
            slot = choose.randrange(2)
            slots[slot] = key
            unit.load(key, slot)
        slot = next(slot for slot, holder in slots.items() if holder == key)
        alone.filler.expect(layer, hidden(0, 2))
        alone.load(key, 0)
        assert torch.equal(unit.run(key, slot, x), alone.run(key, 0, x))
        if choose.random() < 0.2:
            assert torch.equal(unit.run(key, slot, hidden(9, 3)), alone.run(key, 0, hidden(9, 3)))


def test_a_hit_is_topped_up_to_the_union(store: Store) -> None:
    unit, key = Unit(store, reader=held), ExpertKey(0, 1, 4)
    unit.slots.buffer(0).fill_(0xFF)  # what is not read is undefined
    unit.filler.expect(0, hidden(3))
    slot = unit.load(key, 0)
    first = unit.present(key)
    unit.run(key, 0, hidden(3))
    assert (unit.present(key), unit.filler.wait_s) == (first, 0.0)
    second = to_bits(unit.active(key, hidden(4), unit.form(key).slot.views(slot)))
    assert second & ~first
    unit.run(key, 0, hidden(4))
    assert unit.present(key) == first | second
    assert unit.filler.wait_s > 0
    counts = unit.counts
    assert (counts.neurons, counts.active) == (2 * NEURONS, first.bit_count() + second.bit_count())
    assert counts.there == first.bit_count() + (second & first).bit_count()
    many = unit.run(key, 0, hidden(5, 3))  # several tokens take every neuron
    assert unit.present(key) == whole(NEURONS)
    assert bool(many.isfinite().all())


def test_proceeding_leaves_out_what_was_not_predicted_for_that_token_alone(store: Store) -> None:
    unit, alone = Unit(store, reader=held, proceed=True), Unit(store)
    key, x = ExpertKey(1, 0, 4), hidden(4)
    unit.slots.buffer(0).fill_(0xFF)  # what is not read is undefined
    unit.filler.expect(0, hidden(3))  # layer 0 runs: layer 1's expert is predicted
    slot = unit.load(key, 0)
    predicted = unit.present(key)
    found = unit.run(key, 0, x)
    alone.filler.expect(1, hidden(0, 2))
    alone.load(key, 0)
    kernel, views = alone.kernels[4, 1], alone.form(key).slot.views(alone.slots.buffer(0))
    activations = kernel.activations(x, views)
    active = to_bits(kernel.active(activations)[0])
    assert active & ~predicted
    assert torch.equal(found, kernel.combine(x, activations, to_indices(active & predicted), views))
    assert unit.counts.left_out == (active & ~predicted).bit_count()
    assert unit.present(key) == predicted
    # the next token finds it in the cache: what is not there is brought
    assert torch.equal(unit.run(key, 0, x), alone.run(key, 0, x))
    assert unit.present(key) == predicted | active
    # and what was loaded for the running layer's own token is never left out
    unit.filler.expect(1, hidden(3))
    unit.filler.fill(key, slot)
    assert torch.equal(unit.run(key, 0, x), alone.run(key, 0, x))


class _Pass:
    """Loads every expert when it is asked for."""

    phase, needs_weights, proceed, observer, unsure, adaptive = "decode", False, False, None, None, None
    forecasts = SimpleNamespace(at=lambda hidden, layer: None)

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def run_layer(self, routed, _: torch.Tensor) -> Iterator[list[Ready]]:
        for expert in sorted({expert for row in routed.experts for expert in row}, reverse=True):
            self.unit.load(ExpertKey(routed.layer, expert, 4), 2)
            yield [Ready(expert, 2, 4)]


def layer_on(unit: Unit) -> MoELayer:
    def views_of(key: ExpertKey, slot: int):
        return neuron_views(unit.form(key), unit.slots.buffer(slot))

    source = LayerKernels({4: unit.experts[4, 1]}, views_of, expect=unit.filler.expect)
    return MoELayer(1, EXPERTS, source, _Pass(unit))


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_layer_runs_on_the_neuron_unit(tokens: int, store: Store) -> None:
    x = hidden(tokens, tokens)
    index = torch.tensor([[token % 3, (token + 1) % 3] for token in range(tokens)])
    weights = torch.full((tokens, 2), 0.5, dtype=torch.bfloat16)
    expected = torch.zeros(tokens, HIDDEN)
    for expert in range(EXPERTS):
        tensors = GatedExperts().read(1, expert)
        gate, up = tensors["gate_up_proj"].float().chunk(2)
        dense = (F.silu(x.float() @ gate.t()) * (x.float() @ up.t())) @ tensors["down_proj"].float().t()
        expected += 0.5 * dense * (index == expert).any(1, keepdim=True)
    found = layer_on(Unit(store, theta=0.0))(x, index, weights)
    assert relative_error(expected, found) < 0.25  # of 4 bits on random weights


def test_a_layer_loads_what_its_own_token_needs(store: Store) -> None:
    unit = Unit(store, theta=1.0, reader=held)
    layer, index, weights = layer_on(unit), torch.tensor([[0, 2]]), torch.ones(1, 2, dtype=torch.bfloat16)
    layer(hidden(3), index, weights)
    assert 0 < unit.counts.active == unit.counts.there < 2 * NEURONS
    assert unit.present(ExpertKey(1, 0, 4)).bit_count() + unit.present(ExpertKey(1, 2, 4)).bit_count() == (
        unit.counts.active
    )
    assert unit.filler.wait_s == 0


def damage(store: Store, key: ExpertKey, at: int, root: Path) -> Store:
    """A copy of the store with one byte of `key` changed."""
    copy = open_store(Path(shutil.copytree(store.root, root)))
    (segment,) = copy.precisions[KEYS[key.bits]].layers[key.layer].extents[key.expert].segments
    with open(segment.file, "r+b") as handle:
        handle.seek(segment.offset + at)
        byte = handle.read(1)[0]
        handle.seek(segment.offset + at)
        handle.write(bytes([byte ^ 1]))
    return copy


@pytest.mark.parametrize("direct", [True, False])
def test_damage_is_found_where_it_is_read(direct: bool, store: Store, tmp_path: Path) -> None:
    key, x = ExpertKey(1, 2, 4), hidden(3)
    sound = Unit(store, theta=2.0)
    sound.filler.expect(1, hidden(3, 2))
    place, form = record_place(sound.form(key)), sound.form(key)
    active = to_indices(to_bits(sound.active(key, x, form.slot.views(sound.load(key, 0)))))
    bad = int(active[2])
    for at, what in ((place.stored_at + bad * place.record_bytes + 5, f"neuron {bad}"), (7, "W1")):
        broken = damage(store, key, at, tmp_path / what)
        unit = Unit(broken, theta=2.0, reader=lambda _: ExtentReader(direct))
        unit.filler.expect(1, x)
        with pytest.raises(LoadError, match=rf"{what} of layer 1, expert 2 \(4 bits\) is damaged: .*layer001.*--force"):
            unit.load(key, 0)
        unit.filler.expect(1, hidden(3, 2))
        with pytest.raises(LoadError, match=r"layer 1, expert 2 \(4 bits\) is damaged"):
            unit.load(key, 0)
        unit.filler.expect(1, x)
        unit.load(ExpertKey(1, 1, 4), 0)  # the filler goes on
        through = Unit(broken, gap=1 << 20, reader=lambda _: ExtentReader(direct))
        through.filler.expect(1, x)
        with pytest.raises(LoadError, match=r"layer 1, expert 2 \(4 bits\) is damaged"):
            through.load(key, 0)


def test_a_file_that_ends_early(store: Store, tmp_path: Path) -> None:
    key = ExpertKey(1, 2, 4)
    copy = open_store(Path(shutil.copytree(store.root, tmp_path / "short")))
    unit = Unit(copy, theta=0.0)
    (segment,) = unit.extent(key).segments
    with open(segment.file, "r+b") as handle:
        handle.truncate(segment.offset + record_place(unit.form(key)).stored_at)
    unit.filler.expect(1, hidden(3))
    with pytest.raises(LoadError, match=r"reading layer 1, expert 2 \(4 bits\) failed .*layer001"):
        unit.load(key, 0)


def test_other_gates_are_refused(tmp_path: Path) -> None:
    for family, taken in (("qwen3_moe", True), ("gpt_oss", False)):
        blueprint = inspect_model(tiny.write(tmp_path / family, family, torch.bfloat16), family)
        shell = next(module for module in blueprint.skeleton.modules() if is_shell(module))
        if taken:
            assert torch.equal(gate_of(shell).require_elementwise()(torch.ones(2)), F.silu(torch.ones(2)))
        else:
            with pytest.raises(ModelError, match=r"cannot take .*use the unit 'expert'"):
                gate_of(shell).require_elementwise()


def test_sets_of_neurons() -> None:
    for count in (1, 7, 8, 9, 100):
        mask = torch.rand(count, generator=torch.Generator().manual_seed(count)) < 0.5
        bits = to_bits(mask)
        assert bits == sum(1 << j for j, there in enumerate(mask.tolist()) if there)
        assert torch.equal(to_indices(bits), mask.nonzero()[:, 0])
    assert to_indices(0).tolist() == []


def bits_of(neurons: set[int]) -> int:
    return sum(1 << neuron for neuron in neurons)


def test_all_neurons_are_loaded_above_the_upper_limit() -> None:
    six, seven = whole(6), whole(7)
    assert to_load(six, 8, 0.75) == six  # 6 of 8 are 75 %: not above
    assert to_load(seven, 8, 0.75) == whole(8)
    assert to_load(bits_of({3}), 8, 0.0) == whole(8)
    assert to_load(0, 8, 0.0) == 0
    assert to_load(whole(8), 8, 1.0) == whole(8)


@given(st.sets(st.integers(0, 80)), st.integers(0, 10))
def test_runs_cover_the_set_and_no_gap_longer_than_allowed(neurons: set[int], gap: int) -> None:
    found = runs(bits_of(neurons), gap)
    covered = [neuron for first, count in found for neuron in range(first, first + count)]
    assert covered == sorted(set(covered))
    assert neurons <= set(covered)
    assert {neuron for first, count in found for neuron in (first, first + count - 1)} <= neurons
    between = [second - first - count for (first, count), (second, _) in pairwise(found)]
    assert all(absent > gap for absent in between)
    for neuron in set(covered) - neurons:  # what is read through lies in a gap of `gap` at most
        below = max(other for other in neurons if other < neuron)
        above = min(other for other in neurons if other > neuron)
        assert above - below - 1 <= gap


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 255)), max_size=12))
def test_the_cache_against_sets(asked: list[tuple[bool, int]]) -> None:
    """Neurons that are asked for are brought; now and then the expert has left and comes again with what was loaded."""
    cache, key = NeuronCache(), ExpertKey(1, 2, 4)
    cache.put(key, 0)
    cache.put(ExpertKey(1, 3, 4), whole(8))
    there: set[int] = set()
    for again, active in asked:
        wanted = {neuron for neuron in range(8) if active >> neuron & 1}
        if again:
            cache.put(key, active)
            there = wanted
        missing = cache.missing(key, active)
        assert missing == bits_of(wanted - there)
        cache.add(key, to_load(missing, 8, 0.5))
        there |= set(range(8)) if len(wanted - there) > 4 else wanted
        assert cache.missing(key, whole(8)) == bits_of(set(range(8)) - there)
        assert cache.missing(ExpertKey(1, 3, 4), whole(8)) == 0
