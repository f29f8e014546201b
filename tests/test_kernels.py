"""CPU kernels against decoded weights multiplied in double precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiermoe.formats.encoding import Encoding
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_for, encoding_named
from tiermoe.kernels import linear
from tiermoe.kernels.linear import INT4_TOKENS, INT8_TOKENS, linear_for

pytestmark = pytest.mark.usefixtures("one_thread")

HQQ = QUANTIZERS["hqq"]
# of sum |x| |w|: the rounding of operands, of the accumulation and of the result
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def random(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def lying_in_a_slot(encoding: Encoding, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The fields of a weight as they lie in a slot: views of one buffer, each from a multiple of 64 bytes on."""
    fields = encoding.encode(weight, HQQ, dtype)
    buffer = torch.empty(sum(value.nbytes + 64 for value in fields.values()) + 64, dtype=torch.uint8)
    at, views = -buffer.data_ptr() % 64, {}
    for name, value in fields.items():
        views[name] = buffer[at : at + value.nbytes].view(value.dtype).view(value.shape).copy_(value)
        at += -(-value.nbytes // 64) * 64
    return views


def assert_product(got: Tensor, x: Tensor, encoding: Encoding, fields: dict[str, Tensor], out: int) -> None:
    weight = encoding.decode(fields, out, x.shape[1], torch.float32).double()
    exact, allowed = x.double() @ weight.t(), x.double().abs() @ weight.abs().t() * TOLERANCE[x.dtype]
    assert (got.dtype, got.shape) == (x.dtype, exact.shape)
    least = 2.0**-24 if x.dtype == torch.float16 else 1e-30  # the smallest float16, by which all below 2^-14 are apart
    assert bool(((got.double() - exact).abs() <= allowed + least).all())


SOME_TOKENS = (1, 2, INT8_TOKENS[torch.bfloat16], INT8_TOKENS[torch.bfloat16] + 1, INT4_TOKENS[torch.bfloat16],
               INT4_TOKENS[torch.bfloat16] + 1, 100)  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bits", [16, 8, 6, 4, 3, 2])
@settings(max_examples=12, deadline=None)
@given(
    shape=st.one_of(
        st.tuples(st.integers(1, 70), st.integers(1, 150)), st.sampled_from([(64, 64), (128, 96), (80, 192)])
    ),
    tokens=st.sampled_from(SOME_TOKENS),
    seed=st.integers(0, 1000),
)
def test_a_product_of_any_shape_is_that_of_the_decoded_weights(
    bits: int, dtype: torch.dtype, shape: tuple[int, int], tokens: int, seed: int
) -> None:
    """Whatever the strides of the tokens and the addresses of the fields; int8's operator would read past the rows of
    some widths."""
    encoding = encoding_for(bits, *shape, dtype)
    fields = lying_in_a_slot(encoding, random(*shape, seed) + 0.005, dtype)
    beyond = torch.full((tokens * shape[1] + 64,), torch.nan, dtype=dtype)
    x = beyond[: tokens * shape[1]].view(tokens, shape[1]).copy_(random(tokens, shape[1], seed + 1))
    kernel = linear_for(encoding.name, "cpu", dtype)
    got = kernel(x, fields, *shape)
    assert_product(got, x, encoding, fields, shape[0])
    assert torch.equal(got, kernel(x, {name: value.clone() for name, value in fields.items()}, *shape))
    assert torch.equal(got, kernel(x.repeat_interleave(2, 1)[:, ::2], fields, *shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_large_matrix_at_8_bits_is_decoded_in_pieces(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, x = encoding_named("int8"), random(20, 48, 1).to(dtype)
    fields = encoding.encode(random(100, 48), HQQ, dtype)
    kernel, taken = linear_for("int8", "cpu", dtype), []
    monkeypatch.setattr(linear, "DECODED_WEIGHTS", 48 * 32)
    monkeypatch.setattr(
        linear.scratch, "take", lambda _, shape, dtype: taken.append(shape) or torch.empty(shape, dtype=dtype)
    )
    assert_product(kernel(x, fields, 100, 48), x, encoding, fields, 100)
    assert taken == [(32, 48)] * 3 + [(4, 48)]


@pytest.mark.parametrize("bits", [16, 8, 6, 4, 3, 2])
@pytest.mark.parametrize("tokens", [1, 100])
def test_no_product_in_bfloat16_where_the_processor_has_no_instructions_for_it(
    bits: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplied, product = [], torch.nn.functional.linear

    def watched(x: Tensor, weight: Tensor) -> Tensor:
        multiplied.append({x.dtype, weight.dtype})
        return product(x, weight)

    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(linear, "is_torchs", lambda: False)
    monkeypatch.setattr(linear, "matrix_form", lambda *_: None)  # nor are there native kernels
    monkeypatch.setattr(linear.F, "linear", watched)
    encoding = encoding_for(bits, 64, 128, torch.bfloat16)
    fields, x = encoding.encode(random(64, 128), HQQ, torch.bfloat16), random(tokens, 128, 1).bfloat16()
    assert_product(linear_for(encoding.name, "cpu", torch.bfloat16)(x, fields, 64, 128), x, encoding, fields, 64)
    assert multiplied == ([] if bits == 8 and tokens == 1 else [{torch.float32}])


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("tokens", [1, 100])
def test_float16_sums_do_not_overflow_before_they_are_scaled(bits: int, tokens: int) -> None:
    weight = torch.full((16, 2048), 1e-3, dtype=torch.float16)
    weight[:, 1::2] *= -0.5
    encoding = encoding_for(bits, 16, 2048, torch.float16)
    fields, x = encoding.encode(weight, HQQ, torch.float16), torch.full((tokens, 2048), 50.0, dtype=torch.float16)
    got = linear_for(encoding.name, "cpu", torch.float16)(x, fields, 16, 2048)
    assert bool(torch.isfinite(got).all())
    assert_product(got, x, encoding, fields, 16)
