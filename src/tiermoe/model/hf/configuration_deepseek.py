"""Config of DeepSeekMoE (`model_type` 'deepseek'), which transformers does not have."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, LlamaConfig


@strict
class DeepseekConfig(LlamaConfig):  # type: ignore[misc]
    """Llama's config with experts, by the names and defaults that deepseek-ai/deepseek-moe-16b-base publishes."""

    model_type = "deepseek"
    attribute_map = {"num_experts": "n_routed_experts"}  # noqa: RUF012  # transformers' own are dicts

    vocab_size: int = 102400
    max_position_embeddings: int = 4096
    moe_intermediate_size: int = 1407
    n_shared_experts: int | None = None
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_layer_freq: int = 1
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"

    def validate_architecture(self) -> None:
        """ValueError for a router or an order of layers that the published code does not compute."""
        super().validate_architecture()
        if self.scoring_func != "softmax":
            raise ValueError(f"scoring_func is '{self.scoring_func}', and DeepSeekMoE's routers know 'softmax' alone")
        if self.moe_layer_freq < 1:
            raise ValueError(f"moe_layer_freq is {self.moe_layer_freq}: every so many layers have experts, 1 or more")

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts; else it has a dense block."""
        every = self.n_routed_experts is not None and layer % self.moe_layer_freq == 0
        return every and layer >= self.first_k_dense_replace


def register() -> Any:
    """transformers' AutoConfig, which knows DeepSeekMoE from then on."""
    AutoConfig.register(DeepseekConfig.model_type, DeepseekConfig, exist_ok=True)
    return AutoConfig
