"""The native product in every coding against decoded weights in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from native_products import assert_alone_as_among_others, columns_of, form_of, random
from tiermoe import native
from tiermoe.formats import int4, int6
from tiermoe.formats.encoding import Encoding
from tiermoe.formats.int4 import CPU_LAYOUT, Int2, Int4, as_nibbles
from tiermoe.formats.int6 import Int6
from tiermoe.formats.int8 import Int8
from tiermoe.formats.nonuniform import LEVELS, NonUniform
from tiermoe.formats.plain import Plain
from tiermoe.formats.quantizers import QUANTIZERS, LinearQuantizer
from tiermoe.formats.trellis import GROUPS, Trellis
from tiermoe.kernels.linear import linear
from tiermoe.kernels.matrix import MatrixForm, matrix_form

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="needs the native kernels"),
    pytest.mark.usefixtures("instruction_set"),
]

ROUNDING = 2.0**-8  # the most that rounding to bfloat16 changes a value, relative
ENCODINGS: dict[str, Encoding] = {
    "2 bits": Int2(CPU_LAYOUT, 64),
    "4 bits": Int4(CPU_LAYOUT, 64),
    "uneven 2 bits": NonUniform(2, CPU_LAYOUT, 64),
    "uneven 3 bits": NonUniform(3, CPU_LAYOUT, 64),
    "uneven 4 bits": NonUniform(4, CPU_LAYOUT, 32),
    "trellis": Trellis(CPU_LAYOUT, 128),
    "6 bits": Int6(CPU_LAYOUT, 64),
    "8 bits": Int8(),
    "16 bits": Plain(),
}


class Given(LinearQuantizer):
    """Scales that were found before."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale


def encoded(encoding: Encoding, out: int, in_: int, seed: int = 0) -> tuple[MatrixForm, dict[str, torch.Tensor]]:
    form = form_of(encoding, out, in_)
    quantizer = QUANTIZERS["hqq" if encoding.bits == 2 else "linear"]  # of linear, 2 bits have three of four codes
    return form, encoding.encode(random(out, in_, seed) * 0.05, quantizer, torch.bfloat16)


def as_integers(x: torch.Tensor, group: int) -> torch.Tensor:
    """The tokens that AVX2 computes with: a span's columns are integers below 255 * 128 times a power of two."""
    spans = x.double().view(-1, min(group, 64))
    fraction, exponent = spans.abs().amax(1, keepdim=True).frexp()
    unit = torch.ldexp(torch.ones_like(fraction), exponent - 15 + (fraction > 255 / 256 - 1e-9).int())
    rounded = spans.div(unit).round().mul(unit)
    assert (rounded - spans).abs().le(spans.abs().amax(1, keepdim=True) * 1.01 * 2.0**-15).all()
    return rounded.view(x.shape)


def exact(x: torch.Tensor, encoding: Encoding, fields: dict[str, torch.Tensor], out: int) -> torch.Tensor:
    """The product with the decoded weights in float64."""
    return x.double() @ encoding.decode(fields, out, x.shape[1], torch.float32).double().t()


def assert_rounded_once(got: torch.Tensor, want: torch.Tensor, x: torch.Tensor, largest: float) -> None:
    # float32 sums: their error counts where a result is near 0
    allowed = want.abs() * ROUNDING + 1e-6 * largest * x.double().abs().sum(1, keepdim=True)
    assert (got.double() - want).abs().le(allowed).all()


@pytest.mark.parametrize("bits", ["8 bits", "16 bits"])
@settings(max_examples=40, deadline=None)
@given(
    out=st.one_of(st.integers(1, 200), st.sampled_from([64, 128])),
    columns=st.integers(1, 6),
    count=st.one_of(st.integers(1, 14), st.sampled_from([40, 100])),
    seed=st.integers(0, 100),
)
def test_a_product_is_the_decoded_weights_rounded_once(
    bits: str, out: int, columns: int, count: int, seed: int
) -> None:
    encoding = ENCODINGS[bits]
    form, fields = encoded(encoding, out, 64 * columns, seed)
    x = random(count, 64 * columns, seed + 1)
    assert_rounded_once(linear(x, form, fields), exact(x, encoding, fields, out), x, 0.25)


@pytest.mark.parametrize(
    "encoding",
    [
        *(kind(CPU_LAYOUT, group) for kind, group in itertools.product([Int2, Int4, Int6], native.GROUPS)),
        *(NonUniform(bits, CPU_LAYOUT, group) for bits, group in itertools.product(LEVELS, [32, 64])),
        *(Trellis(CPU_LAYOUT, group) for group in GROUPS),
    ],
    ids=lambda encoding: encoding.name,
)
@settings(max_examples=15, deadline=None)
@given(
    blocks=st.integers(1, 4),
    groups=st.integers(1, 4),
    count=st.one_of(st.integers(1, 14), st.sampled_from([25, 60])),
    seed=st.integers(0, 100),
)
def test_a_product_of_blocks_is_the_decoded_weights_rounded_once(
    encoding: Int4 | Int6 | NonUniform | Trellis, blocks: int, groups: int, count: int, seed: int
) -> None:
    group = encoding.group
    form, fields = encoded(encoding, 64 * blocks, group * groups, seed)
    x = random(count, group * groups, seed + 1)
    taken = as_integers(x, group) if native.instruction_set() == "avx2" else x
    assert_rounded_once(linear(x, form, fields), exact(taken, encoding, fields, 64 * blocks), x, 0.25)


def test_every_code_of_6_bits() -> None:
    """One token takes one column, in every place that a code can have, under scales of both signs."""
    codes = torch.stack([torch.arange(64, dtype=torch.uint8).roll(shift) for shift in range(64)])
    scales = torch.linspace(-2, 2, 128).bfloat16().view(64, 2)  # (N, G)
    weight = torch.cat((codes, codes.flip(0)), 1)
    stored = scales.t().contiguous().view(64, 2)  # one block: (G, 64)
    fields = {"codes": int6.pack(weight), "scales": stored}
    form = form_of(Int6(CPU_LAYOUT, 64), 64, 128)
    want = ((weight.float() - 32) * scales.float().repeat_interleave(64, 1)).bfloat16()
    assert all(torch.equal(got, want.t()) for got in columns_of(form, fields))


@pytest.mark.parametrize("bits", LEVELS)
def test_every_level_of_uneven_bits(bits: int) -> None:
    """One token takes one column, in every place that a code can have, under scales of both signs."""
    encoding = NonUniform(bits, CPU_LAYOUT, 32)
    codes = torch.stack([torch.arange(64).roll(shift) for shift in range(64)]) % (1 << bits)
    scales = torch.linspace(-2, 2, 128).bfloat16().float().view(64, 2)  # (N, G)
    want = torch.tensor(LEVELS[bits]).float()[codes] * scales.repeat_interleave(32, 1)
    fields = encoding.encode(want, Given(scales), torch.bfloat16)
    assert all(torch.equal(got, want.t().bfloat16()) for got in columns_of(form_of(encoding, 64, 64), fields))


@pytest.mark.parametrize("kind", [Int4, Int2])
def test_every_code_of_4_and_2_bits(kind: type[Int4]) -> None:
    """One token takes one column, in every place that a code can have, under scales and zeros of both signs."""
    encoding = kind(CPU_LAYOUT, 32)
    codes = torch.stack([torch.arange(64).roll(shift) for shift in range(64)]) % (1 << encoding.bits)
    pairs = torch.linspace(-2, 2, 256).bfloat16().view(2, 64, 2)  # (G, N, 2)
    nibbles = as_nibbles(codes.to(torch.uint8), encoding.bits)
    fields = {"codes": int4.pack(nibbles), "scales_and_zeros": pairs}
    scale, zero = (part.t().float().repeat_interleave(32, 1) for part in pairs.unbind(-1))
    want = ((codes - (1 << encoding.bits - 1)) * scale + zero).t().bfloat16()
    assert all(torch.equal(got, want) for got in columns_of(form_of(encoding, 64, 64), fields))


def test_every_code_of_8_bits() -> None:
    codes = torch.arange(-128, 128, dtype=torch.int8).repeat(64, 1)
    codes = torch.stack([row.roll(shift) for shift, row in enumerate(codes)])
    fields = {"weight": codes, "scale": torch.linspace(0.5, 2, 64).bfloat16()}
    want = (codes.t().float() * fields["scale"].float()).bfloat16()
    assert all(torch.equal(got, want) for got in columns_of(form_of(Int8(), 64, 256), fields))


@pytest.mark.parametrize("bits", ENCODINGS)
def test_a_tokens_product_depends_on_no_other_token_and_no_thread(bits: str) -> None:
    assert_alone_as_among_others(*encoded(ENCODINGS[bits], 192, 256), 23, range(1, 24), threads=(1, 2, 3))


@pytest.mark.parametrize("bits", ENCODINGS)
def test_what_is_no_token_of_the_matrix_is_refused(bits: str) -> None:
    form, fields = encoded(ENCODINGS[bits], 64, 128)
    with pytest.raises(ValueError, match="float32"):
        linear(torch.zeros(1, 128), form, fields)
    with pytest.raises(ValueError, match="128"):
        linear(torch.zeros(1, 64).bfloat16(), form, fields)


@pytest.mark.parametrize(
    ("bits", "in_"),
    [
        ("4 bits", 96),
        ("uneven 4 bits", 48),
        ("uneven 3 bits", 96),
        ("uneven 2 bits", 96),
        ("6 bits", 96),
        ("8 bits", 96),
        ("16 bits", 48),
        ("8 bits", 1 << 16),
        ("2 bits", 96),
    ],
)
def test_widths_that_the_kernels_do_not_take(bits: str, in_: int) -> None:
    assert matrix_form(ENCODINGS[bits], 64, in_, torch.bfloat16) is None
    assert matrix_form(ENCODINGS[bits], 64, 256, torch.float32) is None
