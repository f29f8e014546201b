"""The native products in every coding against the decoded weights in float64: our own codings as they are decoded,
published ones by their definition and transformers, blocks of GGUF files as the gguf package dequantises them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import gguf_blocks
from parity import as_integers
from tiermoe import native
from tiermoe.errors import StoreError
from tiermoe.formats.checkpoint_quant import CheckpointQuant, Transposed4
from tiermoe.formats.encoding import Encoding
from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.formats.gguf_types import ENCODINGS, Gguf, gguf_encoding
from tiermoe.formats.int4 import Int2, Int4
from tiermoe.formats.int6 import Int6
from tiermoe.formats.int8 import Int8
from tiermoe.formats.nonuniform import LEVELS, NonUniform
from tiermoe.formats.plain import Plain
from tiermoe.formats.registry import encoding_named
from tiermoe.formats.trellis import GROUPS, Trellis
from tiermoe.kernels.experts import FusedExperts, expert_kernel
from tiermoe.kernels.gates import gate_named
from tiermoe.kernels.linear import MatrixForm, linear, linear_for, matrix_form, prepared_at_most
from tiermoe.types import MoeLayer, Part

needs_native = pytest.mark.skipif(not native.available(), reason="needs the native kernels")
by_set = pytest.mark.usefixtures("instruction_set")

OWN: list[Encoding] = [
    Plain(), Int8(), *(kind(group) for kind, group in itertools.product([Int2, Int4, Int6], native.GROUPS)),
    *(NonUniform(bits, group) for bits, group in itertools.product(LEVELS, [32, 64])),
    *(Trellis(group) for group in GROUPS),
]  # fmt: skip
PUBLISHED: list[Encoding] = [
    Transposed4("gptq", "f16", 32, 2), Transposed4("awq", "bf16", 64), CheckpointQuant("e2m1", "e8m0", 1, 32),
    CheckpointQuant("e2m1", "e4m3-over", 1, 16, 2), CheckpointQuant("e2m1", "e4m3-times", 1, 16, 1),
    CheckpointQuant("s4", "bf16", 1, 32), CheckpointQuant("s4", "f16", 1, 128),
    CheckpointQuant("e4m3", "f32", 128, 128), CheckpointQuant("e4m3", "bf16", 32, 32),
    CheckpointQuant("e4m3", "f32", 1, 1 << 15), CheckpointQuant("e4m3", "e8m0", 1 << 15, 1 << 15),
]  # fmt: skip
EVERY = pytest.mark.parametrize("encoding", [*OWN, *PUBLISHED, *ENCODINGS], ids=lambda encoding: encoding.name)
A_PUBLISHED = pytest.mark.parametrize("encoding", PUBLISHED, ids=lambda encoding: encoding.name)

ROUNDING = 2.0**-8  # the most that rounding to bfloat16 changes a value, relative
SUMMED = 2e-6  # of sums in float32


def random(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def form_of(encoding: Encoding, out: int, in_: int) -> MatrixForm:
    form = matrix_form(encoding, out, in_, torch.bfloat16)
    assert form is not None
    return form


def random_slot(encoding: Encoding, out: int, in_: int, seed: int = 0) -> dict[str, Tensor]:
    """The slot's fields of a matrix (out, in_): all codes that are defined occur, weights are around 0.1 large."""
    if isinstance(encoding, Gguf):
        return gguf_blocks.random_blocks(encoding.type, out, in_, seed)
    generator, found = torch.Generator().manual_seed(seed), {}
    for field in encoding.slot_fields(out, in_, torch.bfloat16):
        if field.dtype.is_floating_point:
            size = torch.rand(field.shape, generator=generator) * 0.02 + 0.001
            signs = torch.randint(0, 2, field.shape, generator=generator) * 2 - 1 if encoding in OWN else 1
            found[field.name] = (size * signs).to(field.dtype)
        else:
            low, high = (-128, 128) if field.dtype == torch.int8 else (0, 256)
            found[field.name] = torch.randint(low, high, field.shape, dtype=field.dtype, generator=generator)
    if isinstance(encoding, NonUniform):
        runs = found["blocks"].view(-1, 128 + 8 * encoding.bits * encoding.group)
        runs[:, 1:128:2] = runs[:, 1:128:2] & 0x80 | 0x3A  # the scales' exponents
    if isinstance(encoding, Transposed4):
        found["zeros"] %= 17
    if isinstance(encoding, CheckpointQuant):
        if encoding.codes == "e4m3":
            found["codes"][(found["codes"] & 0x7F) == 0x7F] = 0
        if encoding.scale == "e8m0":
            found["scales"] = found["scales"] % 15 + 110
        if encoding.matrices:
            found["scales"] = found["scales"] % 0x7E + 1
            found["factors"] = found["factors"] * 0.05
            if encoding.scale == "e4m3-over":
                found["factors"] = found["factors"].reciprocal()
    return found


def weights(encoding: Encoding, slot: dict[str, Tensor], out: int, in_: int) -> Tensor:
    """What a slot stands for, float32 (out, in_)."""
    if isinstance(encoding, Gguf):
        return gguf_blocks.weights(encoding.type, slot)
    if isinstance(encoding, CheckpointQuant | Transposed4):
        return published_weights(encoding, slot, in_)
    return encoding.decode(slot, out, in_, torch.float32)  # held against the page in test_weight_formats.py


def published_weights(encoding: CheckpointQuant | Transposed4, slot: dict[str, Tensor], in_: int) -> Tensor:
    """MXFP4 by transformers, the others by their definition."""
    codes, scales = slot["codes"], slot["scales"]
    out = codes.shape[0]
    if isinstance(encoding, Transposed4):
        zeros, wide = (slot[name].float().repeat_interleave(encoding.group, 1) for name in ("zeros", "scales"))
        return (_pairs(codes) - zeros) * wide
    if encoding.matrices:
        ones = torch.full((1, out, in_ // 32), 127, dtype=torch.uint8)
        values = convert_moe_packed_tensors(codes.view(1, out, -1, 16), ones, dtype=torch.float32)[0].t()
        factor = slot["factors"].repeat_interleave(out // encoding.matrices)[:, None]
        sizes = scales.view(torch.float8_e4m3fn).float()
        sizes = sizes * factor if encoding.scale == "e4m3-times" else sizes / factor
        return values * sizes.repeat_interleave(16, 1)
    if encoding.codes == "e2m1":
        blocks = codes.view(1, out, -1, 16)
        return convert_moe_packed_tensors(blocks, scales[None], dtype=torch.float32)[0].t().contiguous()
    values = _pairs(codes) - 8 if encoding.codes == "s4" else codes.view(torch.float8_e4m3fn).float()
    if encoding.scale == "e8m0":
        scales = scales.view(torch.float8_e8m0fnu)
    wide = scales.float().repeat_interleave(min(encoding.rows, out), 0)[:out]
    return values * wide.repeat_interleave(min(encoding.columns, in_), 1)[:, :in_]


def _pairs(codes: Tensor) -> Tensor:
    return torch.stack([(codes >> shift & 15).float() for shift in (0, 4)], dim=-1).flatten(1)


def of_whole_numbers(encoding: Encoding) -> bool:
    """Whether products of an encoding are of whole numbers (native/isa/integers.h)."""
    return not isinstance(encoding, Plain) and not (isinstance(encoding, CheckpointQuant) and encoding.codes == "e4m3")


def assert_rounded_once(got: Tensor, x: Tensor, encoding: Encoding, weight: Tensor) -> None:
    """Codes are multiplied before zeros and minima are taken off: what is summed may be as large as for the largest
    weight of a row."""
    weight, error = weight.double(), SUMMED * x.double().abs()
    taken = as_integers(x) if of_whole_numbers(encoding) else x.double()
    want = taken @ weight.t()
    allowed = want.abs() * ROUNDING + error.sum(1, keepdim=True) * weight.abs().amax(1)
    assert (got.double() - want).abs().le(allowed).all()


def widths(encoding: Encoding, count: int) -> int:
    """Columns of a matrix, about `count` times as many as the kernels take at the least."""
    if isinstance(encoding, Plain | Int8):
        return 64 * (count % 6 + 1) + 2048 * (count % 2)
    if isinstance(encoding, Gguf):
        return encoding.columns * (count if encoding.columns == 32 else count % 3 + 1)
    if encoding in OWN:
        return encoding.group * (count % 4 + 1)  # type: ignore[attr-defined]
    return (64 if isinstance(encoding, Transposed4) else 32) * count


@needs_native
@by_set
@EVERY
@settings(max_examples=12, deadline=None)
@given(
    out=st.one_of(st.integers(1, 200), st.sampled_from([64, 128])),
    groups=st.integers(1, 20),
    count=st.one_of(st.integers(1, 14), st.sampled_from([40, 100])),
    seed=st.integers(0, 100),
)
def test_a_product_is_the_weights_rounded_once(
    encoding: Encoding, out: int, groups: int, count: int, seed: int
) -> None:
    if encoding in OWN and not isinstance(encoding, Plain | Int8):
        out = 64 * (out % 4 + 1)
    out, in_ = out * max(1, getattr(encoding, "matrices", 1)), widths(encoding, groups)
    slot, x = random_slot(encoding, out, in_, seed), random(count, in_, seed + 1)
    got = linear(x, form_of(encoding, out, in_), slot)
    assert_rounded_once(got, x, encoding, weights(encoding, slot, out, in_))


@needs_native
@by_set
@EVERY
def test_a_tokens_product_depends_on_no_other_token_and_no_thread(encoding: Encoding) -> None:
    form, slot, before = form_of(encoding, 192, 512), random_slot(encoding, 192, 512), torch.get_num_threads()
    x = random(53, 512, 1)
    try:
        torch.set_num_threads(1)
        alone = torch.cat([linear(token[None], form, slot) for token in x])
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for count in (*range(1, 12), 19, 23, 26, 49, 53):
                assert torch.equal(linear(x[:count], form, slot), alone[:count])
    finally:
        torch.set_num_threads(before)


@needs_native
@EVERY
def test_every_instruction_set_gives_the_same_bits(
    encoding: Encoding, on_every_set: Callable[..., list[Tensor]]
) -> None:
    form, slot, x = form_of(encoding, 128, 768), random_slot(encoding, 128, 768), random(21, 768, 1)
    x[3], x[4, :40], x[5], x[6] = 0, 1e-38, 1e30, 1  # codes of 127, whose sums are largest

    def both() -> Tensor:
        return torch.cat([linear(x, form, slot), *(linear(token[None], form, slot) for token in x)])

    found = on_every_set(both)
    assert all(torch.equal(each, found[0]) for each in found)


@needs_native
@by_set
@EVERY
def test_quantised_activations_take_no_more_than_is_planned(encoding: Encoding) -> None:
    tokens, columns = 9, 768  # so many tokens are quantised once for all threads
    taken = native._native.prepared(form_of(encoding, 64, columns).absent(), tokens, tokens, 1)
    assert taken <= tokens * prepared_at_most(columns) + 64  # whole cache lines


@needs_native
@by_set
@EVERY
def test_every_code_in_every_place(encoding: Encoding) -> None:
    """Each token takes one column: what a weight is, together and alone."""
    in_ = 256
    slot, form, x = random_slot(encoding, 64, in_, 5), form_of(encoding, 64, in_), torch.eye(in_).bfloat16()
    want = weights(encoding, slot, 64, in_).t()
    for got in (linear(x, form, slot), torch.cat([linear(one[None], form, slot) for one in x])):
        if isinstance(encoding, Plain):
            assert torch.equal(got, want.bfloat16())
        else:
            assert (got.float() - want).abs().le(want.abs() * ROUNDING + 1e-7).all()


@needs_native
@by_set
@pytest.mark.parametrize("type", [each.type for each in ENCODINGS if re.match("iq[123]", each.type)])
def test_every_place_of_a_grid(type: str) -> None:
    """A grid of IQ1, IQ2 or IQ3 has at most 2048 places of eight columns, which occur sixteen times each here."""
    slot, x = gguf_blocks.random_blocks(type, 1024, 256), torch.eye(256).bfloat16()
    form, want = form_of(gguf_encoding(type), 1024, 256), gguf_blocks.weights(type, slot).t()
    assert (linear(x, form, slot).float() - want).abs().le(want.abs() * ROUNDING + 1e-7).all()


@needs_native
@by_set
@pytest.mark.parametrize("type", ["q8_0", "q4_k", "q6_k", "iq1_m", "iq2_s", "iq3_xxs", "tq1_0"])
def test_columns_that_are_zero_or_no_numbers(type: str) -> None:
    slot, x = gguf_blocks.random_blocks(type, 64, 512), random(7, 512, 1)
    x[0], x[1, 300], x[2, 300], x[3] = 0, torch.inf, torch.nan, 1e-38
    form = form_of(gguf_encoding(type), 64, 512)
    for got in (linear(x, form, slot), torch.cat([linear(one[None], form, slot) for one in x])):
        assert got[0].eq(0).all()
        assert not got[1:3].isfinite().any()
        assert got[3].abs().max() < 1e-34
        assert got[4:].isfinite().all()


HIDDEN, INNER = 256, 512
MXFP4 = CheckpointQuant("e2m1", "e8m0", 1, 32)


def silu(first: Tensor, up: Tensor) -> Tensor:
    return first * torch.sigmoid(first) * up


def clamped(first: Tensor, up: Tensor) -> Tensor:
    """In the order of GGML."""
    first, up = first.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * first * torch.sigmoid(1.702 * first)


def halves(features: Tensor) -> Sequence[Tensor]:
    return features.chunk(2, 1)


def alternating(features: Tensor) -> Sequence[Tensor]:
    return features[:, 0::2], features[:, 1::2]


SILU = (gate_named("silu"), silu, halves)
CLAMPED = (gate_named("clamped in halves", 7.0, 1.702), clamped, halves)
GPT_OSS = (gate_named("clamped", 7.0, 1.702), clamped, alternating)
MIXTURES: list[tuple[Encoding, Encoding, Any]] = [
    *((gguf_encoding(up), gguf_encoding(down), SILU) for up, down in (
        ("q4_k", "q6_k"), ("q4_k", "q4_k"), ("q2_k", "q3_k"), ("iq2_xxs", "iq3_s"), ("iq1_m", "iq2_xs"))),
    (gguf_encoding("mxfp4"), gguf_encoding("mxfp4"), CLAMPED), (MXFP4, MXFP4, GPT_OSS),
]  # fmt: skip


@needs_native
@by_set
@pytest.mark.parametrize(("up", "down", "gate"), MIXTURES, ids=lambda each: getattr(each, "name", ""))
@pytest.mark.parametrize("count", [1, 5, 100])
def test_an_expert_of_published_weights(
    up: Encoding, down: Encoding, gate: tuple[Any, Callable[..., Tensor], Callable[[Tensor], Any]], count: int
) -> None:
    parts = (Part("gate_up", (2 * INNER, HIDDEN)), Part("down", (HIDDEN, INNER)))
    encodings = {"gate_up": up, "down": down}
    form = ExpertFormat(MoeLayer("experts", 4, 2, parts), 4, torch.bfloat16, encodings)
    views = form.slot.views(torch.zeros(form.slot.nbytes, dtype=torch.uint8))
    for seed, part in enumerate(parts):
        for name, values in random_slot(encodings[part.name], *part.out_in, seed).items():
            views[part.name][name].copy_(values)
    kernel, x = expert_kernel(form, gate[0], "cpu"), random(count, HIDDEN, 9)
    assert isinstance(kernel, FusedExperts)
    features = as_integers(x).float() @ weights(up, dict(views["gate_up"]), 2 * INNER, HIDDEN).t()
    inner = gate[1](*gate[2](features)).bfloat16()
    want = as_integers(inner).float() @ weights(down, dict(views["down"]), HIDDEN, INNER).t()
    got = kernel(x, views).float()
    assert (got - want).norm() <= 0.01 * want.norm()
    assert torch.equal(kernel.forward_one(x[:1], [views, views])[1].float(), got[0])
    assert (kernel.separate(x, views).float() - want).norm() <= 0.01 * want.norm()


@A_PUBLISHED
def test_published_weights_without_a_kernel_are_exact(encoding: CheckpointQuant | Transposed4) -> None:
    slot, x = random_slot(encoding, 70, 192, 3), random(3, 192, 1).float()
    exact = published_weights(encoding, slot, 192)
    assert torch.equal(encoding.decode(slot, 70, 192, torch.float32), exact)
    assert torch.allclose(linear_for(encoding.name, "cpu", torch.float32)(x, slot, 70, 192), x @ exact.t(), atol=1e-5)
    assert encoding_named(encoding.name) == encoding


@pytest.mark.parametrize(
    "name",
    [
        "published/e3m2/f32/1x32", "published/e4m3/f64/1x32", "published/s4/bf16/0x32",
        "published/e2m1/e4m3-over/1x16", "published/s4/bf16/1x32/2", "transposed4/gguf/f16/32/1",
    ],
)  # fmt: skip
def test_names_of_nothing(name: str) -> None:
    with pytest.raises(StoreError, match="no kernel takes weights in"):
        encoding_named(name)


@needs_native
def test_what_the_kernels_do_not_take() -> None:
    """Other tokens, dtypes and widths; scales whose groups end within 32 columns."""
    for encoding in (*OWN, *PUBLISHED, gguf_encoding("q6_k")):
        assert matrix_form(encoding, 64, 512, torch.float32) is None
        form, slot = form_of(encoding, 64, 512), random_slot(encoding, 64, 512)
        with pytest.raises(ValueError, match="float32"):
            linear(torch.zeros(1, 512), form, slot)
        with pytest.raises(ValueError, match="512"):
            linear(torch.zeros(1, 64).bfloat16(), form, slot)
    x, slot = random(3, 256, 1), random_slot(gguf_encoding("q6_k"), 70, 256)
    by_linear = linear_for("gguf/q6_k", "cpu", torch.bfloat16)(x, slot, 70, 256)
    assert torch.equal(by_linear, linear(x, form_of(gguf_encoding("q6_k"), 70, 256), slot))
    own = [
        (Int4(64), 96), (Int2(64), 96), (Int6(64), 96), (Int8(), 96), (Plain(), 48),
        (NonUniform(4, 32), 48), (NonUniform(3, 64), 96), (NonUniform(2, 64), 96),
        (Int8(), 1 << 16), (CheckpointQuant("s4", "bf16", 1, 16), 64),
    ]  # fmt: skip
    assert all(matrix_form(encoding, 64, in_, torch.bfloat16) is None for encoding, in_ in own)
