"""CPU kernels against decoded weights multiplied in double precision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermoe.errors import ConfigError
from tiermoe.formats.int4 import CPU_LAYOUT
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_for
from tiermoe.kernels import linear
from tiermoe.kernels.linear import INT4_TOKENS, INT8_TOKENS, DecodedLinear, linear_for

pytestmark = pytest.mark.usefixtures("one_thread")

ALIGNMENT = 64
# of sum |x| |w|: the rounding of operands, of the accumulation and of the result
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def in_one_buffer(fields, values):
    """The fields as views of one byte buffer, each at the next aligned address, as they lie in a slot."""
    spans, end = [], 0
    for field in fields:
        spans.append((end, end + field.nbytes))
        end += -(-field.nbytes // ALIGNMENT) * ALIGNMENT
    base = torch.empty(end + ALIGNMENT, dtype=torch.uint8)
    base = base[-base.data_ptr() % ALIGNMENT :]
    views = {}
    for field, (first, last) in zip(fields, spans, strict=True):
        views[field.name] = base[first:last].view(field.dtype).view(field.shape)
        if values is not None:
            views[field.name].copy_(values[field.name])
    return views


def slot_for(bits, weight, dtype, quantizer="hqq"):
    """The encoding of a weight and its slot fields, loaded the way that a slot is."""
    out, in_ = weight.shape
    encoding = encoding_for(bits, out, in_, dtype, CPU_LAYOUT, quantizer)
    stored = encoding.encode(weight, QUANTIZERS[quantizer], dtype)
    fields, slot_fields = (f(out, in_, dtype) for f in (encoding.stored_fields, encoding.slot_fields))
    loaded = in_one_buffer(fields, stored)
    if fields == slot_fields:
        return encoding, loaded
    slot = in_one_buffer(slot_fields, None)
    encoding.widen(loaded, slot)
    return encoding, slot


def assert_close_to_decoded(y, x, encoding, slot, out, in_):
    weight = encoding.decode(slot, out, in_, torch.float32).double()
    exact = x.double() @ weight.t()
    bound = x.double().abs() @ weight.abs().t() * TOLERANCE[x.dtype]
    assert y.dtype == x.dtype
    assert y.shape == exact.shape
    assert bool(((y.double() - exact).abs() <= bound + 1e-30).all())


TOKENS = sorted(
    {1, 2, INT8_TOKENS[torch.bfloat16], INT8_TOKENS[torch.bfloat16] + 1}
    | {INT4_TOKENS[torch.bfloat16], INT4_TOKENS[torch.bfloat16] + 1, 100}
)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(64, 64), (80, 192), (128, 96), (7, 33), (24, 40), (13, 48)])
@pytest.mark.parametrize("bits", [16, 8, 6, 4, 3, 2])
def test_kernel_multiplies_by_the_decoded_weights(bits, shape, dtype):
    generator = torch.Generator().manual_seed(bits)
    weight = torch.randn(shape, generator=generator) * 0.02 + 0.005
    encoding, slot = slot_for(bits, weight, dtype)
    kernel = linear_for(encoding.name, "cpu", dtype)
    reference = DecodedLinear(encoding, dtype)
    for tokens in TOKENS:
        x = torch.randn(tokens, shape[1], generator=generator).to(dtype)
        y = kernel(x, slot, *shape)
        assert_close_to_decoded(y, x, encoding, slot, *shape)
        assert_close_to_decoded(reference(x, slot, *shape), x, encoding, slot, *shape)
        assert torch.equal(y, kernel(x, {name: value.clone() for name, value in slot.items()}, *shape))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 150),
    st.sampled_from([1, 3, 20]),
    st.sampled_from([8, 6, 4, 3, 2]),
    st.sampled_from(list(TOLERANCE)),
)
def test_any_shape_has_a_kernel(out, in_, tokens, bits, dtype):
    generator = torch.Generator().manual_seed(out)
    encoding, slot = slot_for(bits, torch.randn(out, in_, generator=generator), dtype)
    x = torch.randn(tokens, in_, generator=generator).to(dtype)
    assert_close_to_decoded(linear_for(encoding.name, "cpu", dtype)(x, slot, out, in_), x, encoding, slot, out, in_)


@pytest.mark.parametrize("in_", [8, 33, 100])
@pytest.mark.parametrize("tokens", [1, 5])
def test_int8_reads_nothing_beyond_its_rows(in_, tokens):
    """Columns that the operator cannot take (it would read the next row, and past the last one)."""
    encoding, slot = slot_for(8, torch.randn(5, in_), torch.bfloat16)
    buffer = torch.full((tokens * in_ + 64,), torch.nan, dtype=torch.bfloat16)
    x = buffer[: tokens * in_].view(tokens, in_).copy_(torch.randn(tokens, in_))
    y = linear_for("int8", "cpu", torch.bfloat16)(x, slot, 5, in_)
    assert_close_to_decoded(y, x, encoding, slot, 5, in_)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_large_matrix_at_8_bits_is_decoded_in_pieces(dtype, monkeypatch):
    encoding = encoding_for(8, 100, 48, dtype, CPU_LAYOUT)
    random = torch.Generator().manual_seed(0)
    fields = encoding.encode(torch.randn(100, 48, generator=random), QUANTIZERS["linear"], dtype)
    x, kernel = torch.randn(20, 48, generator=random).to(dtype), linear_for("int8", "cpu", dtype)
    taken = []
    monkeypatch.setattr(linear, "DECODED_WEIGHTS", 48 * 32)
    monkeypatch.setattr(
        linear.scratch, "take", lambda _, shape, dtype: taken.append(shape) or torch.empty(shape, dtype=dtype)
    )
    exact = x.double() @ encoding.decode(fields, 100, 48, torch.float64).t()
    assert torch.allclose(kernel(x, fields, 100, 48).double(), exact, rtol=1e-2, atol=1e-2)
    assert taken == [(32, 48)] * 3 + [(4, 48)]


@pytest.mark.parametrize("bits", [16, 8, 6, 4, 3, 2])
@pytest.mark.parametrize("tokens", [1, 100])
def test_no_product_in_bfloat16_where_the_processor_has_no_instructions_for_it(bits, tokens, monkeypatch):
    random, multiplied = torch.Generator().manual_seed(0), []
    product = torch.nn.functional.linear

    def watched(x, weight):
        multiplied.append({x.dtype, weight.dtype})
        return product(x, weight)

    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(linear, "is_torchs", lambda: False)
    monkeypatch.setattr(linear, "matrix_form", lambda *_: None)  # nor are there native kernels
    monkeypatch.setattr(linear.F, "linear", watched)
    encoding, slot = slot_for(bits, torch.randn(64, 128, generator=random), torch.bfloat16)
    x = torch.randn(tokens, 128, generator=random).bfloat16()
    y = linear_for(encoding.name, "cpu", torch.bfloat16)(x, slot, 64, 128)
    assert_close_to_decoded(y, x, encoding, slot, 64, 128)
    assert multiplied == ([] if bits == 8 and tokens == 1 else [{torch.float32}])


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("tokens", [1, 100])
def test_float16_sums_do_not_overflow_before_they_are_scaled(bits, tokens):
    weight = torch.full((16, 2048), 1e-3, dtype=torch.float16)
    weight[:, 1::2] *= -0.5
    encoding, slot = slot_for(bits, weight, torch.float16)
    x = torch.full((tokens, 2048), 50.0, dtype=torch.float16)
    y = linear_for(encoding.name, "cpu", torch.float16)(x, slot, 16, 2048)
    assert bool(torch.isfinite(y).all())
    assert_close_to_decoded(y, x, encoding, slot, 16, 2048)


@pytest.mark.parametrize("bits", [16, 8, 6, 4, 3, 2])
def test_strided_tokens(bits):
    encoding, slot = slot_for(bits, torch.randn(32, 64), torch.bfloat16)
    x = torch.randn(3, 128).to(torch.bfloat16)[:, ::2]
    y = linear_for(encoding.name, "cpu", torch.bfloat16)(x, slot, 32, 64)
    assert_close_to_decoded(y, x, encoding, slot, 32, 64)


@pytest.mark.parametrize("amx", [True, False])
@pytest.mark.parametrize("tokens", [1, 2])
def test_one_token_takes_mv_where_the_machine_has_amx(amx, tokens, monkeypatch):
    calls = []
    mv = torch.mv
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(linear, "has_amx", lambda: amx)
    monkeypatch.setattr(torch, "mv", lambda *operands: calls.append(operands) or mv(*operands))
    encoding, slot = slot_for(16, torch.randn(33, 64), torch.bfloat16)
    x = torch.randn(tokens, 64).to(torch.bfloat16)
    y = linear_for("plain", "cpu", torch.bfloat16)(x, slot, 33, 64)
    assert len(calls) == (amx and tokens == 1)
    assert_close_to_decoded(y, x, encoding, slot, 33, 64)


def test_a_device_without_kernels_is_refused():
    with pytest.raises(ConfigError, match="no kernel for 'int8' on 'xpu'"):
        linear_for("int8", "xpu", torch.bfloat16)
