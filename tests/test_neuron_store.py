"""The neuron unit's packed format: every neuron alone, whole by its checksum, and refused where a model has no gate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import tiny
from measures import relative_error
from neuron_sources import EXPERTS, HIDDEN, NEURONS, GatedExperts, by_the_page, gated_store
from sources import contents, stored
from tiermoe.errors import ConfigError, ModelError, PackError
from tiermoe.formats.neurons import (
    Records,
    Records2,
    Records4,
    TwoLevelRecords4,
    checksum,
    neuron_format,
    neuron_layer,
    records_for,
)
from tiermoe.formats.pack import NeuronSource, forget, pack_experts
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.store import check_files, open_store, precision_key
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.types import MoeLayer, Part

ENCODINGS = [Records4(64), Records4(32), TwoLevelRecords4(64), TwoLevelRecords4(32), Records2(16)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("bits", "quantizer", "worst"), [(4, "hqq", 0.12), (4, "hqq-double", 0.12), (2, "hqq", 0.45)])
def test_every_neuron_decodes_near_its_weights(
    bits: int, quantizer: str, worst: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    source = GatedExperts(dtype)
    store = gated_store(tmp_path / "store", source, str(dtype).removeprefix("torch."))
    precision = pack_experts(store, source, bits, quantizer, unit="neuron")
    key = precision_key(bits, quantizer, "neuron")
    assert key == f"{bits}-{quantizer}-neuron"
    store = open_store(store.root)
    check_files(store, key)
    for layer in range(2):
        for expert in range(EXPERTS):
            tensors = source.read(layer, expert)
            form, content = store.expert_format(key, layer), stored(store, key, layer, expert)
            views = form.stored.views(content)
            gate, up = tensors["gate_up_proj"].chunk(2)
            records = views["neurons"]["records"]
            assert form.encodings["gate"].holds(views["gate"])
            encoding = form.encodings["neurons"]
            assert isinstance(encoding, Records)
            assert relative_error(up, encoding.decode_half(records, 0, HIDDEN, dtype)) < worst
            assert relative_error(tensors["down_proj"].t(), encoding.decode_half(records, 1, HIDDEN, dtype)) < worst
            slot = views["gate"]
            if form.widened:
                buffer = torch.empty(form.slot.nbytes, dtype=torch.uint8)
                form.widen(content, buffer)
                slot = form.slot.views(buffer)["gate"]
                assert torch.equal(form.slot.views(buffer)["neurons"]["records"], records)
            assert relative_error(gate, form.encodings["gate"].decode(slot, NEURONS, HIDDEN, dtype)) < worst
            assert precision.layers[layer].errors[expert] < worst


# codes 2 x 1024, of a half 32 scales and 32 zeros, of 2 bytes each or of 1 with a unit of 2; checksum 8, zeros to a
# multiple of 16
@pytest.mark.parametrize(("quantizer", "record_bytes"), [("hqq", 2320), ("hqq-double", 2192)])
def test_the_parts_lie_at_pages_and_the_records_side_by_side(quantizer: str, record_bytes: int) -> None:
    form = neuron_format(MoeLayer("l", 8, 2, _parts(2048, 1024)), 4, torch.bfloat16, quantizer)
    offsets = {placed.field.name: placed.offset for placed in form.stored.fields}
    assert offsets["codes"] == 0
    assert offsets["records"] % 4096 == form.stored.nbytes % 4096 == 0
    (records,) = (placed.field for placed in form.stored.fields if placed.field.name == "records")
    assert records.shape == (1024, record_bytes)
    assert Records2(16).record_bytes(2048, torch.bfloat16) * 8 / (2 * 2048) <= 3.05


def _parts(hidden: int, neurons: int) -> tuple[Part, ...]:
    return Part("gate_up_proj", (2 * neurons, hidden)), Part("down_proj", (hidden, neurons))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_record_is_what_the_page_of_the_format_says(encoding: Records) -> None:
    weight = torch.randn(5, 2 * HIDDEN, generator=torch.Generator().manual_seed(3)) + 0.3
    records = encoding.encode(weight, QUANTIZERS["hqq"], torch.bfloat16)["records"]
    expected = by_the_page(records, encoding.bits, encoding.group, HIDDEN, encoding.two_level)
    assert relative_error(weight.view(5, 2, HIDDEN), expected.float()) < {4: 0.12, 2: 0.45}[encoding.bits]
    for half in (0, 1):
        found = encoding.decode_half(records, half, HIDDEN, torch.bfloat16)
        assert torch.equal(found, expected[:, half].float().bfloat16())


def test_a_second_level_costs_next_to_nothing() -> None:
    """Codes are the nearest under the scales as they are stored."""
    weight = torch.randn(32, 2 * HIDDEN, generator=torch.Generator().manual_seed(4))
    lost = [
        relative_error(weight, encoding.decode(fields, 32, 2 * HIDDEN, torch.float32))
        for encoding in (Records4(64), TwoLevelRecords4(64))
        for fields in [encoding.encode(weight, QUANTIZERS["hqq"], torch.float32)]
    ]
    assert lost[1] < 1.005 * lost[0]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_record_is_the_neurons_own(encoding: Records) -> None:
    """Another neuron's weights change no byte of it, its own half changes that half alone."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 2 * HIDDEN, generator=generator)
    records = encoding.encode(weight, QUANTIZERS["hqq"], torch.float32)["records"]
    changed = weight.clone()
    changed[3, HIDDEN:] *= 3  # neuron 3's column of W2
    other = encoding.encode(changed, QUANTIZERS["hqq"], torch.float32)["records"]
    assert [bool((records[j] != other[j]).any()) for j in range(6)] == [j == 3 for j in range(6)]
    for half, differs in ((0, False), (1, True)):
        one, two = (encoding.decode_half(r, half, HIDDEN, torch.float32) for r in (records, other))
        assert bool((one[3] != two[3]).any()) is differs
    # a row decoded alone is the row of the whole, and its checksum knows its place
    alone = encoding.decode_half(records[4:5], 1, HIDDEN, torch.float32)
    assert torch.equal(alone, encoding.decode(({"records": records}), 6, 2 * HIDDEN, torch.float32)[4:5, HIDDEN:])
    end = encoding.check_at(HIDDEN, torch.float32)
    bytes_of = records.numpy()
    assert checksum(bytes_of[4, :end].data, 4) == bytes(bytes_of[4, end : end + 8])
    assert checksum(bytes_of[4, :end].data, 5) != bytes(bytes_of[4, end : end + 8])


@pytest.mark.parametrize("encoding", [Records4(64), TwoLevelRecords4(64), Records2(16)])
def test_weights_on_the_grid_are_kept(encoding: Records) -> None:
    """Codes, strips and parameters come back in their places: weights that are the grid's own decode exactly."""
    generator = torch.Generator().manual_seed(1)
    levels = 1 << encoding.bits
    codes = torch.randint(0, levels, (5, 2, HIDDEN), generator=generator)
    codes[..., :: encoding.group] = 0
    codes[..., 1 :: encoding.group] = levels - 1  # so that every group spans the whole grid
    step = torch.randint(1, 4, (5, 2, HIDDEN // encoding.group), generator=generator)
    step[..., 0] = 255 if encoding.two_level else 3  # makes the unit of the 8-bit parameters 1
    lowest = torch.randint(-9, 9, (5, 2, HIDDEN // encoding.group), generator=generator)
    lowest -= encoding.middle * step if encoding.two_level else 0  # zeros are kept, of the middle code
    grouped = codes.view(5, 2, -1, encoding.group) * step[..., None] + lowest[..., None]
    weight = grouped.view(5, 2 * HIDDEN).float()
    fields = encoding.encode(weight, QUANTIZERS["hqq"], torch.float32)
    assert torch.equal(encoding.decode(fields, 5, 2 * HIDDEN, torch.float32), weight)


def test_the_file_is_safetensors_and_packing_resumes(tmp_path: Path) -> None:
    whole = gated_store(tmp_path / "whole", GatedExperts())
    pack_experts(whole, GatedExperts(), 4, "hqq", unit="neuron")
    with safe_open(whole.root / "experts-4-hqq-neuron-layer001.safetensors", framework="pt") as file:
        assert file.get_tensor("layers.1.experts.2.neurons.records").shape[0] == NEURONS

    class Broken(GatedExperts):
        def read(self, layer: int, expert: int) -> Mapping[str, torch.Tensor]:
            if (layer, expert) == (1, 1):
                raise PackError("the disk is full")
            return super().read(layer, expert)

    store = gated_store(tmp_path / "store", GatedExperts())
    with pytest.raises(PackError):
        pack_experts(store, Broken(), 4, "hqq", unit="neuron")
    rest = GatedExperts()
    pack_experts(open_store(store.root), rest, 4, "hqq", unit="neuron")
    assert rest.reads == [(1, expert) for expert in range(EXPERTS)]
    assert contents(store.root) == contents(whole.root)


def test_units_lie_side_by_side_and_are_forgotten_alone(tmp_path: Path) -> None:
    source = GatedExperts()
    store = gated_store(tmp_path / "store", source)
    pack_experts(store, source, 4, "hqq")
    before = contents(store.root)
    pack_experts(store, source, 4, "hqq", unit="neuron")
    assert set(open_store(store.root).precisions) == {"4-hqq", "4-hqq-neuron"}
    forget(store, "4-hqq-neuron", None)
    assert contents(store.root) == before


@pytest.mark.parametrize(
    ("family", "reason"),
    [("gpt_oss", "its experts have biases"), ("switch_transformers", "its experts have no gate")],
)
def test_families_without_the_layout_are_refused(family: str, reason: str, tmp_path: Path) -> None:
    blueprint = inspect_model(tiny.write(tmp_path, family, torch.bfloat16), family)
    with pytest.raises(ModelError, match=rf"the neuron unit cannot take .*: {reason}.*use the unit 'expert'"):
        NeuronSource(blueprint.experts)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2", "granitemoe"])
def test_gated_families_are_taken(family: str, tmp_path: Path) -> None:
    blueprint = inspect_model(tiny.write(tmp_path, family, torch.bfloat16), family)
    source, layer = NeuronSource(blueprint.experts), len(blueprint.layers) - 1
    tensors = blueprint.experts.read(layer, 5)
    parts = source.read(layer, 5)
    neurons = tensors["down_proj"].shape[1]
    assert torch.equal(parts["gate"], tensors["gate_up_proj"][:neurons])
    assert torch.equal(
        parts["neurons"][7], torch.cat((tensors["gate_up_proj"][neurons + 7], tensors["down_proj"][:, 7]))
    )


def test_other_bits_and_sizes_are_refused() -> None:
    for bits in (16, 8):
        with pytest.raises(ConfigError, match=rf"packed at 4 or 2 bits, not at {bits}"):
            records_for(bits, 128, "hqq")
    with pytest.raises(ConfigError, match="a hidden size of 96 cannot be packed at 4 bits: it is not a multiple of 64"):
        records_for(4, 96, "hqq")
    for quantizer in ("hqq", "hqq-double"):
        assert [records_for(4, width, quantizer).group for width in (64, 128, 192)] == [32, 64, 32]
    transposed = (Part("gate_up_proj", (64, 128), True), Part("down_proj", (64, 64), True))
    with pytest.raises(ModelError, match=r"stored as \(out, in\)"):
        neuron_layer(MoeLayer("l", 4, 2, transposed))
