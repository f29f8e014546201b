"""Native experts of every gate and coding against transformers' experts and against separate steps."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Config, DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

from tiermoe import native
from tiermoe.formats.encoding import Encoding
from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.formats.int4 import CPU_LAYOUT, Int4
from tiermoe.formats.int8 import Int8
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.kernels.experts import (
    FusedDecode,
    FusedExperts,
    GatedExperts,
    SlotViews,
    UnfusedExperts,
    expert_kernel,
    gated_experts,
    weighted_sum,
)
from tiermoe.kernels.gates import gate_named
from tiermoe.kernels.moe_block import MoeBlock
from tiermoe.kernels.router import Router, Scoring, route
from tiermoe.types import MoeLayer, Part

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="needs the native kernels"),
    pytest.mark.usefixtures("instruction_set"),
]

HIDDEN, INNER, EXPERTS, K = 192, 128, 5, 3
ENCODINGS: dict[int, Encoding | None] = {4: Int4(CPU_LAYOUT, 64), 8: Int8(), 16: None}
GATES = {
    "silu": gate_named("silu"),
    "clamped": gate_named("clamped", 7.0, 1.702),
    "clamped halves": gate_named("clamped in halves", 7.0, 1.702),
    "gelu": gate_named("gelu_tanh"),
    "relu squared": gate_named("relu2"),
    "limited": gate_named("limited silu", 7.0),
}


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def expert_format(bits: int, gate: str) -> ExpertFormat:
    biased = gate != "silu"
    rows = INNER if gate == "relu squared" else 2 * INNER
    parts = [Part("gate_up", (rows, HIDDEN)), Part("down", (HIDDEN, INNER))]
    parts += [Part("gate_up_bias", (rows,)), Part("down_bias", (HIDDEN,))] if biased else []
    encoding = ENCODINGS[bits]
    encodings = {} if encoding is None else {"gate_up": encoding, "down": encoding}
    return ExpertFormat(MoeLayer("experts", EXPERTS, K, tuple(parts)), bits, torch.bfloat16, encodings)


def slot(form: ExpertFormat, seed: int) -> SlotViews:
    """Random weights that reach the gate's limit, packed."""
    tensors = {part.name: random(*part.shape, seed=seed + at) * 0.3 for at, part in enumerate(form.layer.parts)}
    buffer = torch.zeros(form.stored.nbytes, dtype=torch.uint8)
    form.encode(tensors, QUANTIZERS["linear"], buffer)
    return SlotViews(form.slot.views(buffer))


def kernel_of(form: ExpertFormat, gate: str) -> GatedExperts:
    found = gated_experts(form, GATES[gate])
    assert found is not None
    return found


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("bits", ENCODINGS)
@pytest.mark.parametrize("count", [1, 2, 6, 9, 70])
def test_an_expert_in_one_call_is_its_separate_steps(count: int, bits: int, gate: str) -> None:
    form = expert_format(bits, gate)
    kernel, views, x = kernel_of(form, gate), slot(form, 0), random(count, HIDDEN, seed=9)
    got = kernel(x, [kernel.pack(views)], among_others=False)[0].float()
    want = UnfusedExperts(form, GATES[gate], "cpu")(x, views).float()
    # the inner values may differ in their last bit, where two ways to compute e^x do
    assert (got - want).norm() <= 2.0**-8 * want.norm()
    assert (got == want).float().mean() > 0.8


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("bits", ENCODINGS)
def test_a_tokens_result_depends_on_no_other_token_expert_or_thread(bits: int, gate: str) -> None:
    form, before = expert_format(bits, gate), torch.get_num_threads()
    kernel, x = kernel_of(form, gate), random(9, HIDDEN, seed=9)
    experts = [slot(form, 10 * seed) for seed in range(3)]
    packed = [kernel.pack(views) for views in experts]
    alone = [torch.cat([kernel(x[at : at + 1], [each], False)[0] for at in range(9)]) for each in packed]
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(kernel(x, packed, False), torch.stack(alone))
            want = torch.cat([alone[0][:2], alone[1][2:8], alone[2][8:]])
            assert torch.equal(kernel.forward_ragged(x, [2, 6, 1], packed, among_others=False), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bits", [4, 8])
def test_gpt_oss_experts_are_transformers_on_the_decoded_weights(bits: int) -> None:
    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=1)
    config._experts_implementation = "eager"
    theirs = GptOssExperts(config).requires_grad_(False)
    form = expert_format(bits, "clamped")
    views = slot(form, 3)
    encoding = ENCODINGS[bits]
    assert encoding is not None
    for name, parameter in (("gate_up", theirs.gate_up_proj), ("down", theirs.down_proj)):
        out, in_ = parameter.shape[2], parameter.shape[1]
        parameter.copy_(encoding.decode(views[name], out, in_, torch.float32).t())
    theirs.gate_up_proj_bias.copy_(views["gate_up_bias"]["weight"])
    theirs.down_proj_bias.copy_(views["down_bias"]["weight"])
    kernel = expert_kernel(form, gate_named("clamped", theirs.limit, theirs.alpha), "cpu")
    assert isinstance(kernel, FusedExperts)
    x = random(8, HIDDEN, seed=9)
    want = theirs(x.float(), torch.zeros(8, 1, dtype=torch.int64), torch.ones(8, 1))
    assert (kernel(x, views).float() - want).norm() <= 0.01 * want.norm()


def test_the_clamped_gate_is_transformers_bit_for_bit() -> None:
    theirs = GptOssExperts(GptOssConfig(hidden_size=64, intermediate_size=64, num_local_experts=1))
    features = random(9, 128, seed=1) * 6
    for dtype in (torch.bfloat16, torch.float32):
        got = gate_named("clamped", theirs.limit, theirs.alpha)(features.to(dtype))
        assert torch.equal(got, theirs._apply_gate(features.to(dtype)))


def test_the_limited_gate_is_transformers_bit_for_bit() -> None:
    theirs = DeepseekV4Experts(DeepseekV4Config(hidden_size=64, moe_intermediate_size=64, n_routed_experts=1))
    features = random(9, 128, seed=1) * 9
    for dtype in (torch.bfloat16, torch.float32):
        got = gate_named("limited silu", theirs.limit)(features.to(dtype))
        assert torch.equal(got, theirs._apply_gate(features.to(dtype)))


def test_at_16_bits_only_a_token_alone_is_native() -> None:
    form = expert_format(16, "silu")
    kernel, separate = expert_kernel(form, gate_named("silu"), "cpu"), UnfusedExperts(form, gate_named("silu"), "cpu")
    views, x = [slot(form, 10 * seed) for seed in range(3)], random(5, HIDDEN, seed=9)
    for count in (1, 5):
        assert torch.equal(kernel(x[:count], views[0]), separate(x[:count], views[0]))
    assert isinstance(kernel, FusedDecode)
    got, want = kernel.forward_one(x[:1], views), separate.forward_one(x[:1], views).float()
    assert torch.equal(got, kernel.native(x[:1], [kernel.native.pack(each) for each in views], False)[:, 0])
    assert (got.float() - want).norm() <= 2.0**-8 * want.norm()


@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize(
    ("bits", "gate", "scoring"),
    [(4, "clamped", Scoring.CHOSEN), (8, "silu", Scoring.SIGMOID), (8, "clamped", Scoring.CHOSEN)],
)
def test_a_block_in_one_call_is_its_separate_calls(bits: int, gate: str, scoring: Scoring, with_residual: bool) -> None:
    form = expert_format(bits, gate)
    kernel = expert_kernel(form, GATES[gate], "cpu")
    assert isinstance(kernel, FusedExperts)
    experts = [slot(form, 10 * seed) for seed in range(EXPERTS)]
    bias = random(EXPERTS, seed=4) if scoring == Scoring.CHOSEN else None
    correction = None if bias is not None else random(EXPERTS, seed=4).float()
    router = Router(random(EXPERTS, HIDDEN, seed=7) * 0.1, K, scoring, bias=bias, correction=correction, scale=1.5)
    block = MoeBlock(kernel.native, EXPERTS)
    for tokens in (1, 4):
        x, residual = random(tokens, 1, HIDDEN, seed=8), random(tokens, 1, HIDDEN, seed=9)
        got, in_parts = torch.empty_like(x), torch.empty_like(x)
        weights, chosen = route(router, x)
        rows = []
        for at in range(tokens):
            order = chosen[at].argsort().tolist()
            outputs = list(kernel.forward_one(x[at], [experts[chosen[at, place]] for place in order]))
            rows.append(weighted_sum(outputs, weights[at], order))
        want = torch.stack(rows)
        if tokens == 1:
            assert not block(router, x, residual, got)
            for expert, views in enumerate(experts):
                block.place(expert, kernel.packed(views))
        added = residual if with_residual else None
        assert block(router, x, added, got) == len(set(chosen.flatten().tolist()))
        assert torch.equal(got, residual + want if with_residual else want)
        routed = block.route(router, x)
        assert routed == chosen.sort(1).values.tolist()
        last, *others = dict.fromkeys(chosen.flatten().tolist())
        block.compute(others)
        block.compute([*set(range(EXPERTS)) - {last, *others}, last])  # those that nobody chose compute nothing
        block.total(added, in_parts)
        assert torch.equal(in_parts, got)
