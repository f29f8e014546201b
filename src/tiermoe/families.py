"""What each model family calls its parts: the one table to extend for a new family. Standard library only.

`experts` is the class that is replaced; its parameters, activation and gate come from transformers' own code, so a
family needs no more than these names unless its experts lie outside transformers' experts interface (`adapter`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiermoe.errors import ModelError


@dataclass(frozen=True, slots=True)
class Family:
    """One supported model family of transformers.

    model_type: `model_type` of config.json.
    experts: name of the experts class in the family's modelling module.
    router: attribute of the router beside `experts` in the MoE block.
    top_k: name of the config's entry for the number of experts a token uses; None where it is fixed at 1.
    encoder_decoder: generates through an encoder and a decoder.
    adapter: the experts are a ModuleDict of small modules called with one-hot masks (Switch), not stacked tensors
        under transformers' experts interface.
    latent_kv: attention caches one compressed latent a token and expands it a layer at a time (multi-head latent
        attention, DeepSeek-V2, section 2.1).
    hash_table: attribute of a router whose experts follow from the token alone: its table (vocabulary, K) of experts.
    normalised: the chosen experts' weights are scaled to a fixed sum; None where the config's `norm_topk_prob` says so.
    plain_router: one matrix, whose product's softmax is ranked: the routers of several layers can be one product.
    """

    name: str
    model_type: str
    experts: str
    router: str = "gate"
    top_k: str | None = "num_experts_per_tok"
    encoder_decoder: bool = False
    adapter: bool = False
    latent_kv: bool = False
    hash_table: str | None = None
    normalised: bool | None = None
    plain_router: bool = False

    def renormalises(self, config: Any) -> bool:
        """Whether a model of this family scales the chosen experts' weights to a fixed sum."""
        if self.normalised is None:
            return bool(getattr(config, "norm_topk_prob", False))
        return self.normalised


_TABLE = (
    Family("Mixtral", "mixtral", "MixtralExperts", normalised=True, plain_router=True),
    Family("Phi-MoE", "phimoe", "PhimoeExperts", router="router", normalised=False),
    Family("Qwen2-MoE (Qwen1.5-MoE)", "qwen2_moe", "Qwen2MoeExperts", plain_router=True),
    Family("Qwen3-MoE", "qwen3_moe", "Qwen3MoeExperts", plain_router=True),
    Family("OLMoE", "olmoe", "OlmoeExperts", plain_router=True),
    Family("DeepSeek-V2", "deepseek_v2", "DeepseekV2Experts", latent_kv=True, normalised=False),
    Family("DeepSeek-V3", "deepseek_v3", "DeepseekV3Experts", latent_kv=True),
    Family("DeepSeek-V4", "deepseek_v4", "DeepseekV4Experts", hash_table="tid2eid", normalised=True),
    Family("GLM4-MoE", "glm4_moe", "Glm4MoeExperts"),
    Family("dots.llm1", "dots1", "Dots1Experts"),
    Family("gpt-oss", "gpt_oss", "GptOssExperts", router="router", normalised=True),
    Family("GraniteMoE", "granitemoe", "GraniteMoeExperts", router="router", normalised=True),
    Family("MiniMax-M2", "minimax_m2", "MiniMaxM2Experts", normalised=True),
    Family(
        "Switch Transformers",
        "switch_transformers",
        "SwitchTransformersExperts",
        router="router",
        top_k=None,
        encoder_decoder=True,
        adapter=True,
        normalised=False,
    ),
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in _TABLE}


def family_of(model_type: str) -> Family:
    """The family of a config's `model_type`; ModelError names the supported ones when there is none."""
    try:
        return FAMILIES[model_type]
    except KeyError:
        supported = ", ".join(sorted(FAMILIES))
        raise ModelError(f"model family '{model_type}' is not supported; supported model types: {supported}") from None
