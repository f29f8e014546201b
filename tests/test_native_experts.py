"""Native experts of every gate and coding against transformers' experts and against separate steps."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Config, DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

from tiermoe import native
from tiermoe.engine.expert_sums import Choices, FewSums, NativeSums, TorchSums
from tiermoe.formats.encoding import Encoding
from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.formats.int4 import Int4
from tiermoe.formats.int8 import Int8
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.kernels.experts import (
    FusedExperts,
    GatedExperts,
    SlotViews,
    UnfusedExperts,
    combine_many,
    expert_kernel,
    gated_experts,
    weighted_sum,
)
from tiermoe.kernels.gates import gate_named
from tiermoe.kernels.linear import address
from tiermoe.kernels.norm import norm
from tiermoe.kernels.router import Router, Scoring, route
from tiermoe.native import _native
from tiermoe.types import MoeLayer, Part

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="needs the native kernels"),
    pytest.mark.usefixtures("instruction_set"),
]

HIDDEN, INNER, EXPERTS, K = 192, 128, 5, 3
ENCODINGS: dict[int, Encoding | None] = {4: Int4(64), 8: Int8(), 16: None}
GATES = {
    "silu": gate_named("silu"),
    "clamped": gate_named("clamped", 7.0, 1.702),
    "clamped halves": gate_named("clamped in halves", 7.0, 1.702),
    "gelu": gate_named("gelu_tanh"),
    "relu squared": gate_named("relu2"),
    "limited": gate_named("limited silu", 7.0),
}


class Block:
    """`_native.MoeBlock` of a kernel's experts, over tensors: x, residual and out (T, H)."""

    def __init__(self, kernel: FusedExperts, experts: int, forms: bytes = b"") -> None:
        self._native = _native.MoeBlock(forms or kernel.native.absent(), experts)
        self.place, self.compute = self._native.place, self._native.compute

    def __call__(self, router: Router, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> int:
        """How many experts computed; 0 where one that the router chooses is absent."""
        return self._native.run(self._begin(router, x), address(residual), out.data_ptr())

    def route(self, router: Router, x: torch.Tensor) -> list[list[int]]:
        return self._native.route(self._begin(router, x))

    def total(self, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        self._native.total(address(residual), out.data_ptr())

    def _begin(self, router: Router, x: torch.Tensor) -> int:
        needed = self._native.begin(router.pack(), x.data_ptr(), x.shape[0], torch.get_num_threads())
        self._workspace = torch.empty(needed, dtype=torch.uint8)
        return self._workspace.data_ptr()


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


def test_large_and_small_gates() -> None:
    form = expert_format(4, "silu")
    kernel, separate, views = kernel_of(form, "silu"), UnfusedExperts(form, GATES["silu"], "cpu"), slot(form, 0)
    for scale in (1e-3, 1e3, 1e17):
        x = random(3, HIDDEN, seed=9) * scale
        got = kernel(x, [kernel.pack(views)], among_others=False)[0]
        assert torch.allclose(got, separate(x, views), rtol=0.05, atol=0.05 * scale * scale)
        assert got.isfinite().all()


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
    assert (kernel(x, views).float() - want).norm() <= 0.02 * want.norm()  # activations have 8 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gates_are_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    clamped = GptOssExperts(GptOssConfig(hidden_size=64, intermediate_size=64, num_local_experts=1))
    limited = DeepseekV4Experts(DeepseekV4Config(hidden_size=64, moe_intermediate_size=64, n_routed_experts=1))
    features = (random(9, 128, seed=1) * 9).to(dtype)
    got = gate_named("clamped", clamped.limit, clamped.alpha)(features)
    assert torch.equal(got, clamped._apply_gate(features))
    assert torch.equal(gate_named("limited silu", limited.limit)(features), limited._apply_gate(features))


def test_at_16_bits_a_token_among_others_has_the_bits_that_it_has_alone() -> None:
    form = expert_format(16, "silu")
    kernel, separate = expert_kernel(form, gate_named("silu"), "cpu"), UnfusedExperts(form, gate_named("silu"), "cpu")
    views, x = [slot(form, 10 * seed) for seed in range(3)], random(70, HIDDEN, seed=9)
    assert isinstance(kernel, FusedExperts)
    got, want = kernel(x, views[0]), separate(x, views[0]).float()
    assert torch.equal(got, torch.cat([kernel.forward_one(token[None], views)[:1] for token in x]))
    assert (got.float() - want).norm() <= 2.0**-8 * want.norm()


@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize(
    ("bits", "gate", "scoring", "dtype"),
    [
        (4, "clamped", Scoring.CHOSEN, torch.float32), (8, "silu", Scoring.SIGMOID, torch.float32),
        (8, "clamped", Scoring.CHOSEN, torch.float32), (4, "silu", Scoring.SOFTMAX, torch.bfloat16),
    ],
)  # fmt: skip
def test_a_block_in_one_call_is_its_separate_calls(
    bits: int, gate: str, scoring: Scoring, dtype: torch.dtype, with_residual: bool
) -> None:
    """Of one token and of several; it waits for all its experts."""
    form = expert_format(bits, gate)
    kernel = expert_kernel(form, GATES[gate], "cpu")
    assert isinstance(kernel, FusedExperts)
    experts = [slot(form, 10 * seed) for seed in range(EXPERTS)]
    bias = random(EXPERTS, seed=4) if scoring == Scoring.CHOSEN else None
    correction = random(EXPERTS, seed=4).float() if scoring == Scoring.SIGMOID else None
    router = Router(
        random(EXPERTS, HIDDEN, seed=7) * 0.1, K, scoring, bias=bias, correction=correction, scale=1.5,
        normalise=scoring == Scoring.SOFTMAX, dtype=dtype,
    )  # fmt: skip
    block = Block(kernel, EXPERTS)
    for tokens in (1, 4, 12):
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


def test_a_block_of_several_precisions_is_its_separate_calls() -> None:
    """Experts in 16, 8 and 4 bits by turns, for one token and for several."""
    forms = {bits: expert_format(bits, "silu") for bits in ENCODINGS}
    kernels = {bits: expert_kernel(form, GATES["silu"], "cpu") for bits, form in forms.items()}
    fused = [kernel for kernel in kernels.values() if isinstance(kernel, FusedExperts)]
    assert len(fused) == len(ENCODINGS)
    block = Block(fused[0], EXPERTS, b"".join(kernel.native.absent() for kernel in fused))
    experts = [(list(ENCODINGS)[at % len(ENCODINGS)], slot(forms[list(ENCODINGS)[at % len(ENCODINGS)]], 10 * at))
               for at in range(EXPERTS)]  # fmt: skip
    for at, (bits, views) in enumerate(experts):
        block.place(at, fused[list(ENCODINGS).index(bits)].packed(views))
    router = Router(random(EXPERTS, HIDDEN, seed=7) * 0.1, K)
    for tokens in (1, 4, 12):
        x = random(tokens, 1, HIDDEN, seed=8)
        got, weights, chosen = torch.empty_like(x), *route(router, x)
        want = []
        for at in range(tokens):
            order = chosen[at].argsort().tolist()
            named = [experts[chosen[at, place]] for place in order]
            outputs = [kernels[bits].forward_one(x[at], [views])[0] for bits, views in named]
            want.append(weighted_sum(outputs, weights[at], order))
        assert block(router, x, None, got) == len(set(chosen.flatten().tolist()))
        assert torch.equal(got, torch.stack(want))


def rows(count: int, width: int = 96, seed: int = 1) -> torch.Tensor:
    return random(count, width, seed=seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_weighted_sum_is_torchs_bit_for_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, weights = list(rows(5)), torch.rand(7).to(dtype)
    got = weighted_sum(outputs, weights, [6, 0, 3, 2, 1])
    monkeypatch.setattr("tiermoe.kernels.experts.combines", lambda _: False)
    assert torch.equal(got, weighted_sum(outputs, weights, [6, 0, 3, 2, 1]))


@pytest.mark.parametrize("count", [1, 70, 200])
def test_sums_of_many_tokens_are_each_token_s_sum(count: int) -> None:
    """Some choices have no output: they add nothing."""
    outputs, weights = rows(4 * count), torch.rand(count, 4)
    there = torch.rand(count, 4) < 0.7
    there[0] = False
    addresses = torch.where(there, outputs.data_ptr() + 192 * torch.arange(4 * count).view(count, 4), 0)
    got = combine_many(addresses, weights, outputs)
    for token in range(count):
        chosen = there[token].nonzero()[:, 0].tolist()
        want = torch.zeros(1, 96).bfloat16()
        if chosen:
            want = weighted_sum(list(outputs[4 * token : 4 * token + 4][chosen]), weights[token], chosen)
        assert torch.equal(got[token], want[0])


def test_counts_that_do_not_fit_the_rows_are_refused() -> None:
    form = expert_format(4, "silu")
    kernel = expert_kernel(form, GATES["silu"], "cpu")
    views, x = [slot(form, seed) for seed in range(2)], random(3, HIDDEN, seed=9)
    for counts in ([1, 1], [3], [2, 2]):
        with pytest.raises(ValueError, match="counts"):
            kernel.forward_ragged(x, counts, views)


@pytest.mark.parametrize("tokens_of_first", [0, 3, 9])
def test_sums_in_lists_native_and_torchs_agree_bit_for_bit(tokens_of_first: int) -> None:
    """Choices that name no expert, an expert that is named twice, and one whose outputs never come."""
    generator = torch.Generator().manual_seed(5)
    index = torch.stack([torch.randperm(7, generator=generator)[:3] for _ in range(9)])  # 6 names none of the experts
    weights, hidden = torch.rand(9, 3, generator=generator), rows(9)
    index[:tokens_of_first][index[:tokens_of_first] == 6] = 5
    choices = Choices(index, weights)
    few = FewSums(hidden, index.tolist(), weights, native=True)
    sums = [few, NativeSums(choices, hidden), TorchSums(choices, hidden)]
    assert few.counts([99]) == choices.counts([99]) == [0]
    for some in ([5, 0], [3], [1, 4]):  # in any order, several at a time
        for each in sums:
            parts = torch.split(each.rows(some), each.counts(some))
            each.keep(some, torch.cat([part * (expert + 0.5) for expert, part in zip(some, parts, strict=True)]))
    totals = [each.total() for each in sums]
    assert torch.equal(totals[0], totals[2])
    assert torch.equal(totals[1], totals[2])
    assert totals[2].any()


def test_norms_take_rows_one_by_one() -> None:
    x, weight = rows(6), rows(1, seed=5)[0]
    for some in (x, x.repeat(300, 1)):  # in one task, and in several
        assert torch.equal(norm(some, weight, 1e-6), torch.stack([norm(row, weight, 1e-6) for row in some]))
