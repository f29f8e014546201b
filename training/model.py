"""The model that is trained, transformers' own Qwen3-MoE, and its loss."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from training.experts import capacity, use_batched_experts
from training.settings import Settings

INIT_STD = 0.02


@dataclass(frozen=True)
class Losses:
    """Scalars of one batch; ``dropped`` is the share of (token, expert) pairs beyond capacity."""

    language: torch.Tensor
    balance: torch.Tensor
    dropped: torch.Tensor


def build_model(settings: Settings) -> Qwen3MoeForCausalLM:
    """A freshly initialised model in float32; the output matrices shrink with depth (GPT-2, section 2.3)."""
    torch.manual_seed(settings.seed)
    config = Qwen3MoeConfig(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=settings.expert_hidden * settings.top_k,
        moe_intermediate_size=settings.expert_hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        num_experts=settings.experts,
        num_experts_per_tok=settings.top_k,
        norm_topk_prob=True,
        tie_word_embeddings=settings.tied,
        max_position_embeddings=settings.max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        router_aux_loss_coef=settings.balance,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            residual = name.endswith(("down_proj", "o_proj.weight"))
            nn.init.normal_(parameter, std=INIT_STD / math.sqrt(2 * settings.layers) if residual else INIT_STD)
    nn.init.normal_(model.model.embed_tokens.weight, std=settings.embedding_std)
    use_batched_experts(model, settings.capacity_factor)
    return model


def load_balance(router_logits: torch.Tensor, top_k: int, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Balance loss of one layer (Switch Transformers, equation 4; 1 when even) and the share that is dropped.

    ``router_logits`` (T, E). transformers' own loss averages the layers before it multiplies, so that layers
    may be uneven in opposite ways; here every layer is balanced by itself.
    """
    tokens, experts = router_logits.shape
    probabilities = F.softmax(router_logits.float(), dim=-1)
    chosen = probabilities.topk(top_k, dim=-1).indices.reshape(-1)
    load = torch.bincount(chosen, minlength=experts).float()
    balance = experts * (probabilities.mean(0) * load / len(chosen)).sum()
    excess = (load - capacity(tokens, top_k, experts, factor)).clamp(min=0).sum()
    return balance, excess / len(chosen)


def losses(model: Qwen3MoeForCausalLM, inputs: torch.Tensor, targets: torch.Tensor, factor: float) -> Losses:
    """Cross-entropy in nats per token, and the layers' mean balance; inputs and targets (B, T) int64."""
    out = model.model(inputs, use_cache=False, output_router_logits=True)
    logits = model.lm_head(out.last_hidden_state).float()
    top_k = model.config.num_experts_per_tok
    layers = [load_balance(router, top_k, factor) for router in out.router_logits]
    return Losses(
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        torch.stack([balance for balance, _ in layers]).mean(),
        torch.stack([dropped for _, dropped in layers]).mean(),
    )
