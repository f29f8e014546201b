"""Router rules by family: how its routers choose experts and weigh them, from its config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiermoe.model.routers import RouterRule


def softmax_router(config: Any) -> RouterRule:
    """Softmax over all experts; a token's weights may sum to 1."""
    return RouterRule(config.num_experts_per_tok, normalise=bool(getattr(config, "norm_topk_prob", False)))


def normalising_router(config: Any) -> RouterRule:
    """Softmax over all experts; a token's weights sum to 1, whatever the config says."""
    return RouterRule(config.num_experts_per_tok, normalise=True)


def mixtral_router(config: Any) -> RouterRule:
    return RouterRule(config.num_experts_per_tok, normalise=True, rounded=False)


def chosen_router(config: Any) -> RouterRule:
    """Softmax over the chosen experts alone."""
    return RouterRule(config.num_experts_per_tok, scores="chosen")


def phi_router(config: Any) -> RouterRule:
    return RouterRule(2, scores="sparsemixer", jitter=float(config.router_jitter_noise))


def minimax_router(config: Any) -> RouterRule:
    return RouterRule(config.num_experts_per_tok, scores="sigmoid", normalise=True, rounded=False)


def minimax_m3_router(config: Any) -> RouterRule:
    return replace(minimax_router(config), scale=float(config.routed_scaling_factor))


def deepseek_v2_router(config: Any) -> RouterRule:
    grouped = config.topk_method == "group_limited_greedy"
    return RouterRule(
        config.num_experts_per_tok,
        wide=True,
        rounded=False,
        groups=config.n_group if grouped else 1,
        kept_groups=config.topk_group if grouped else 1,
        best_of_group=True,
        scale=float(config.routed_scaling_factor),
    )


def deepseek_v3_router(config: Any) -> RouterRule:
    return RouterRule(
        config.num_experts_per_tok,
        scores="sigmoid",
        normalise=bool(config.norm_topk_prob),
        epsilon=1e-20,
        wide=True,
        rounded=False,
        groups=config.n_group,
        kept_groups=config.topk_group,
        scale=float(config.routed_scaling_factor),
    )


def deepseek_v4_router(config: Any) -> RouterRule:
    return RouterRule(
        config.num_experts_per_tok,
        scores=config.scoring_func,
        normalise=True,
        epsilon=1e-20,
        scale=float(config.routed_scaling_factor),
    )


def hunyuan_router(config: Any) -> RouterRule:
    return RouterRule(hunyuan_top_k(config)[0], normalise=True, wide=True, rounded=False)


def hunyuan_top_k(config: Any) -> list[int]:
    """Experts of a token, one number for all layers or one for each."""
    return config.moe_topk if isinstance(config.moe_topk, list) else [config.moe_topk]


def hunyuan3_router(config: Any) -> RouterRule:
    return RouterRule(
        config.num_experts_per_tok,
        scores="sigmoid",
        normalise=True,
        epsilon=1e-20,
        wide=True,
        rounded=False,
        scale=float(config.router_scaling_factor),
    )


def mistral4_router(config: Any) -> RouterRule:
    return RouterRule(
        config.num_experts_per_tok,
        normalise=bool(config.norm_topk_prob),
        epsilon=1e-20,
        groups=config.n_group,
        kept_groups=config.topk_group,
        scale=float(config.routed_scaling_factor),
    )


def ernie_router(config: Any) -> RouterRule:
    """Softmax over all experts, of which a correction chooses; a token's weights sum to 1."""
    return RouterRule(config.num_experts_per_tok, normalise=True, epsilon=1e-20, wide=True)


def kolibri_router(config: Any) -> RouterRule:
    return RouterRule(
        config.num_experts_per_tok,
        scores="sigmoid",
        normalise=bool(config.norm_topk_prob),
        corrects_logits=True,
        wide=True,
        rounded=False,
    )


def lfm2_router(config: Any) -> RouterRule:
    return RouterRule(
        config.num_experts_per_tok,
        scores="sigmoid",
        normalise=bool(config.norm_topk_prob),
        epsilon=1e-6,
        scale=float(config.routed_scaling_factor),
    )


def afmoe_router(config: Any) -> RouterRule:
    return RouterRule(
        config.num_experts_per_tok,
        scores="sigmoid",
        normalise=True,
        epsilon=1e-20,
        rounded=False,
        scale=float(config.route_scale),
    )
