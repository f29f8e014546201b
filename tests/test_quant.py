"""Quantizers and encodings: formulas, bounds, and what is stored against loops that follow the docstrings."""

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from measures import relative_error
from tiermoe.errors import ConfigError, PackError, StoreError
from tiermoe.quant import hqq, int4, int4_layout
from tiermoe.quant.encodings import cpu_layout, encoding_for, encoding_named
from tiermoe.quant.quantized import nearest
from tiermoe.quant.quantizers import QUANTIZERS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LINEAR, HQQ = QUANTIZERS["linear"], QUANTIZERS["hqq"]


@pytest.fixture(autouse=True)
def one_thread():
    """Matrices here are small, and threads that wait for each other make them slow on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def slot_of(encoding, stored, out, in_, dtype):
    slot = {f.name: torch.zeros(f.shape, dtype=f.dtype) for f in encoding.slot_fields(out, in_, dtype)}
    if encoding.slot_fields(out, in_, dtype) == encoding.stored_fields(out, in_, dtype):
        return stored
    encoding.widen(stored, slot)
    return slot


def encoded_and_decoded(weight, encoding, quantizer, dtype, decoded_dtype=torch.float32):
    stored = encoding.encode(weight, quantizer, dtype)
    slot = slot_of(encoding, stored, *weight.shape, dtype)
    return stored, encoding.decode(slot, *weight.shape, decoded_dtype)


# --- quantizers


def test_linear_worked_example():
    weight = torch.tensor([[-1.4, 0.7, 0.1, 0.0], [0.21, -0.07, 0.02, 0.1]])
    found = LINEAR(weight, 4, 2)
    assert found.codes.tolist() == [[1, 12, 8, 8], [15, 6, 9, 11]]
    torch.testing.assert_close(found.scale, torch.tensor([[0.2, 0.2], [0.03, 0.03]]))
    torch.testing.assert_close(found.offset, torch.tensor([[-1.6, -1.6], [-0.24, -0.24]]))


@pytest.mark.parametrize(("bits", "largest"), [(2, 1), (4, 7), (8, 127)])
def test_linear_scale_is_the_largest_magnitude_over_the_largest_code(bits, largest):
    found = LINEAR(torch.tensor([[0.5, -2.0]]), bits, 1)
    torch.testing.assert_close(found.scale, torch.full((1, 2), 2.0 / largest))
    assert found.codes.tolist()[0][1] == 1  # -largest + 2**(bits - 1): code 0 is never used


@settings(max_examples=40, deadline=None)
@given(weights, st.sampled_from([2, 4, 8]))
def test_linear_rounds_to_the_nearest(weight, bits):
    found = LINEAR(weight, bits, 32)
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
        error = float((HQQ(row, bits, 16).dequantized() - row).abs().sum())
        close += error == pytest.approx(published_hqq(row[0].tolist(), bits), rel=1e-3)
    # between a group's two middle errors their sum is flat: rounding then decides which step is the last
    assert close >= 46


def mean_error_by_group(found, weight, group):
    return (found.dequantized() - weight).abs().unflatten(1, (-1, group)).mean(-1)


@settings(max_examples=40, deadline=None)
@given(weights, st.sampled_from([(2, 16), (4, 64), (4, 32)]))
def test_hqq_is_never_worse_than_plain_rounding_in_any_group(weight, precision):
    bits, group = precision
    found = HQQ(weight, bits, group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hqq, "STEPS", 1)  # the first candidate alone: plain rounding between minimum and maximum
        plain = HQQ(weight, bits, group)
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
    errors = {bits: relative_error(weight, HQQ(weight, bits, 64 if bits == 4 else 16).dequantized()) for bits in (2, 4)}
    assert errors[4] < 0.088  # plain rounding: 0.0896
    assert errors[2] < 0.310  # plain rounding: 0.327


def test_hqq_result_does_not_depend_on_the_other_rows():
    weight = random_weight(600, 512)
    whole, part = HQQ(weight, 4, 64), HQQ(weight[512:], 4, 64)
    assert relative_error(whole.dequantized()[512:], part.dequantized()) < 1e-3


# --- encodings

CASES = [(bits, quantizer, dtype) for bits in (16, 8, 4, 2) for quantizer in QUANTIZERS for dtype in FLOATS]


@pytest.mark.parametrize(("bits", "quantizer", "dtype"), CASES)
def test_encode_gives_the_stored_fields(bits, quantizer, dtype):
    out, in_ = 80, 192
    weight = random_weight(out, in_)
    encoding = encoding_for(bits, out, in_, dtype, cpu_layout(), quantizer)
    assert encoding.bits == bits
    stored = encoding.encode(weight.to(dtype), QUANTIZERS[quantizer], dtype)
    fields = encoding.stored_fields(out, in_, dtype)
    assert list(stored) == [field.name for field in fields]
    for field in fields:
        value = stored[field.name]
        assert (value.dtype, tuple(value.shape), value.nbytes) == (field.dtype, field.shape, field.nbytes)
        assert value.is_contiguous()
    decoded = encoding.decode(slot_of(encoding, stored, out, in_, dtype), out, in_, dtype)
    assert decoded.shape == weight.shape
    assert decoded.dtype == dtype
    limit = {16: 0.002, 8: 0.01, 4: 0.16, 2: 0.32 if quantizer == "hqq" else 0.9}[bits]
    assert relative_error(weight, decoded) < limit


@settings(max_examples=40, deadline=None)
@given(weights, st.sampled_from([8, 4]))
def test_linear_encodings_are_within_half_a_step(weight, bits):
    weight = weight.repeat(16, 1)
    encoding = encoding_for(bits, *weight.shape, torch.float32, cpu_layout(), "linear")
    _, decoded = encoded_and_decoded(weight, encoding, LINEAR, torch.float32)
    step = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert bool(((decoded - weight).abs() <= step * (0.5 + 1e-3)).all())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("rows", [16, 32, 48, 64, 80, 272, 336])
def test_int4_decodes_what_the_operator_computes(rows, quantizer, dtype):
    columns = 192
    weight = random_weight(rows, columns, mean=0.01)
    encoding = encoding_for(4, rows, columns, dtype, cpu_layout(), quantizer)
    stored, decoded = encoded_and_decoded(weight, encoding, QUANTIZERS[quantizer], dtype, dtype)
    columns_one_by_one = torch.ops.aten._weight_int4pack_mm_for_cpu(
        torch.eye(columns, dtype=dtype), stored["codes"], encoding.group, stored["scales_and_zeros"]
    )
    torch.testing.assert_close(decoded, columns_one_by_one.t(), rtol=2e-7 if dtype == torch.float32 else 0, atol=1e-9)


def test_int4_decodes_in_blocks_of_columns(monkeypatch):
    weight = random_weight(80, 320)
    encoding = encoding_for(4, 80, 320, torch.bfloat16, cpu_layout())
    stored, whole = encoded_and_decoded(weight, encoding, HQQ, torch.bfloat16)
    monkeypatch.setattr(int4, "BLOCK_WEIGHTS", 2 * 64 * 80)  # two groups, and a block of one group at the end
    assert torch.equal(encoding.decode(stored, 80, 320, torch.float32), whole)


@settings(max_examples=25, deadline=None)
@given(weights, st.sampled_from(FLOATS))
def test_int4_codes_are_the_nearest_under_the_stored_parameters(weight, dtype):
    weight = weight.to(dtype).repeat(16, 1)
    rows, columns = weight.shape
    encoding = encoding_for(4, rows, columns, dtype, cpu_layout())
    stored, decoded = encoded_and_decoded(weight, encoding, HQQ, dtype)
    scale, zero = (part.t().float().repeat_interleave(64, 1) for part in stored["scales_and_zeros"].unbind(-1))
    distances = [((q - 8) * scale + zero - weight.float()).abs() for q in range(16)]
    nearest = torch.stack(distances).amin(0)
    assert bool(((decoded - weight.float()).abs() <= nearest * (1 + 1e-3) + 1e-5 * scale + 1e-9).all())


def widened_by_the_book(stored, rows, columns):
    """Int2's docstring, bit by bit."""
    groups = columns // 16
    widened = torch.zeros(rows, columns, dtype=torch.int64)
    codes, step, offset = (stored[name].tolist() for name in ("codes", "step", "offset"))
    for n in range(rows):
        for column in range(columns):
            quarter, place = divmod(column, 4 * groups)
            group, byte = divmod(place, 4)
            code = codes[n][4 * group + byte] >> 2 * quarter & 3
            widened[n, column] = step[n][group] * code + offset[n][group]
    return widened


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.sampled_from([16, 32, 80]), st.integers(0, 10**6))
def test_int2_widens_every_code_exactly(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    step = torch.randint(1, 86, (rows, columns // 16), generator=generator)
    span = 256 - 3 * step
    offset = (torch.rand(step.shape, generator=generator) * span).long() - 128
    stored = {
        "codes": torch.randint(0, 256, (rows, columns // 4), generator=generator).to(torch.uint8),
        "step": step.to(torch.uint8),
        "offset": offset.to(torch.int8),
        "scale": torch.rand(rows, generator=generator),
    }
    slot = slot_of(encoding_named("int2/g16"), stored, rows, columns, torch.float32)
    assert torch.equal(slot["weight"].long(), widened_by_the_book(stored, rows, columns))
    assert torch.equal(slot["scale"], stored["scale"])


def test_int2_widens_in_blocks_of_rows():
    weight = random_weight(1100, 1024)
    encoding = encoding_named("int2/g16")
    stored = encoding.encode(weight, LINEAR, torch.bfloat16)
    whole = slot_of(encoding, stored, 1100, 1024, torch.bfloat16)["weight"]
    for part in (slice(0, 7), slice(1000, 1100)):
        rows = {name: value[part] for name, value in stored.items()}
        assert torch.equal(whole[part], slot_of(encoding, rows, len(whole[part]), 1024, torch.bfloat16)["weight"])


@settings(max_examples=25, deadline=None)
@given(weights, st.sampled_from(sorted(QUANTIZERS)))
def test_int2_levels_stay_within_a_byte_and_codes_are_the_nearest(weight, quantizer):
    encoding = encoding_named("int2/g16")
    stored, decoded = encoded_and_decoded(weight, encoding, QUANTIZERS[quantizer], torch.float32)
    step, offset, scale = stored["step"].int(), stored["offset"].int(), stored["scale"][:, None]
    assert int(step.min()) >= 1
    assert int((offset + 3 * step).max()) <= 127
    distances = []
    for code in range(4):
        level = scale * (offset + code * step)  # (N, G); the groups' columns repeat in every quarter
        distances.append((level.repeat_interleave(4, 1).repeat(1, 4) - weight).abs())
    nearest = torch.stack(distances).amin(0)
    assert bool(((decoded - weight).abs() <= nearest * (1 + 1e-3) + 1e-4 * scale).all())


def test_int2_of_a_symmetric_row_is_exact():
    weight = torch.tensor([-0.5, 0.0, 0.5, 0.5]).repeat(3, 16)
    _, decoded = encoded_and_decoded(weight, encoding_named("int2/g16"), LINEAR, torch.bfloat16)
    assert torch.equal(decoded, weight)


def test_bytes_of_a_matrix():
    def nbytes(bits, slot=False, quantizer="hqq"):
        encoding = encoding_for(bits, 2048, 1024, torch.bfloat16, cpu_layout(), quantizer)
        fields = (encoding.slot_fields if slot else encoding.stored_fields)(2048, 1024, torch.bfloat16)
        return sum(field.nbytes for field in fields)

    weights = 2048 * 1024
    assert nbytes(16) == 2 * weights
    assert nbytes(8) == weights + 2048 * 2
    assert nbytes(4) == nbytes(4, slot=True) == weights // 2 + weights // 64 * 4
    assert nbytes(4, quantizer="linear") == weights // 2 + weights // 256 * 4
    assert nbytes(2) == weights * 3 // 8 + 2048 * 2
    assert nbytes(2, slot=True) == nbytes(8)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [0.0, 0.375, -0.375])
def test_equal_weights_are_kept(bits, quantizer, dtype, value):
    weight = torch.full((16, 64), value, dtype=dtype)
    encoding = encoding_for(bits, 16, 64, dtype, cpu_layout(), quantizer)
    _, decoded = encoded_and_decoded(weight, encoding, QUANTIZERS[quantizer], dtype)
    torch.testing.assert_close(decoded, weight.float(), rtol=0.01, atol=0)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_undefined_weights_are_refused(bits, quantizer, value):
    weight = random_weight(16, 64)
    weight[3, 5] = value
    encoding = encoding_for(bits, 16, 64, torch.float32, cpu_layout(), quantizer)
    with pytest.raises(PackError, match="infinite or undefined"):
        encoding.encode(weight, QUANTIZERS[quantizer], torch.float32)


@pytest.mark.parametrize(
    ("bits", "out", "in_", "quantizer", "name"),
    [
        (16, 7, 33, "hqq", "plain"),
        (8, 7, 33, "hqq", "int8"),
        (4, 64, 128, "hqq", "int4/{}/g64"),
        (4, 64, 96, "hqq", "int4/{}/g32"),
        (4, 64, 1024, "linear", "int4/{}/g256"),
        (4, 64, 384, "linear", "int4/{}/g128"),
        (4, 64, 100, "hqq", "int8"),
        (4, 24, 128, "hqq", "int8"),
        (2, 7, 48, "hqq", "int2/g16"),
        (2, 7, 40, "hqq", "int8"),
    ],
)
def test_the_encoding_of_a_shape(bits, out, in_, quantizer, name):
    encoding = encoding_for(bits, out, in_, torch.bfloat16, cpu_layout(), quantizer)
    assert encoding.name == name.format(cpu_layout())
    assert encoding_named(encoding.name) == encoding


def test_what_cannot_be_encoded_is_refused():
    with pytest.raises(ConfigError, match="no 3-bit encoding"):
        encoding_for(3, 64, 64, torch.bfloat16, cpu_layout())
    with pytest.raises(ConfigError, match="float64"):
        encoding_for(4, 64, 64, torch.float64, cpu_layout())
    with pytest.raises(ConfigError, match="cpu-other"):
        encoding_for(4, 64, 64, torch.bfloat16, "cpu-other")
    with pytest.raises(ConfigError, match="unknown quantizer 'gptq'"):
        encoding_for(4, 64, 64, torch.bfloat16, cpu_layout(), "gptq")


def test_names_of_other_machines_and_versions_are_refused():
    other = "cpu-avx2" if cpu_layout() != "cpu-avx2" else "cpu-avx512"
    with pytest.raises(StoreError, match=f"'{other}', this machine's is '{cpu_layout()}'"):
        encoding_named(f"int4/{other}/g64")
    for name in ("int3", "int4/cpu-avx2/g48", "int4"):
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
    packed = int4_layout.pack(codes)
    # packing in pieces of rows gives what the operator gives for the whole matrix
    assert torch.equal(packed.flatten(), torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1).flatten())
    unpacked = [int4_layout.unpack_transposed(packed, *span).clone() for span in ((0, 32), (32, columns))]
    assert torch.equal(torch.cat(unpacked).t(), codes)


OTHER_MACHINE = """
import torch
from tiermoe.quant import int4_layout
assert int4_layout.cpu_layout() == "cpu-{0}", int4_layout.cpu_layout()
for rows in (16, 48, 64, 112, 272):
    codes = torch.arange(rows * 64).mul(7919).div(13, rounding_mode="floor").remainder(16).view(rows, 64)
    assert torch.equal(int4_layout.unpack_transposed(int4_layout.pack(codes), 0, 64).t(), codes), rows
"""


@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_int4_unpacks_in_the_order_of_narrower_machines(capability):
    if torch.backends.cpu.get_cpu_capability() not in ("AVX512", "AVX2"):
        pytest.skip("torch's CPU capability cannot be lowered here")
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    program = OTHER_MACHINE.format(capability)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
