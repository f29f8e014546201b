"""Quantizers and encodings: formulas, bounds, and what is stored against loops that follow the docstrings."""

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from measures import relative_error
from tiermoe import native
from tiermoe.errors import ConfigError, StoreError
from tiermoe.formats import encode_matrix, int4, quantizers
from tiermoe.formats.encode_matrix import in_order
from tiermoe.formats.int4 import CPU_LAYOUT
from tiermoe.formats.quantizers import QUANTIZERS, nearest, nearest_codes
from tiermoe.formats.registry import encoding_for, encoding_named

pytestmark = pytest.mark.usefixtures("one_thread")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LINEAR, HQQ = QUANTIZERS["linear"], QUANTIZERS["hqq"]
EVEN = ("linear", "hqq")  # quantizers whose 4 bits are Int4's
RELATIVE_ERROR = {16: 0.002, 8: 0.01, 4: 0.16, 2: 0.45}  # of normal weights, at most


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


def encoded_and_decoded(weight, encoding, quantizer, dtype, decoded_dtype=torch.float32):
    stored = encoding.encode(weight, quantizer, dtype)
    return stored, encoding.decode(stored, *weight.shape, decoded_dtype)


# --- quantizers


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
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("group", [16, 32, 64])
# one block and several; groups that torch sums by 32 and a rest; errors that are shrunk in no, some and all blocks
@pytest.mark.parametrize(("rows", "columns"), [(45, 2880), (200, 768), (7, 64), (33, 8192)])
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


def test_hqq_result_does_not_depend_on_the_other_rows():
    weight = random_weight(600, 512)
    whole, part = quantized(HQQ, weight, 4, 64), quantized(HQQ, weight[512:], 4, 64)
    assert relative_error(whole.dequantized()[512:], part.dequantized()) < 1e-3


# --- encodings

CASES = [(bits, quantizer, dtype) for bits in (16, 8, 4, 2) for quantizer in QUANTIZERS for dtype in FLOATS]


@settings(max_examples=40, deadline=None)
@given(weights, st.sampled_from([8, 4]))
def test_linear_encodings_are_within_half_a_step(weight, bits):
    weight = weight.repeat(16, 1)
    encoding = encoding_for(bits, *weight.shape, torch.float32, CPU_LAYOUT, "linear")
    _, decoded = encoded_and_decoded(weight, encoding, LINEAR, torch.float32)
    step = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert bool(((decoded - weight).abs() <= step * (0.5 + 1e-3)).all())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("quantizer", EVEN)
@pytest.mark.parametrize("rows", [16, 32, 48, 64, 80, 272, 336])
@pytest.mark.skipif(not int4.is_torchs(), reason="torch's operator takes another order here")
def test_int4_decodes_what_the_operator_computes(rows, quantizer, dtype):
    columns = 192
    weight = random_weight(rows, columns, mean=0.01)
    encoding = encoding_for(4, rows, columns, dtype, CPU_LAYOUT, quantizer)
    stored, decoded = encoded_and_decoded(weight, encoding, QUANTIZERS[quantizer], dtype, dtype)
    columns_one_by_one = torch.ops.aten._weight_int4pack_mm_for_cpu(
        torch.eye(columns, dtype=dtype), stored["codes"], encoding.group, stored["scales_and_zeros"]
    )
    torch.testing.assert_close(decoded, columns_one_by_one.t(), rtol=2e-7 if dtype == torch.float32 else 0, atol=1e-9)


@pytest.mark.parametrize("bits", [4, 2])
def test_int4_and_int2_decode_in_blocks_of_columns(bits, monkeypatch):
    weight = random_weight(80, 320)
    encoding = encoding_for(bits, 80, 320, torch.bfloat16, CPU_LAYOUT)
    stored, whole = encoded_and_decoded(weight, encoding, HQQ, torch.bfloat16)
    monkeypatch.setattr(int4, "BLOCK_WEIGHTS", 2 * 64 * 80)  # two groups, and a block of one group at the end
    assert torch.equal(encoding.decode(stored, 80, 320, torch.float32), whole)


@settings(max_examples=25, deadline=None)
@given(weights, st.sampled_from(FLOATS), st.sampled_from([4, 2]))
def test_codes_are_the_nearest_under_the_stored_parameters(weight, dtype, bits):
    weight = weight.to(dtype).repeat(16, 1)
    rows, columns = weight.shape
    encoding = encoding_for(bits, rows, columns, dtype, CPU_LAYOUT)
    stored, decoded = encoded_and_decoded(weight, encoding, HQQ, dtype)
    scale, zero = (part.t().float().repeat_interleave(64, 1) for part in stored["scales_and_zeros"].unbind(-1))
    distances = [((q - 2 ** (bits - 1)) * scale + zero - weight.float()).abs() for q in range(2**bits)]
    nearest = torch.stack(distances).amin(0)
    assert bool(((decoded - weight.float()).abs() <= nearest * (1 + 1e-3) + 1e-5 * scale + 1e-9).all())


# --- 2 bits


def nibbles(packed, columns):
    """(N, columns) from bytes in the order of the CPU's operator."""
    return int4.unpack_transposed(packed, 0, columns).t().clone()


def random_bytes(shape, generator):
    return torch.randint(0, 256, shape, generator=generator).to(torch.uint8)


def random_stored(encoding, rows, columns, seed):
    """Any bytes are codes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        field.name: random_bytes(field.shape, generator)
        if field.dtype == torch.uint8
        else torch.randn(field.shape, generator=generator).to(field.dtype)
        for field in encoding.stored_fields(rows, columns, torch.bfloat16)
    }


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([16, 64, 80, 144]), st.sampled_from([(32, 96), (64, 128), (128, 128)]), st.integers(0, 10**6))
def test_int2_decodes_every_code_exactly(rows, shape, seed):
    group, columns = shape
    encoding = encoding_named(f"u2/{CPU_LAYOUT}/g{group}")
    stored = random_stored(encoding, rows, columns, seed)
    two = nibbles(stored["codes"], columns // 2).tolist()  # columns in a nibble
    codes = [[two[n][column // 2] >> 2 * (column % 2) & 3 for column in range(columns)] for n in range(rows)]
    scale, zero = (part.t().double().repeat_interleave(group, 1) for part in stored["scales_and_zeros"].unbind(-1))
    meant = ((torch.tensor(codes).double() - 2) * scale + zero).to(torch.bfloat16)
    assert torch.equal(encoding.decode(stored, rows, columns, torch.bfloat16), meant)


@settings(max_examples=25, deadline=None)
@given(weights)
def test_int2_of_the_linear_rule_is_the_linear_rule(weight):
    weight = weight.repeat(16, 1)
    encoding = encoding_for(2, *weight.shape, torch.float32, CPU_LAYOUT, "linear")
    _, decoded = encoded_and_decoded(weight, encoding, LINEAR, torch.float32)
    expected = quantized(LINEAR, weight, 2, encoding.group).dequantized()
    torch.testing.assert_close(decoded, expected, rtol=1e-6, atol=0)


def test_int2_of_a_symmetric_row_is_exact():
    weight = torch.tensor([-0.5, 0.0, 0.5, 0.5]).repeat(16, 16)
    encoding = encoding_named(f"u2/{CPU_LAYOUT}/g64")
    _, decoded = encoded_and_decoded(weight, encoding, LINEAR, torch.bfloat16)
    assert torch.equal(decoded, weight)


def test_what_cannot_be_encoded_is_refused():
    with pytest.raises(ConfigError, match="no 5-bit encoding"):
        encoding_for(5, 64, 64, torch.bfloat16, CPU_LAYOUT)
    with pytest.raises(ConfigError, match="float64"):
        encoding_for(4, 64, 64, torch.float64, CPU_LAYOUT)
    for bits in (6, 4, 2):
        with pytest.raises(ConfigError, match=f"int{bits} for 'cpu-other'"):
            encoding_for(bits, 64, 64, torch.bfloat16, "cpu-other")
    for bits in (4, 2):
        with pytest.raises(ConfigError, match="unknown quantizer 'awq'"):
            encoding_for(bits, 64, 64, torch.bfloat16, CPU_LAYOUT, "awq")


def test_names_of_other_machines_and_versions_are_refused():
    other = "cpu-avx2"
    for kind in ("int6", "int4", "u2"):
        with pytest.raises(StoreError, match=f"{kind} layout '{other}', CPUs take '{CPU_LAYOUT}'"):
            encoding_named(f"{kind}/{other}/g64")
    for layout in (CPU_LAYOUT, "rowmajor"):  # 2 bits as they were until November 2026
        with pytest.raises(StoreError, match="older version"):
            encoding_named(f"int2/{layout}/g64")
    for name in ("int3", "int4/cpu-avx2/g48", "int4", "u2/g16", "int8/cpu-avx2/g64"):
        with pytest.raises(StoreError, match="unknown encoding"):
            encoding_named(name)


def test_relative_error():
    weight = torch.tensor([[3.0, 4.0]])
    assert relative_error(weight, weight) == 0
    assert relative_error(weight, torch.tensor([[3.0, 3.0]])) == pytest.approx(0.2)
    assert relative_error(torch.zeros(2, 2), torch.zeros(2, 2)) == 0
    assert relative_error(torch.zeros(2, 2), torch.ones(2, 2)) == math.inf


# --- the order of int4 codes


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.sampled_from([32, 64, 96]), st.integers(0, 10**6))
def test_int4_unpacks_what_was_packed(rows16, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (16 * rows16, columns), generator=generator).to(torch.uint8)
    packed = int4.pack(codes)
    if int4.is_torchs():
        theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        assert torch.equal(packed.flatten(), theirs.flatten())
    unpacked = [int4.unpack_transposed(packed, *span).clone() for span in ((0, 32), (32, columns))]
    assert torch.equal(torch.cat(unpacked).t(), codes)


ANY_MACHINE = """
import hashlib
import torch
from tiermoe.formats import int4
from tiermoe.formats.registry import encoding_named
from tiermoe.formats.quantizers import QUANTIZERS
stored_bytes = hashlib.sha256()
for rows in (16, 48, 64, 112, 272):
    codes = torch.arange(rows * 64).mul(7919).div(13, rounding_mode="floor").remainder(16).view(rows, 64)
    packed = int4.pack(codes)
    stored_bytes.update(packed.numpy().tobytes())
    assert torch.equal(int4.unpack_transposed(packed, 0, 64).t(), codes), rows
    weights = []
    for layout in (int4.CPU_LAYOUT, "rowmajor"):
        encoding = encoding_named(f"u2/{layout}/g32")
        stored = encoding.encode(codes * 0.01, QUANTIZERS["hqq"], torch.bfloat16)
        weights.append(encoding.decode(stored, rows, 64, torch.bfloat16))
    assert torch.equal(*weights), rows
print(int4.CPU_LAYOUT, stored_bytes.hexdigest())
"""


def test_codes_lie_in_one_order_on_every_machine():
    found = set()
    capabilities = ("default", "avx2", "avx512")
    # one that a machine lacks ends torch with an illegal instruction
    best = capabilities.index(here) if (here := torch.backends.cpu.get_cpu_capability().lower()) in capabilities else 0
    for capability in capabilities[: best + 1]:
        environment = os.environ | {"ATEN_CPU_CAPABILITY": capability, "TIERMOE_NATIVE": "0"}
        environment.pop("TIERMOE_ISA", None)
        command = [sys.executable, "-c", ANY_MACHINE]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1


def test_workers_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two matrices, by several workers and by one; and torch has as many threads afterwards as before."""
    monkeypatch.setattr(encode_matrix, "BLOCK_WEIGHTS", 64 * 2048)
    weights = [torch.randn(rows, 2048, generator=torch.Generator().manual_seed(rows)).bfloat16() for rows in (64, 192)]
    encoding, threads = encoding_for(4, 64, 2048, torch.bfloat16, CPU_LAYOUT, "hqq"), torch.get_num_threads()
    found = []
    for workers in (1, 3):
        written: dict[tuple[int, str, int], torch.Tensor] = {}

        def write(field, first, value, rows, into=written):
            into[rows, field.name, first] = value.clone()

        matrices = [
            encode_matrix.Matrix(
                encoding, HQQ, tuple(weight.shape), torch.bfloat16,
                lambda first, last, weight=weight: weight[first:last], partial(write, rows=len(weight)),
            )
            for weight in weights
        ]  # fmt: skip
        found.append((written, list(encode_matrix.encode(matrices, workers=workers))))
    (alone, squares), (together, others) = found
    assert len(alone) == 2 + 3 * 2
    assert alone.keys() == together.keys()
    assert all(torch.equal(value, together[place]) for place, value in alone.items())
    assert squares == others
    assert torch.get_num_threads() == threads


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
