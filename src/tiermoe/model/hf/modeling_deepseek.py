"""DeepSeekMoE as a transformers model, which transformers does not have: Llama's layers, of which most have
experts and shared experts in the place of the dense block.

It is put together from transformers' Llama and Qwen2-MoE by the published description (Dai et al., 2024,
arXiv:2401.06066) and the names of deepseek-ai/deepseek-moe-16b-base; no code of a checkpoint runs. The router's softmax
is float32, as in transformers' families."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.integrations import use_experts_implementation
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts, Qwen2MoeMLP, Qwen2MoeTopKRouter

from tiermoe.model.hf.configuration_deepseek import DeepseekConfig


@use_experts_implementation
class DeepseekExperts(Qwen2MoeExperts):  # type: ignore[misc]
    """Routed experts. The decorator, which the base has too, is what transformers looks for in a model's module."""


class DeepseekMoe(nn.Module):
    """Routed experts, and shared experts that every token uses, which are one dense block."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.gate = Qwen2MoeTopKRouter(config)
        self.experts = DeepseekExperts(config)
        self.shared_experts = None
        if config.n_shared_experts:
            self.shared_experts = Qwen2MoeMLP(config, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, tokens, H) → the same shape."""
        flat = hidden.view(-1, hidden.shape[-1])
        _, weights, index = self.gate(flat)
        routed: Tensor = self.experts(flat, index, weights).view(hidden.shape)
        return routed if self.shared_experts is None else routed + self.shared_experts(hidden)


class DeepseekModel(LlamaModel):  # type: ignore[misc]
    """The decoder without its output layer."""

    config_class = DeepseekConfig

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            if config.has_experts(index):
                layer.mlp = DeepseekMoe(config)
        self.post_init()


class DeepseekForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """DeepSeekMoE."""

    config_class = DeepseekConfig

    def __init__(self, config: DeepseekConfig) -> None:
        super(LlamaForCausalLM, self).__init__(config)  # without Llama's own model
        self.model = DeepseekModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


def register() -> None:
    """Makes transformers' AutoModelForCausalLM know the class, and its loader the checkpoint's names of experts."""
    AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM, exist_ok=True)
    kind = DeepseekConfig.model_type
    register_checkpoint_conversion_mapping(kind, get_checkpoint_conversion_mapping("qwen2_moe"), overwrite=True)
