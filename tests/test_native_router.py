"""The native router against transformers' own router modules, on random tokens."""

from __future__ import annotations

from collections.abc import Callable
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
from tiermoe.kernels.router import Router, Scoring, route

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="needs the native kernels"),
    pytest.mark.usefixtures("instruction_set"),
]

HIDDEN, EXPERTS, TOKENS = 96, 32, 64
Case = tuple[torch.nn.Module, Router, tuple[Any, ...]]


def made(module: torch.nn.Module) -> Any:
    """The module in bfloat16, its values random and its correction in float32."""
    module = module.bfloat16().requires_grad_(False)
    random = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.1)
    if hasattr(module, "e_score_correction_bias"):
        module.e_score_correction_bias = torch.randn(EXPERTS, generator=random) * 0.2
    return module


def softmax(cls: Any, config: Any, normalise: bool, dtype: torch.dtype) -> Case:
    module = made(cls(config))
    return module, Router(module.weight, 4, normalise=normalise, dtype=dtype), ()


def qwen2() -> Case:
    config = Qwen2MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=4, norm_topk_prob=False)
    return softmax(Qwen2MoeTopKRouter, config, False, torch.bfloat16)


def qwen3() -> Case:
    config = Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=4, norm_topk_prob=True)
    return softmax(Qwen3MoeTopKRouter, config, True, torch.bfloat16)


def mixtral() -> Case:
    config = MixtralConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=4)
    return softmax(MixtralTopKRouter, config, True, torch.float32)


def granite() -> Case:
    module = made(
        GraniteMoeTopKRouter(GraniteMoeConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=4))
    )
    return module, Router(module.weight, 4, Scoring.CHOSEN, dtype=torch.bfloat16), ()


def gpt_oss() -> Case:
    config = GptOssConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=4)
    module = made(GptOssTopKRouter(config))
    return module, Router(module.weight, 4, Scoring.CHOSEN, bias=module.bias, dtype=torch.bfloat16), ()


def deepseek_v2(groups: int) -> Case:
    config = DeepseekV2Config(
        hidden_size=HIDDEN, n_routed_experts=EXPERTS, num_experts_per_tok=4, routed_scaling_factor=16.0,
        topk_method="greedy" if groups == 1 else "group_limited_greedy", n_group=groups, topk_group=min(groups, 3),
    )  # fmt: skip
    module = made(DeepseekV2TopkRouter(config))
    fast = Router(module.weight, 4, groups=groups, kept=min(groups, 3), exact_logits=True, scale=16.0)
    return module, fast, ()


def sigmoid(cls: Any, config: Any, groups: int, kept: int) -> Case:
    module = made(cls(config))
    fast = Router(
        module.weight, 4, Scoring.SIGMOID, correction=module.e_score_correction_bias, groups=groups, kept=kept,
        judges=2, exact_logits=True, normalise=config.norm_topk_prob, epsilon=1e-20, scale=2.5,
    )  # fmt: skip
    return module, fast, ()


def deepseek_v3(normalise: bool) -> Case:
    config = DeepseekV3Config(
        hidden_size=HIDDEN, n_routed_experts=EXPERTS, num_experts_per_tok=4, n_group=8, topk_group=2,
        norm_topk_prob=normalise, routed_scaling_factor=2.5,
    )  # fmt: skip
    return sigmoid(DeepseekV3TopkRouter, config, 8, 2)


def glm4() -> Case:
    config = Glm4MoeConfig(
        hidden_size=HIDDEN, n_routed_experts=EXPERTS, num_experts_per_tok=4, n_group=1, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    return sigmoid(Glm4MoeTopkRouter, config, 1, 1)


def minimax() -> Case:
    module = made(
        MiniMaxM2TopKRouter(MiniMaxM2Config(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=4))
    )
    correction = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(6)) * 0.2
    return module, Router(module.weight, 4, Scoring.SIGMOID, correction=correction, normalise=True), (correction,)


def mistral4() -> Case:
    config = Mistral4Config(
        hidden_size=HIDDEN, n_routed_experts=EXPERTS, num_experts_per_tok=4, n_group=4, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    module = made(Mistral4TopkRouter(config))
    fast = Router(
        module.weight, 4, groups=4, kept=1, judges=2, normalise=True, epsilon=1e-20, scale=2.5, dtype=torch.bfloat16
    )
    return module, fast, ()


def deepseek_v4() -> Case:
    config = DeepseekV4Config(hidden_size=HIDDEN, n_routed_experts=EXPERTS, num_experts_per_tok=4)
    module = made(DeepseekV4TopKRouter(config))
    fast = Router(
        module.weight, 4, Scoring.SQRT_SOFTPLUS, correction=module.e_score_correction_bias.float(), normalise=True,
        epsilon=1e-20, scale=1.5, dtype=torch.bfloat16,
    )  # fmt: skip
    return module, fast, ()


CASES: dict[str, Callable[[], Case]] = {
    "Qwen2-MoE": qwen2, "Qwen3-MoE": qwen3, "Mixtral": mixtral, "GraniteMoE": granite, "gpt-oss": gpt_oss,
    "DeepSeek-V2": lambda: deepseek_v2(1), "DeepSeek-V2, groups": lambda: deepseek_v2(8),
    "DeepSeek-V3": lambda: deepseek_v3(True), "DeepSeek-V3, not normalised": lambda: deepseek_v3(False),
    "GLM4-MoE": glm4, "MiniMax-M2": minimax, "Mistral 4": mistral4,
    "DeepSeek-V4": deepseek_v4,
}  # fmt: skip


@pytest.mark.parametrize("family", CASES)
def test_a_router_chooses_and_weighs_as_transformers_does(family: str) -> None:
    module, fast, others = CASES[family]()
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
    _, fast, _ = CASES[family]()
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
