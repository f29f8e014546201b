"""The native router against transformers' own router modules, on random tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Config, DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Config, DeepseekV4TopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeConfig, Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeConfig, GraniteMoeTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2Config, MiniMaxM2TopKRouter
from transformers.models.mistral4.modeling_mistral4 import Mistral4Config, Mistral4TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeTopKRouter

from tiermoe import native
from tiermoe.kernels.router import Router, Scoring, choose, in_parts, products_of, route

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="needs the native kernels"),
    pytest.mark.usefixtures("instruction_set"),
]

HIDDEN, EXPERTS, TOKENS = 96, 32, 64
BF16 = torch.bfloat16
LOCAL = {"num_local_experts": EXPERTS}
ROUTED = {"n_routed_experts": EXPERTS}
SIGMOID = {
    "scoring": Scoring.SIGMOID, "correction": True, "judges": 2, "exact_logits": True, "epsilon": 1e-20, "scale": 2.5,
}  # fmt: skip
# transformers' router and config, what the config says, and `Router` but for its matrix; correction: the module's
CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "Qwen2-MoE": (
        Qwen2MoeTopKRouter, Qwen2MoeConfig, {"num_experts": EXPERTS, "norm_topk_prob": False},
        {"normalise": False, "dtype": BF16},
    ),
    "Qwen3-MoE": (
        Qwen3MoeTopKRouter, Qwen3MoeConfig, {"num_experts": EXPERTS, "norm_topk_prob": True},
        {"normalise": True, "dtype": BF16},
    ),
    "Mixtral": (MixtralTopKRouter, MixtralConfig, LOCAL, {"normalise": True}),
    "GraniteMoE": (GraniteMoeTopKRouter, GraniteMoeConfig, LOCAL, {"scoring": Scoring.CHOSEN, "dtype": BF16}),
    "gpt-oss": (GptOssTopKRouter, GptOssConfig, LOCAL, {"scoring": Scoring.CHOSEN, "bias": True, "dtype": BF16}),
    "DeepSeek-V2": (
        DeepseekV2TopkRouter, DeepseekV2Config,
        {**ROUTED, "routed_scaling_factor": 16.0, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
        {"exact_logits": True, "scale": 16.0},
    ),
    "DeepSeek-V2, groups": (
        DeepseekV2TopkRouter, DeepseekV2Config,
        {**ROUTED, "routed_scaling_factor": 16.0, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
        {"groups": 8, "kept": 3, "exact_logits": True, "scale": 16.0},
    ),
    **{f"DeepSeek-V3{label}": (
        DeepseekV3TopkRouter, DeepseekV3Config,
        {**ROUTED, "n_group": 8, "topk_group": 2, "norm_topk_prob": normalise, "routed_scaling_factor": 2.5},
        {**SIGMOID, "groups": 8, "kept": 2, "normalise": normalise},
    ) for label, normalise in (("", True), (", not normalised", False))},
    "GLM4-MoE": (
        Glm4MoeTopkRouter, Glm4MoeConfig,
        {**ROUTED, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        {**SIGMOID, "normalise": True},
    ),
    "MiniMax-M2": (
        MiniMaxM2TopKRouter, MiniMaxM2Config, LOCAL,
        {"scoring": Scoring.SIGMOID, "correction": torch.linspace(-0.4, 0.4, EXPERTS), "normalise": True},
    ),
    "Mistral 4": (
        Mistral4TopkRouter, Mistral4Config,
        {**ROUTED, "n_group": 4, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        {"groups": 4, "kept": 1, "judges": 2, "normalise": True, "epsilon": 1e-20, "scale": 2.5, "dtype": BF16},
    ),
    "DeepSeek-V4": (
        DeepseekV4TopKRouter, DeepseekV4Config, ROUTED,
        {"scoring": Scoring.SQRT_SOFTPLUS, "correction": True, "normalise": True, "epsilon": 1e-20, "scale": 1.5,
         "dtype": BF16},
    ),
}  # fmt: skip


def made(family: str) -> tuple[Any, Router, tuple[Any, ...]]:
    """transformers' module in bfloat16 with random values, our router, and what else the module is given."""
    cls, config, settings, rule = CASES[family]
    module = cls(config(hidden_size=HIDDEN, num_experts_per_tok=4, **settings)).bfloat16().requires_grad_(False)
    random = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.1)
    if hasattr(module, "e_score_correction_bias"):
        module.e_score_correction_bias = torch.randn(EXPERTS, generator=random) * 0.2
    rule, others = dict(rule), ()
    if rule.get("bias"):
        rule["bias"] = module.bias
    if isinstance(correction := rule.get("correction"), torch.Tensor):
        others = (correction,)
    elif correction:
        rule["correction"] = module.e_score_correction_bias.float()
    return module, Router(module.weight, 4, **rule), others


@pytest.mark.parametrize("family", CASES)
def test_a_router_chooses_and_weighs_as_transformers_does(family: str) -> None:
    module, fast, others = made(family)
    assert fast.suits()
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    _, want_weights, want_experts = module(x, *others)
    weights, experts = route(fast, x)
    assert (weights.dtype, experts.dtype) == (want_weights.dtype, torch.int64)
    # transformers leaves the order open in some families
    order, want_order = experts.argsort(1), want_experts.argsort(1)
    same = (experts.gather(1, order) == want_experts.gather(1, want_order)).all(1)
    if fast.exact_logits:
        assert same.all()
    # logits of bfloat16 tie, and differ in their last bit where sums run in another order
    assert same.float().mean() > 0.9
    got, want = weights.gather(1, order)[same].float(), want_weights.gather(1, want_order)[same].float()
    assert torch.allclose(got, want, rtol=1e-5 if fast.exact_logits else 0.02)


@pytest.mark.parametrize("family", CASES)
def test_a_tokens_experts_depend_on_no_other_token(family: str) -> None:
    _, fast, _ = made(family)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights, experts = route(fast, x)
    for at in range(9):
        alone_weights, alone_experts = route(fast, x[at : at + 1].contiguous())
        assert torch.equal(alone_weights[0], weights[at])
        assert torch.equal(alone_experts[0], experts[at])


def test_the_best_comes_first_and_of_equal_ones_the_first() -> None:
    weight = torch.zeros(6, 32).bfloat16()
    weight[:, 0] = torch.tensor([0.5, 2.0, -1.0, 2.0, 2.0, 0.5])
    x = torch.zeros(1, 32).bfloat16()
    x[0, 0] = 1
    for scoring in Scoring:
        assert route(Router(weight, 4, scoring), x)[1].tolist() == [[1, 3, 4, 0]]


@pytest.mark.parametrize("changes", [{"k": 7}, {"groups": 4}, {"groups": 3, "kept": 1, "k": 3}, {"judges": 3}])
def test_numbers_that_do_not_go_together_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no router"):
        Router(torch.zeros(6, 32).bfloat16(), **{"k": 2, **changes}).pack()


def test_undefined_and_infinite_scores_choose_different_experts() -> None:
    weight = torch.zeros(6, 32).bfloat16()
    weight[:, 0] = torch.tensor([-torch.inf, -torch.inf, 1, -torch.inf, torch.nan, -torch.inf])
    x = torch.ones(1, 32).bfloat16()
    for scoring in Scoring:
        assert len(set(route(Router(weight, 5, scoring), x)[1][0].tolist())) == 5


def test_products_are_a_tokens_own() -> None:
    """So are choices by them."""
    random = torch.Generator().manual_seed(6)
    weight, x = (torch.randn(count, HIDDEN, generator=random).bfloat16() for count in (9, 6))
    products = products_of(weight, x)
    assert torch.allclose(products.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)
    assert torch.equal(products, torch.cat([products_of(weight, row[None]) for row in x]))
    logits = products.bfloat16()
    for normalise in (False, True):
        weights, experts = choose(logits, 4, normalise)
        assert torch.equal(experts, logits.float().sort(stable=True, descending=True).indices[:, :4])
        want = logits.float().softmax(-1).gather(1, experts)
        assert torch.allclose(weights, want / want.sum(1, keepdim=True) if normalise else want)
        alone = [torch.cat(each) for each in zip(*(choose(row[None], 4, normalise) for row in logits), strict=True)]
        assert torch.equal(alone[0], weights)
        assert torch.equal(alone[1], experts)


def test_a_matrix_in_float32_keeps_all_of_its_bits() -> None:
    """It is the sum of its parts, and what it chooses and weighs is what float64 gives."""
    generator = torch.Generator().manual_seed(3)
    weight, x = (torch.randn(rows, HIDDEN, generator=generator) for rows in (EXPERTS, TOKENS))
    parts, x = in_parts(weight), x.bfloat16()
    assert torch.equal(parts.double().sum(0).float(), weight)
    weights, experts = route(Router(parts, 4, Scoring.SIGMOID, exact_logits=True), x)
    scores = (x.double() @ weight.double().t()).sigmoid()
    best = scores.topk(4)
    assert torch.equal(experts, best.indices)
    assert (weights - best.values).abs().max() < 1e-6
