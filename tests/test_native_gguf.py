"""The native products on the blocks of GGUF files against what the gguf package dequantises, in float64."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gguf_blocks
from native_products import assert_alone_as_among_others, columns_of, form_of, random
from tiermoe import native
from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.formats.gguf_types import ENCODINGS, gguf_encoding
from tiermoe.kernels.experts import FusedExperts, expert_kernel
from tiermoe.kernels.gates import gate_named
from tiermoe.kernels.linear import linear, linear_for
from tiermoe.kernels.matrix import matrix_form
from tiermoe.types import MoeLayer, Part
from whole_columns import ROUNDING, allowed

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="needs the native kernels"),
    pytest.mark.usefixtures("instruction_set"),
]

NAMES = [each.type for each in ENCODINGS]


@pytest.mark.parametrize("type", NAMES)
@settings(max_examples=12, deadline=None)
@given(
    out=st.one_of(st.integers(1, 200), st.sampled_from([64, 128])),
    blocks=st.integers(1, 20),
    count=st.one_of(st.integers(1, 14), st.sampled_from([40, 100])),
    seed=st.integers(0, 100),
)
def test_a_product_is_the_dequantised_weights_rounded_once(
    type: str, out: int, blocks: int, count: int, seed: int
) -> None:
    encoding = gguf_encoding(type)
    in_ = blocks * encoding.columns if encoding.columns == 32 else (blocks % 3 + 1) * encoding.columns
    slot, x = gguf_blocks.random_blocks(type, out, in_, seed), random(count, in_, seed + 1)
    form, weight = form_of(encoding, out, in_), gguf_blocks.weights(type, slot).double()
    want = x.double() @ weight.t()
    assert (linear(x, form, slot).double() - want).abs().le(allowed(x, weight, want)).all()


@pytest.mark.parametrize("type", NAMES)
def test_a_tokens_product_depends_on_no_other_token_and_no_thread(type: str) -> None:
    form, slot = form_of(gguf_encoding(type), 192, 512), gguf_blocks.random_blocks(type, 192, 512)
    assert_alone_as_among_others(form, slot, 53, (*range(1, 12), 19, 26, 49, 53))


@pytest.mark.parametrize("type", NAMES)
def test_every_code_in_every_place(type: str) -> None:
    """Each token takes one column: what a weight is, alone and beside others. A grid of IQ1, IQ2 or IQ3 has at most
    2048 places of eight columns, which occur sixteen times each here."""
    encoding = gguf_encoding(type)
    out, in_ = (1024, 256) if re.match("iq[123]", type) else (64, max(encoding.columns, 64))
    slot = gguf_blocks.random_blocks(type, out, in_, 5)
    want = gguf_blocks.weights(type, slot).t()
    for got in columns_of(form_of(encoding, out, in_), slot):
        assert (got.float() - want).abs().le(want.abs() * ROUNDING + 1e-7).all()


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


def test_the_kernel_of_a_linear_layer_is_native() -> None:
    slot, x = gguf_blocks.random_blocks("q6_k", 70, 256), random(3, 256, 1)
    form = matrix_form(gguf_encoding("q6_k"), 70, 256, torch.bfloat16)
    assert form is not None
    assert torch.equal(linear_for("gguf/q6_k", "cpu", torch.bfloat16)(x, slot, 70, 256), linear(x, form, slot))
    assert matrix_form(gguf_encoding("q6_k"), 70, 256, torch.float32) is None


HIDDEN, INNER = 256, 512
GATES = {"silu": gate_named("silu"), "clamped": gate_named("clamped in halves", 7.0, 1.702)}


def gated(gate: str, features: torch.Tensor) -> torch.Tensor:
    """What GGML computes of gate and up, in its order."""
    first, up = features[:, :INNER], features[:, INNER:]
    if gate == "silu":
        return first * torch.sigmoid(first) * up
    first, up = first.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * first * torch.sigmoid(1.702 * first)


@pytest.mark.parametrize(
    ("up", "down", "gate"),
    [
        ("q4_k", "q6_k", "silu"),
        ("q4_k", "q4_k", "silu"),
        ("mxfp4", "mxfp4", "clamped"),
        ("q2_k", "q3_k", "silu"),
        ("iq2_xxs", "iq3_s", "silu"),
        ("iq1_m", "iq2_xs", "silu"),
    ],
)
@pytest.mark.parametrize("count", [1, 5, 100])
def test_an_expert_of_a_mixture_of_types(up: str, down: str, gate: str, count: int) -> None:
    parts = (Part("gate_up", (2 * INNER, HIDDEN)), Part("down", (HIDDEN, INNER)))
    encodings = {"gate_up": gguf_encoding(up), "down": gguf_encoding(down)}
    form = ExpertFormat(MoeLayer("experts", 4, 2, parts), 4, torch.bfloat16, encodings)
    views = form.slot.views(torch.zeros(form.slot.nbytes, dtype=torch.uint8))
    for seed, (name, type) in enumerate((("gate_up", up), ("down", down))):
        out, in_ = next(part.out_in for part in parts if part.name == name)
        views[name]["blocks"].copy_(gguf_blocks.random_blocks(type, out, in_, seed)["blocks"])
    kernel, x = expert_kernel(form, GATES[gate], "cpu"), random(count, HIDDEN, 9)
    assert isinstance(kernel, FusedExperts)
    features = x.float() @ gguf_blocks.weights(up, views["gate_up"]).t()
    want = gated(gate, features) @ gguf_blocks.weights(down, views["down"]).t()
    got = kernel(x, views).float()
    assert (got - want).norm() <= 0.01 * want.norm()
    assert torch.equal(kernel.forward_one(x[:1], [views, views])[1].float(), got[0])
    assert (kernel.separate(x, views).float() - want).norm() <= 0.01 * want.norm()
