"""Quantizers: formulas and bounds against loops that follow the papers."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from measures import relative_error
from tiermoe import native
from tiermoe.formats import quantizers
from tiermoe.formats.encoding import in_order
from tiermoe.formats.quantizers import QUANTIZERS, nearest, nearest_codes

pytestmark = pytest.mark.usefixtures("one_thread")

LINEAR, HQQ = QUANTIZERS["linear"], QUANTIZERS["hqq"]


def random_weight(rows, columns, seed=0, size=0.02, mean=0.0, outliers=False):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    if outliers:
        weight = weight**5 / 5
    return weight * size + mean


weights = st.builds(
    random_weight,
    rows=st.integers(1, 5),
    columns=st.sampled_from([64, 128, 192]),
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1e-4, 0.02, 1.0, 30.0]),
    mean=st.sampled_from([0.0, 0.01, -3.0]),
    outliers=st.booleans(),
)


@dataclass(frozen=True)
class Quantized:
    """Codes uint8 (N, K), scale and offset float32 (N, G)."""

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor

    def dequantized(self):
        rows, groups = self.scale.shape
        codes = self.codes.view(rows, groups, -1).float()
        return torch.addcmul(self.offset[..., None], codes, self.scale[..., None]).view(rows, -1)


def quantized(quantizer, weight, bits, group):
    """The codes that are nearest under a quantizer's scales and offsets."""
    scale, offset = quantizer.parameters(weight, bits, group)
    return Quantized(nearest_codes(weight, scale, offset, 0, 2**bits - 1, torch.uint8), scale, offset)


def test_linear_worked_example():
    weight = torch.tensor([[-1.4, 0.7, 0.1, 0.0], [0.21, -0.07, 0.02, 0.1]])
    found = quantized(LINEAR, weight, 4, 2)
    assert found.codes.tolist() == [[1, 12, 8, 8], [15, 6, 9, 11]]
    torch.testing.assert_close(found.scale, torch.tensor([[0.2, 0.2], [0.03, 0.03]]))
    torch.testing.assert_close(found.offset, torch.tensor([[-1.6, -1.6], [-0.24, -0.24]]))


@pytest.mark.parametrize(("bits", "largest"), [(2, 1), (4, 7), (8, 127)])
def test_linear_scale_is_the_largest_magnitude_over_the_largest_code(bits, largest):
    found = quantized(LINEAR, torch.tensor([[0.5, -2.0]]), bits, 1)
    torch.testing.assert_close(found.scale, torch.full((1, 2), 2.0 / largest))
    assert found.codes.tolist()[0][1] == 1  # -largest + 2**(bits - 1): code 0 is never used


@settings(max_examples=40, deadline=None)
@given(weights, st.sampled_from([2, 4, 8]))
def test_linear_rounds_to_the_nearest(weight, bits):
    found = quantized(LINEAR, weight, bits, 32)
    assert 1 <= int(found.codes.min()) <= int(found.codes.max()) <= 2**bits - 1
    error = (found.dequantized() - weight).abs()
    assert bool((error <= found.scale[:, :1] * (0.5 + 1e-4)).all())


def test_a_scale_of_zero_gives_the_integer_nearest_to_zero():
    weight, zero = torch.tensor([0.0, 0.5, -0.5]), torch.zeros(3)
    assert nearest(weight, zero, zero, -8, 7).tolist() == [0, 0, 0]
    assert nearest(weight, zero, zero, 1, 7).tolist() == [1, 1, 1]


def published_hqq(weights, bits):
    """The published loop for one group, in Python floats: the sum of absolute errors at its best."""
    largest = 2**bits - 1
    scale = (max(weights) - min(weights)) / largest
    zero, beta, best_error = -min(weights) / scale, 10.0, math.inf
    for _ in range(20):
        codes = [min(max(round(w / scale + zero), 0), largest) for w in weights]
        errors = [w - (q - zero) * scale for w, q in zip(weights, codes, strict=True)]
        size = sum(map(abs, errors))
        if size >= best_error:
            break
        best_error = size
        shrunk = [math.copysign(max(abs(e) - abs(e) ** (0.7 - 1) / beta, 0), e) if e else 0.0 for e in errors]
        zero = sum(q - (w - s) / scale for q, w, s in zip(codes, weights, shrunk, strict=True)) / len(weights)
        beta *= 1.01
    return best_error


@pytest.mark.parametrize("size", [0.02, 3.0, 100.0])  # errors below and above the first shrinkage threshold
@pytest.mark.parametrize("bits", [2, 4])
def test_hqq_follows_the_published_iteration(size, bits):
    weight = random_weight(50, 16, seed=bits, size=size)
    close = 0
    for row in weight.split(1):
        error = float((quantized(HQQ, row, bits, 16).dequantized() - row).abs().sum())
        close += error == pytest.approx(published_hqq(row[0].tolist(), bits), rel=1e-3)
    # between a group's two middle errors their sum is flat: rounding then decides which step is the last
    assert close >= 46


@pytest.mark.skipif(not native.quantizes(), reason="this build has no kernels")
@pytest.mark.parametrize(("bits", "group"), [(2, 16), (4, 64), (4, 32)])
# one block and several; groups that torch sums by 32 and a rest; errors that are shrunk in no, some and all blocks
@pytest.mark.parametrize(("rows", "columns"), [(45, 2880), (7, 64), (33, 8192)])
@pytest.mark.parametrize("size", [0.02, 0.3, 3.0])
def test_the_native_hqq_gives_the_bits_of_torch_s(bits, group, rows, columns, size, monkeypatch):
    weight = random_weight(rows, columns, seed=rows + group, size=size).bfloat16()
    weight[1, : columns // 2] = 0.25  # groups of equal weights
    weight[2, :8] = torch.tensor([0.0, -0.0]).repeat(4)
    found = quantized(HQQ, weight, bits, group)
    monkeypatch.setattr(native, "quantizes", lambda: False)
    for mine, torchs in zip(vars(found).values(), vars(quantized(HQQ, weight, bits, group)).values(), strict=True):
        assert torch.equal(mine, torchs)


def test_hqq_of_whole_blocks_is_that_of_the_matrix():
    weight = random_weight(300, 2880)
    step = 2 * HQQ.row_multiple(2880)
    parts = [quantized(HQQ, part, 4, 64) for part in weight.split(step)]
    whole = quantized(HQQ, weight, 4, 64)
    for name, value in vars(whole).items():
        assert torch.equal(value, torch.cat([getattr(part, name) for part in parts]))


def mean_error_by_group(found, weight, group):
    return (found.dequantized() - weight).abs().unflatten(1, (-1, group)).mean(-1)


@settings(max_examples=40, deadline=None)
@given(weights, st.sampled_from([(2, 16), (4, 64), (4, 32)]))
def test_hqq_is_never_worse_than_plain_rounding_in_any_group(weight, precision):
    bits, group = precision
    found = quantized(HQQ, weight, bits, group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantizers, "STEPS", 1)  # the first candidate alone: plain rounding between minimum and maximum
        plain = quantized(HQQ, weight, bits, group)
    assert int(found.codes.max()) < 2**bits
    assert bool(
        (
            (plain.dequantized() - weight).abs().unflatten(1, (-1, group))
            <= plain.scale[..., None] * (0.5 + 1e-3) + 1e-6 * weight.abs().max()
        ).all()
    )
    better = mean_error_by_group(found, weight, group)
    assert bool((better <= mean_error_by_group(plain, weight, group) * (1 + 1e-4) + 1e-6).all())


def test_hqq_lowers_the_error_of_gaussian_weights():
    weight = random_weight(256, 512)
    found = {bits: quantized(HQQ, weight, bits, group) for bits, group in ((2, 16), (4, 64))}
    errors = {bits: relative_error(weight, each.dequantized()) for bits, each in found.items()}
    assert errors[4] < 0.088  # plain rounding: 0.0896
    assert errors[2] < 0.310  # plain rounding: 0.327


def test_a_worker_that_fails_ends_the_others() -> None:
    def work(number: int) -> int:
        if number == 3:
            raise ValueError("third")
        return number

    threads, found = torch.get_num_threads(), []
    with pytest.raises(ValueError, match="third"):
        found.extend(in_order(work, 100, 2))
    assert torch.get_num_threads() == threads
    assert list(in_order(lambda number: number, 5, 2)) == list(range(5))
