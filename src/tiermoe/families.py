"""What is stated of a model family: the one table to extend where transformers' code does not say it. Standard library
only.

Every causal family of transformers whose experts go through its experts interface runs without an entry: classes,
routers, sizes and caches are found from the model (`model/discovery.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiermoe.errors import ModelError


@dataclass(frozen=True, slots=True)
class Family:
    """One model family of transformers.

    model_type: `model_type` of config.json, of its text part where it has others.
    encoder_decoder: generates through an encoder and a decoder.
    encoder_class: of an encoder alone, transformers' class: it gives hidden states and writes no text.
    adapter: of `model/adapters.py`, for experts that lie outside transformers' experts interface.
    forecasts: its routers, called on another layer's input, say which experts that layer would choose.
    continues: transformers' code can read several tokens after others; else they follow one by one (Jamba's scan begins
        anew).
    latent_kv: attention caches one compressed latent a token and expands it a layer at a time (multi-head latent
        attention, DeepSeek-V2, section 2.1).
    hash_table: attribute of a router whose experts follow from the token alone: its table (vocabulary, K) of experts.
    normalised: the chosen experts' weights are scaled to a fixed sum; None where the config's `norm_topk_prob` says so.
    plain_router: one matrix, whose product's softmax is ranked: the routers of several layers can be one product.
    """

    name: str
    model_type: str
    encoder_decoder: bool = False
    encoder_class: str = ""
    adapter: str | None = None
    forecasts: bool = True
    continues: bool = True
    latent_kv: bool = False
    hash_table: str | None = None
    normalised: bool | None = None
    plain_router: bool = False

    @property
    def encodes(self) -> bool:
        """Whether an encoder reads the prompt, which it does at once."""
        return self.encoder_decoder or bool(self.encoder_class)

    def renormalises(self, config: Any) -> bool:
        """Whether a model of this family scales the chosen experts' weights to a fixed sum."""
        if self.normalised is None:
            return bool(getattr(config, "norm_topk_prob", False))
        return self.normalised


_TABLE = (
    Family("Mixtral", "mixtral", normalised=True, plain_router=True),
    Family("Phi-MoE", "phimoe", normalised=False),
    Family("Qwen2-MoE (Qwen1.5-MoE)", "qwen2_moe", plain_router=True),
    Family("Qwen3-MoE", "qwen3_moe", plain_router=True),
    Family("Qwen3-Next", "qwen3_next", plain_router=True),
    Family("Qwen3.5-MoE", "qwen3_5_moe_text", normalised=True, plain_router=True),
    Family("OLMoE", "olmoe", plain_router=True),
    Family("DeepSeek-V2", "deepseek_v2", latent_kv=True, normalised=False),
    Family("DeepSeek-V3", "deepseek_v3", latent_kv=True),
    Family("DeepSeek-V3.2", "deepseek_v32", latent_kv=True),
    Family("DeepSeek-V4", "deepseek_v4", hash_table="tid2eid", normalised=True),
    Family("GLM4-MoE", "glm4_moe"),
    Family("GLM4-MoE-Lite", "glm4_moe_lite", latent_kv=True),
    Family("GLM-MoE-DSA (GLM-5)", "glm_moe_dsa", latent_kv=True),
    Family("ERNIE 4.5", "ernie4_5_moe", normalised=True),
    Family("dots.llm1", "dots1"),
    Family("LFM2-MoE", "lfm2_moe"),
    Family("Gemma 4", "gemma4_text", normalised=True),
    Family("gpt-oss", "gpt_oss", normalised=True),
    Family("GraniteMoE", "granitemoe", normalised=True),
    Family("MiniMax-M2", "minimax_m2", normalised=True),
    Family("DBRX", "dbrx", adapter="dbrx", forecasts=False, normalised=True),
    Family("Jamba", "jamba", continues=False, normalised=False),
    Family("JetMoE", "jetmoe", adapter="jetmoe", forecasts=False, normalised=True),
    Family("Llama 4", "llama4", adapter="llama4", normalised=False),
    Family("LongCat-Flash", "longcat_flash", adapter="longcat", normalised=False),
    Family("Step 3.7", "step3p5", adapter="step", normalised=True),
    Family("ZAYA1", "zaya", forecasts=False, normalised=False),
    Family("Switch Transformers", "switch_transformers", True, adapter="switch", forecasts=False, normalised=False),
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in _TABLE}

ENCODERS = {
    "SwitchTransformersEncoderModel": Family(
        "Switch Transformers (encoder alone)", "switch_transformers", encoder_class="SwitchTransformersEncoderModel",
        adapter="switch", forecasts=False, normalised=False,
    ),
}  # fmt: skip
"""A class that config.json's `architectures` names → its family, where that is an encoder alone."""

REFUSED = {
    "diffusion_gemma": "it fills in blocks of tokens rather than continue a text",
    "doge": "its experts are single rows of an embedding, of which a token adds up thousands: there are no matrices to "
    "load one by one",
    "ernie4_5_vl_moe": "its checkpoint has the experts for text and for pictures in one list, which tiermoe does not "
    "take apart",
    "minimax": "transformers 5.23 computes something else for a token that follows others than for the same token "
    "inside of a prompt",
    "muse_spark": "it normalises what each expert gives before that is weighted, which no kernel of tiermoe does",
    "nllb-moe": "transformers 5.23 computes only its first two experts",
    "unlimited_ocr": "which tokens it attends to depends on which were given and which it wrote, and tiermoe's "
    "sequences do not keep them apart",
}
"""model_type → why no model of this family runs."""


def family_of(model_type: str, architectures: Sequence[str] = ()) -> Family:
    """The family of a config's `model_type`: what the table states, or one of which nothing is stated. architectures:
    the classes that the config names, of which one may be an encoder alone. ModelError with the reason for a family
    that is refused."""
    if model_type in REFUSED:
        raise ModelError(f"models of the family '{model_type}' are refused: {REFUSED[model_type]}")
    for encoder in architectures:
        if encoder in ENCODERS:
            return ENCODERS[encoder]
    name = model_type.removesuffix("_text")
    return FAMILIES.get(model_type) or FAMILIES.get(name) or Family(name, model_type)
