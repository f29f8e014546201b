"""The neuron unit's Triton kernels against decoded weights; test_triton.py runs this file in processes of its own, as
it does triton_cases.py."""

import pytest
import torch
import torch.nn.functional as F

from neuron_sources import CODES, dense, packed
from tiermoe.formats.neurons import record_place
from tiermoe.kernels.neurons import GpuNeuronKernel
from tiermoe.kernels.triton_neurons import scatter
from triton_device import DEVICE, DTYPES, TOLERANCE, tokens

CASES = [
    *((torch.bfloat16, shape, *codes) for codes in CODES for shape in ((64, 24), (320, 40))),
    *((dtype, (128, 16), *codes) for codes in CODES for dtype in DTYPES if dtype != torch.bfloat16),
]
"""Hidden sizes in groups of 32 and 64, below and beyond what a program takes at a time; neurons that end within it."""


def on_device(form, experts: int, bits: int, dtype: torch.dtype, quantizer: str):
    """Experts in slots of one buffer."""
    hidden, neurons = form.layer.parts[1].shape[1] // 2, form.layer.parts[0].shape[0]
    slots = torch.zeros(experts, form.slot.nbytes, dtype=torch.uint8)
    for slot, seed in zip(slots, range(experts), strict=True):
        _, views = packed(hidden, neurons, bits, dtype, quantizer, seed)
        for part, fields in form.slot.views(slot).items():
            for name, field in fields.items():
                field.copy_(views[part][name])
    return slots.to(DEVICE)


@pytest.mark.parametrize(("dtype", "shape", "bits", "quantizer"), CASES, ids=str)
def test_active_neurons_agree_with_decoded_weights(dtype, shape, bits, quantizer):
    """Of the others nothing is read."""
    form, _ = packed(*shape, bits, dtype, quantizer)
    slots = on_device(form, 2, bits, dtype, quantizer)
    kernel, x = GpuNeuronKernel(form, F.silu, 0.2), tokens(1, shape[0], dtype)
    tiles = kernel.tiles_of(list(slots))
    activations = kernel.activations_of(x, tiles)
    active = kernel.active(activations)
    gates = activations.masked_fill(~active, 0)
    weights = [[each.double().to(DEVICE) for each in dense(form, form.slot.views(slot.cpu()))] for slot in slots]
    assert 0 < int(active.sum()) < active.numel()
    for slot, used in zip(slots, active, strict=True):
        form.slot.views(slot)["neurons"]["records"][~used] = 0xFF  # undefined scales
    found = kernel.sums(x, gates, tiles)
    assert found.dtype == dtype
    x = x[0].double()
    for row, own, gate, (first, up, down) in zip(found, activations, gates.double(), weights, strict=True):
        slack = (first.abs() @ x.abs()) * 2 * TOLERANCE[dtype] + 2 * TOLERANCE[dtype]
        assert bool(((own.double() - F.silu(first @ x)).abs() <= slack).all())
        error = (row.double() - down @ (gate * (up @ x))).abs()
        assert float((error / (down.abs() @ (gate.abs() * (up.abs() @ x.abs())))).max()) <= TOLERANCE[dtype]


def test_an_expert_has_the_same_bits_in_any_company():
    form, _ = packed(128, 40, 4, torch.bfloat16)
    slots = on_device(form, 3, 4, torch.bfloat16, "hqq")
    kernel, x = GpuNeuronKernel(form, F.silu, 0.2), tokens(1, 128, torch.bfloat16)
    tiles = kernel.tiles_of(list(slots))
    together = kernel.activations_of(x, tiles)
    sums = kernel.sums(x, together, tiles)
    for at, slot in enumerate(slots):
        alone, one = kernel.activations(x, form.slot.views(slot)), kernel.tiles_of([slot])
        assert torch.equal(kernel.activations_of(x, one), together[at : at + 1])
        assert torch.equal(alone, together[at : at + 1])
        assert torch.equal(kernel.sums(x, alone, one), sums[at : at + 1])


@pytest.mark.parametrize("tokens_at_once", [3, 9])
def test_tokens_that_go_through_an_expert_together(tokens_at_once):
    form, _ = packed(128, 40, 4, torch.float32)
    slots = on_device(form, 1, 4, torch.float32, "hqq")
    views = form.slot.views(slots[0])
    kernel, x = GpuNeuronKernel(form, F.silu, 0.0), tokens(tokens_at_once, 128, torch.float32)
    first, up, down = (each.to(DEVICE) for each in dense(form, form.slot.views(slots[0].cpu())))
    torch.testing.assert_close(kernel(x, views), (F.silu(x @ first.T) * (x @ up.T)) @ down.T, rtol=1e-4, atol=1e-5)


def test_records_come_to_their_places():
    """Those of two precisions at once."""
    forms, records = zip(*(_form_and_records(bits) for bits in (4, 2)), strict=True)
    slots = torch.full((2, max(form.slot.nbytes for form in forms)), 0xAA, dtype=torch.uint8)
    expected, slots = slots.clone(), slots.to(DEVICE)
    rows = [(1, 39), (0, 3), (1, 0), (0, 4), (1, 7)]
    table, staged = torch.empty(len(rows), 3, dtype=torch.int64), torch.zeros(1 << 16, dtype=torch.uint8)
    end = 128
    for entry, (slot, row) in zip(table, rows, strict=True):
        place = record_place(forms[slot])
        at = slots[slot].data_ptr() + place.slot_at + row * place.record_bytes
        entry[:] = torch.tensor([at, end, place.record_bytes])
        staged[end : end + place.record_bytes] = records[slot][row]
        end += place.record_bytes
        forms[slot].slot.views(expected[slot])["neurons"]["records"][row] = records[slot][row]
    staged[:120].view(torch.int64).copy_(table.view(-1))
    scatter(staged.to(DEVICE), len(rows))
    assert torch.equal(slots.cpu(), expected)


def _form_and_records(bits: int):
    form, views = packed(640, 40, bits, torch.bfloat16)
    return form, views["neurons"]["records"]
