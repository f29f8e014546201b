"""Kernels of the neuron unit against dense SwiGLU of the decoded weights in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from measures import relative_error
from neuron_sources import CODES, by_the_page, dense, packed
from tiermoe import native
from tiermoe.formats.neurons import Records
from tiermoe.kernels.neurons import NeuronKernel

# relative error allowed: a few roundings of the dtype
ALLOWED = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
SHAPES = [(128, 48), (64, 96), (256, 512)]


def masked(x: torch.Tensor, a: torch.Tensor, theta: float, weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """W2 (a * W3 x) with a = 0 where |a| <= theta."""
    _, up, down = weights
    a = a.float()
    return (torch.where(a.abs() > theta, a, 0) * (x.float() @ up.t())) @ down.t()


def inputs(tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "quantizer"), CODES)
@pytest.mark.parametrize(
    ("shape", "theta"),
    [*((shape, 0.0) for shape in SHAPES), *((SHAPES[-1], theta) for theta in (0.05, 0.25, 0.6, 1e9))],
)
def test_inactive_neurons_count_as_zero(
    shape: tuple[int, int], theta: float, bits: int, quantizer: str, dtype: torch.dtype
) -> None:
    """With theta 0 it is dense SwiGLU."""
    form, views = packed(*shape, bits, dtype, quantizer)
    kernel, weights = NeuronKernel(form, F.silu, theta), dense(form, views)
    for tokens in (1, 3, 12):
        x = inputs(tokens, shape[0], dtype)
        a, exact = kernel.activations(x, views), F.silu(x.float() @ weights[0].t())
        assert relative_error(exact, a) < ALLOWED[dtype]
        want = masked(x, a if theta else exact, theta, weights)
        assert relative_error(want, kernel(x, views)) < ALLOWED[dtype]
        for token, activations, one in zip(x[:, None], a[:, None], want[:, None], strict=True):
            used = kernel.active(activations)[0].nonzero()[:, 0]
            assert used.tolist() == [j for j, value in enumerate(activations[0].tolist()) if abs(value) > theta]
            found = kernel.combine(token, activations, used, views)
            assert found.dtype == dtype
            assert relative_error(one, found) < ALLOWED[dtype]


def test_neurons_that_are_not_used_are_never_read() -> None:
    form, views = packed(256, 512, 4, torch.bfloat16)
    kernel = NeuronKernel(form, F.silu, 0.25)
    x = inputs(1, 256, torch.bfloat16)
    a = kernel.activations(x, views)
    used = kernel.active(a)[0].nonzero()[:, 0]
    before = kernel.combine(x, a, used, views)
    absent = torch.ones(512, dtype=torch.bool)
    absent[used] = False
    views["neurons"]["records"][absent] = 0xFF  # undefined scales
    assert torch.equal(kernel.combine(x, a, used, views), before)


def test_blocks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    form, views = packed(128, 48, 4, torch.float32)
    x = inputs(2, 128, torch.float32)
    whole = NeuronKernel(form, F.silu, 0.01)
    monkeypatch.setattr("tiermoe.kernels.neurons.BLOCK_WEIGHTS", 128 * 7)
    blocks = NeuronKernel(form, F.silu, 0.01)
    assert relative_error(whole(x, views), blocks(x, views)) < 1e-6
    a = whole.activations(x[:1], views)
    used = whole.active(a)[0].nonzero()[:, 0]
    assert relative_error(whole.combine(x[:1], a, used, views), blocks.combine(x[:1], a, used, views)) < 1e-6


def test_an_undefined_activation_is_not_hidden() -> None:
    form, views = packed(128, 48, 4, torch.float32)
    kernel = NeuronKernel(form, F.silu, 0.25)
    assert kernel.active(torch.tensor([[float("nan"), 0.25, 0.26, -0.3]])).tolist() == [[True, False, True, True]]
    x = inputs(1, 128, torch.float32)
    x[0, 0] = torch.nan
    assert bool(kernel(x, views).isnan().all())


@pytest.mark.parametrize("bits", [4, 2])
def test_linear_codes_serve_too(bits: int) -> None:
    form, views = packed(128, 48, bits, torch.float32, "linear")
    kernel = NeuronKernel(form, F.gelu, 0.0)
    x = inputs(2, 128, torch.float32)
    gate, up, down = dense(form, views)
    assert relative_error((F.gelu(x @ gate.t()) * (x @ up.t())) @ down.t(), kernel(x, views)) < 1e-5


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
@pytest.mark.parametrize(("bits", "quantizer"), CODES)
@pytest.mark.parametrize(("hidden", "neurons"), [*SHAPES, (1088, 40), (2048, 32)])
def test_native_kernels_sum_the_used_neurons(
    hidden: int, neurons: int, bits: int, quantizer: str, instruction_set: str
) -> None:
    """To the rounding of the result alone: weights and sums are float32. Tasks of 256 bytes end within a strip."""
    form, views = packed(hidden, neurons, bits, torch.bfloat16, quantizer)
    kernel = NeuronKernel(form, F.silu, 0.25)
    x = inputs(1, hidden, torch.bfloat16)
    a = kernel.activations(x, views)
    records = form.encodings["neurons"]
    assert isinstance(records, Records)
    assert records.two_level is ((bits, quantizer) != (4, "hqq"))
    weights = by_the_page(views["neurons"]["records"], bits, records.group, hidden, records.two_level)
    up, down = weights[:, 0], weights[:, 1].t()
    for used in (list(range(neurons)), list(range(0, neurons, 3)), [neurons - 1], []):
        rows = torch.tensor(used, dtype=torch.int64)
        found = kernel.combine(x, a, rows, views)
        gates = a[0, rows].double()
        expected = (gates * (x[0].double() @ up[rows].t())) @ down[:, rows].t()
        assert found.shape == x.shape
        assert (found[0].double() - expected).abs().max() <= 2**-8 * max(float(expected.abs().max()), 1e-30)


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_native_kernels_give_the_same_on_any_number_of_threads(instruction_set: str) -> None:
    form, views = packed(2048, 96, 4, torch.bfloat16)
    kernel = NeuronKernel(form, F.silu, 0.25)
    x = inputs(1, 2048, torch.bfloat16)
    a = kernel.activations(x, views)
    used = torch.arange(0, 96, 2)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(kernel.combine(x, a, used, views))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
