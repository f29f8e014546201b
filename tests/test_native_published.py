"""The native products on published codes and scales against what these stand for, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from native_products import assert_alone_as_among_others, columns_of, form_of, random
from tiermoe import native
from tiermoe.errors import StoreError
from tiermoe.formats.checkpoint_quant import CheckpointQuant, Transposed4
from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.formats.registry import encoding_named
from tiermoe.kernels.experts import FusedExperts, expert_kernel
from tiermoe.kernels.gates import gate_named
from tiermoe.kernels.linear import linear, linear_for
from tiermoe.kernels.matrix import matrix_form
from tiermoe.types import MoeLayer, Part
from whole_columns import ROUNDING, allowed

ENCODINGS: list[CheckpointQuant | Transposed4] = [
    Transposed4("gptq", "f16", 32, 2),
    Transposed4("awq", "bf16", 64),
    CheckpointQuant("e2m1", "e8m0", 1, 32),
    CheckpointQuant("e2m1", "e4m3-over", 1, 16, 2),
    CheckpointQuant("e2m1", "e4m3-times", 1, 16, 1),
    CheckpointQuant("s4", "bf16", 1, 32),
    CheckpointQuant("s4", "f16", 1, 128),
    CheckpointQuant("e4m3", "f32", 128, 128),
    CheckpointQuant("e4m3", "bf16", 32, 32),
    CheckpointQuant("e4m3", "f32", 1, 1 << 15),
    CheckpointQuant("e4m3", "e8m0", 1 << 15, 1 << 15),
]


def random_slot(encoding: CheckpointQuant | Transposed4, out: int, in_: int, seed: int = 0) -> dict[str, Tensor]:
    """The slot's fields of a matrix (out, in_): all codes that are defined occur, weights are around 0.1 large."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(encoding, Transposed4):
        codes, scales, zeros = encoding.slot_fields(out, in_, torch.bfloat16)
        return {
            "codes": torch.randint(0, 256, codes.shape, dtype=torch.uint8, generator=generator),
            "scales": (torch.rand(scales.shape, generator=generator) * 0.02 + 0.001).to(scales.dtype),
            "zeros": torch.randint(0, 17, zeros.shape, dtype=torch.uint8, generator=generator),
        }
    codes, scales, *factors = encoding.stored_fields(out, in_, torch.bfloat16)
    found = torch.randint(0, 256, codes.shape, dtype=torch.uint8, generator=generator)
    if encoding.codes == "e4m3":
        found[(found & 0x7F) == 0x7F] = 0
    if encoding.scale == "e8m0":
        return {"codes": found, "scales": torch.randint(110, 125, scales.shape, dtype=torch.uint8, generator=generator)}
    if factors:
        bytes_ = torch.randint(1, 0x7F, scales.shape, dtype=torch.uint8, generator=generator)
        factor = torch.rand(factors[0].shape, generator=generator) * 1e-3 + 1e-4
        factor = factor if encoding.scale == "e4m3-times" else factor.reciprocal()
        return {"codes": found, "scales": bytes_, "factors": factor}
    size = torch.rand(scales.shape, generator=generator) * 0.02 + 0.001
    return {"codes": found, "scales": size.to(scales.dtype)}


def weights(encoding: CheckpointQuant | Transposed4, slot: dict[str, Tensor], in_: int) -> Tensor:
    """What a slot stands for, float32 (out, in_): MXFP4 by transformers, the others by their definition."""
    codes, scales = slot["codes"], slot["scales"]
    out = codes.shape[0]
    if isinstance(encoding, Transposed4):
        values = torch.stack([(codes >> shift & 15).float() for shift in (0, 4)], dim=-1).flatten(1)
        zeros, wide = (slot[name].float().repeat_interleave(encoding.group, 1) for name in ("zeros", "scales"))
        return (values - zeros) * wide
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
    if encoding.codes == "s4":
        values = torch.stack([(codes >> shift & 15).float() - 8 for shift in (0, 4)], dim=-1).flatten(1)
    else:
        values = codes.view(torch.float8_e4m3fn).float()
    if encoding.scale == "e8m0":
        scales = scales.view(torch.float8_e8m0fnu)
    wide = scales.float().repeat_interleave(min(encoding.rows, out), 0)[:out]
    return values * wide.repeat_interleave(min(encoding.columns, in_), 1)[:, :in_]


native_ones = [
    pytest.mark.skipif(not native.available(), reason="needs the native kernels"),
    pytest.mark.usefixtures("instruction_set"),
]


each = pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: encoding.name)


class TestNative:
    pytestmark = native_ones

    @each
    @settings(max_examples=12, deadline=None)
    @given(
        out=st.one_of(st.integers(1, 200), st.sampled_from([64, 128])),
        groups=st.integers(1, 20),
        count=st.one_of(st.integers(1, 14), st.sampled_from([40, 100])),
        seed=st.integers(0, 100),
    )
    def test_a_product_is_the_weights_rounded_once(
        self, encoding: CheckpointQuant | Transposed4, out: int, groups: int, count: int, seed: int
    ) -> None:
        in_, out = (64 if isinstance(encoding, Transposed4) else 32) * groups, out * max(1, encoding.matrices)
        slot, x = random_slot(encoding, out, in_, seed), random(count, in_, seed + 1)
        form, weight = form_of(encoding, out, in_), weights(encoding, slot, in_).double()
        want = x.double() @ weight.t()
        assert (linear(x, form, slot).double() - want).abs().le(allowed(x, weight, want)).all()

    @each
    def test_a_tokens_product_depends_on_no_other_token_and_no_thread(
        self, encoding: CheckpointQuant | Transposed4
    ) -> None:
        form, slot = form_of(encoding, 192, 512), random_slot(encoding, 192, 512)
        assert_alone_as_among_others(form, slot, 53, (*range(1, 12), 19, 26, 49, 53))

    @each
    def test_every_code_in_every_place(self, encoding: CheckpointQuant | Transposed4) -> None:
        """Each token takes one column: what a weight is, alone and beside others."""
        slot = random_slot(encoding, 64, 192, 5)
        want = weights(encoding, slot, 192).t()
        for got in columns_of(form_of(encoding, 64, 192), slot):
            assert (got.float() - want).abs().le(want.abs() * ROUNDING).all()

    @pytest.mark.parametrize("count", [1, 5, 100])
    def test_an_expert_of_gpt_oss(self, count: int) -> None:
        hidden, inner, encoding = 192, 320, CheckpointQuant("e2m1", "e8m0", 1, 32)
        parts = (Part("gate_up", (2 * inner, hidden)), Part("down", (hidden, inner)))
        form = ExpertFormat(
            MoeLayer("experts", 4, 2, parts), 16, torch.bfloat16, {"gate_up": encoding, "down": encoding}
        )
        views = form.slot.views(torch.zeros(form.slot.nbytes, dtype=torch.uint8))
        for seed, part in enumerate(parts):
            for name, values in random_slot(encoding, *part.out_in, seed).items():
                views[part.name][name].copy_(values)
        kernel, x = expert_kernel(form, gate_named("clamped", 7.0, 1.702), "cpu"), random(count, hidden, 9)
        assert isinstance(kernel, FusedExperts)
        features = x.float() @ weights(encoding, views["gate_up"], hidden).t()
        gate, up = features[:, 0::2].clamp(max=7.0), features[:, 1::2].clamp(-7.0, 7.0)
        want = (up + 1) * gate * torch.sigmoid(1.702 * gate) @ weights(encoding, views["down"], inner).t()
        got = kernel(x, views).float()
        assert (got - want).norm() <= 0.01 * want.norm()
        assert torch.equal(kernel.forward_one(x[:1], [views, views])[1].float(), got[0])
        assert (kernel.separate(x, views).float() - want).norm() <= 0.01 * want.norm()


@each
def test_decoding_is_exact(encoding: CheckpointQuant | Transposed4) -> None:
    slot = random_slot(encoding, 70, 192, 3)
    assert torch.equal(encoding.decode(slot, 70, 192, torch.float32), weights(encoding, slot, 192))


@each
def test_a_kernel_in_another_dtype_rounds_no_weight(encoding: CheckpointQuant | Transposed4) -> None:
    slot, x = random_slot(encoding, 70, 192, 3), random(3, 192, 1).float()
    got = linear_for(encoding.name, "cpu", torch.float32)(x, slot, 70, 192)
    assert torch.allclose(got, x @ weights(encoding, slot, 192).t(), atol=1e-5)
    assert matrix_form(encoding, 70, 192, torch.float32) is None


@each
def test_names(encoding: CheckpointQuant | Transposed4) -> None:
    assert encoding_named(encoding.name) == encoding


@pytest.mark.parametrize(
    "name",
    [
        "published/e3m2/f32/1x32",
        "published/e4m3/f64/1x32",
        "published/s4/bf16/0x32",
        "published/e2m1/e4m3-over/1x16",
        "published/s4/bf16/1x32/2",
        "transposed4/gguf/f16/32/1",
    ],
)
def test_names_of_nothing(name: str) -> None:
    with pytest.raises(StoreError, match="no kernel takes weights in"):
        encoding_named(name)


def test_scales_that_the_kernels_do_not_take() -> None:
    """Groups that end within 32 columns are computed otherwise."""
    assert matrix_form(CheckpointQuant("s4", "bf16", 1, 16), 64, 64, torch.bfloat16) is None
