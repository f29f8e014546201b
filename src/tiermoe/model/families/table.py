"""Model families: what is stated of a family because transformers' code does not say it, and the blocks of the families
whose decoders are tiermoe's own.

Every causal family of transformers whose experts go through its experts interface runs without an entry: classes,
routers, sizes and caches are found from the model (`hf/shells.py`, `hf/skeleton.py`), and transformers' code computes
it (`hf/generic.py`). Of DeepSeekMoE, which transformers does not have, that code is `hf/modeling_deepseek.py`. An entry
of `ARCHITECTURES` says which blocks a family's layers are made of; a config that asks for what no block computes is run
by transformers' code too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.kernels.gates import ClampedGate, LimitedSilu
from tiermoe.model.architecture import Architecture
from tiermoe.model.attention.mamba import mamba_lacks
from tiermoe.model.families.gemma4 import GEMMA4
from tiermoe.model.families.lacks import (
    deepseek_v4_lacks,
    granite_windows_lack,
    hunyuan_lacks,
    indexer_lacks,
    minimax_m3_lacks,
)
from tiermoe.model.families.llama4 import LLAMA4
from tiermoe.model.families.router_rules import (
    afmoe_router,
    chosen_router,
    deepseek_v2_router,
    deepseek_v3_router,
    deepseek_v4_router,
    ernie_router,
    hunyuan3_router,
    hunyuan_router,
    kolibri_router,
    lfm2_router,
    minimax_m3_router,
    minimax_router,
    mistral4_router,
    mixtral_router,
    normalising_router,
    phi_router,
    softmax_router,
)
from tiermoe.model.moe import ACTIVATIONS
from tiermoe.model.rotary import Temperature, knows_rotary


@dataclass(frozen=True, slots=True)
class Family:
    """What is stated of a model family of transformers because its code does not say it."""

    name: str
    model_type: str  # of config.json, of its text part where it has others
    encoder_decoder: bool = False  # generates through an encoder and a decoder
    encoder_class: str = ""  # transformers' class of an encoder alone, which gives hidden states and writes no text
    adapter: str | None = None  # of `hf.adapters`, for experts outside transformers' experts interface
    forecasts: bool = True  # its routers, called on another layer's input, name the experts that layer would choose
    continues: bool = True  # transformers' code reads several tokens after others; else one by one (Jamba's scan)
    latent_kv: bool = False  # attention caches one latent a token (multi-head latent attention)
    hash_table: str | None = None  # attribute of a router whose experts follow from the token: (vocabulary, K)
    normalised: bool | None = None  # the chosen experts' weights have a fixed sum; None: config.norm_topk_prob says so
    plain_router: bool = False  # one matrix and a softmax: the routers of several layers can be one product

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
    Family("Qwen3.8", "qwen4_exp_text", plain_router=True),
    Family("OLMoE", "olmoe", plain_router=True),
    Family("FlexOlmo", "flex_olmo", plain_router=True),
    Family("Kolibri 1", "kolibri1"),
    Family("DeepSeekMoE", "deepseek", plain_router=True),
    Family("DeepSeek-V2", "deepseek_v2", latent_kv=True, normalised=False),
    Family("DeepSeek-V3", "deepseek_v3", latent_kv=True),
    Family("DeepSeek-V3.2", "deepseek_v32", latent_kv=True),
    Family("DeepSeek-V4", "deepseek_v4", hash_table="tid2eid", normalised=True),
    Family("GLM4-MoE", "glm4_moe"),
    Family("GLM4-MoE-Lite", "glm4_moe_lite", latent_kv=True),
    Family("GLM-MoE-DSA (GLM-5)", "glm_moe_dsa", latent_kv=True),
    Family("GLM-5 Next (GLM-5.3-Flash)", "glm5_next_text", latent_kv=True),
    Family("ERNIE 4.5", "ernie4_5_moe", normalised=True),
    Family("dots.llm1", "dots1"),
    Family("EXAONE MoE (K-EXAONE)", "exaone_moe"),
    Family("LFM2-MoE", "lfm2_moe"),
    Family("AFMoE (Trinity)", "afmoe", normalised=True),
    Family("A.X-K1", "axk1", latent_kv=True),
    Family("Gemma 4", "gemma4_text", normalised=True),
    Family("gpt-oss", "gpt_oss", normalised=True),
    Family("GraniteMoE", "granitemoe", normalised=True),
    Family("GraniteMoE with a shared expert", "granitemoeshared", normalised=True),
    Family("GraniteMoE with sliding windows", "granitemoe_swa", normalised=True),
    Family("Granite 4 (hybrid)", "granitemoehybrid", normalised=True),
    Family("Kimi Linear", "kimi_linear"),
    Family("Ling 3.0", "bailing_hybrid"),
    Family("Hunyuan (A13B)", "hunyuan_v1_moe", normalised=True),
    Family("Hunyuan 3", "hy_v3", normalised=True),
    Family("Hunyuan 4", "hy_v4", latent_kv=True),
    Family("Mellum 2", "mellum", plain_router=True),
    Family("MiniMax-M2", "minimax_m2", normalised=True),
    Family("MiMo-V2-Flash", "mimo_v2_flash"),
    Family("MiniMax-M3", "minimax_m3_vl_text", normalised=True),
    Family("Mistral 4", "mistral4", latent_kv=True),
    Family("Solar Open", "solar_open"),
    Family("DBRX", "dbrx", adapter="dbrx", forecasts=False, normalised=True),
    Family("Jamba", "jamba", continues=False, normalised=False),
    Family("Nemotron-H (Nemotron 3)", "nemotron_h"),
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
    "minimax": "transformers computes something else for a token that follows others than for the same token "
    "inside of a prompt",
    "muse_spark": "it normalises what each expert gives before that is weighted, which no kernel of tiermoe does",
    "nllb-moe": "transformers computes only its first two experts",
    "unlimited_ocr": "which tokens it attends to depends on which were given and which it wrote, and tiermoe's "
    "sequences do not keep them apart",
}
"""model_type → why no model of this family runs."""


def family_of(model_type: str, architectures: Sequence[str] = ()) -> Family:
    """The family of a config's `model_type`: an entry of the table, or a family of which nothing is stated.
    architectures: the classes that the config names, of which one may be an encoder alone. ModelError with the reason
    for a family that is refused."""
    if model_type in REFUSED:
        raise ModelError(f"models of the family '{model_type}' are refused: {REFUSED[model_type]}")
    for encoder in architectures:
        if encoder in ENCODERS:
            return ENCODERS[encoder]
    name = model_type.removesuffix("_text")
    return FAMILIES.get(model_type) or FAMILIES.get(name) or Family(name, model_type)


# decoders of our own: the rule of a family's routers, what its configs may lack, its blocks


def minimax_m3_gate(config: Any) -> ClampedGate:
    return ClampedGate(float(config.swiglu_limit), float(config.swiglu_alpha), halves=True)


def limited_silu(config: Any) -> Callable[..., Tensor]:
    """Of dense blocks (DeepSeek-V4, GLM-5 Next)."""
    return LimitedSilu(float(config.swiglu_limit)).of


def afmoe_scale(config: Any) -> float:
    """What embeddings are multiplied by (muP)."""
    return float(config.hidden_size**0.5) if config.mup_enabled else 1.0


def mistral4_temperature(config: Any) -> Temperature | None:
    """Grows with the logarithm of how often a position has the length that the model was first trained for."""
    beta, length = (config.rope_parameters.get(name) for name in _TEMPERED)
    return None if beta is None else lambda positions: 1 + beta * torch.log(1 + torch.floor(positions / length))


_TEMPERED = ("llama_4_scaling_beta", "original_max_position_embeddings")


def is_full(config: Any, layer: int) -> bool:
    """Layers without a window."""
    return bool(config.layer_types[layer] == "full_attention")


def mimo_kv_heads(config: Any, layer: int) -> int:
    """Twice as many in layers with a window."""
    return int(config.num_key_value_heads) * (1 if is_full(config, layer) else 2)


def full_exaone(config: Any, layer: int) -> bool:
    """EXAONE's and Kolibri's layers without a window, where others have one."""
    return config.sliding_window is not None and is_full(config, layer)


def unrotated_granite(config: Any, layer: int) -> bool:
    """Granite's layers of a rotary embedding by no base."""
    return not config.layer_rope_theta[layer]


_LFM2_NAMES = {
    "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm", "norm": "embedding_norm",
    "o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm",
    "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
}  # fmt: skip

_NEMOTRON_NAMES = {
    "embed_tokens": "embeddings", "norm": "norm_f", "input_layernorm": "norm", "self_attn": "mixer", "mamba": "mixer",
}  # fmt: skip

_QWEN2 = Architecture(softmax_router, shared="shared_expert", shared_gate="shared_expert_gate", window="layer")
_QWEN3_NEXT = replace(_QWEN2, window="none", centred_norm=True, gated=True)
_GLM4 = Architecture(deepseek_v3_router, shared="shared_experts", correction="gate.e_score_correction_bias")
_DEEPSEEK_V3 = replace(_GLM4, latent=True, rope="pairs")
_GLM_5 = replace(_DEEPSEEK_V3, index_rope="pairs", lacks=indexer_lacks)
_GRANITE = Architecture(
    chosen_router,
    block="block_sparse_moe",
    gate="router",
    scales=("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
)
_GRANITE_SHARED = replace(_GRANITE, shared_beside="shared_mlp")

ARCHITECTURES: dict[str, Architecture] = {
    "mixtral": Architecture(mixtral_router, window="all"),
    "qwen2_moe": _QWEN2,
    "qwen3_moe": Architecture(softmax_router, window="all"),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_moe_text": replace(_QWEN3_NEXT, router=normalising_router),
    "qwen4_exp_text": replace(_QWEN3_NEXT, streams="mixed"),
    "olmoe": Architecture(softmax_router, norm_all_heads=True),
    "flex_olmo": Architecture(
        softmax_router,
        late_norm=True,
        norm_all_heads=True,
        without_first_norms=True,
        norm_attended="post_attention_layernorm",
        norm_fed="post_feedforward_layernorm",
    ),
    "kolibri1": Architecture(
        kolibri_router,
        shared="shared_experts",
        correction="gate.e_score_correction_bias",
        window="layer",
        unrotated=full_exaone,
        norm_attended="post_self_attn_layernorm",
        norm_fed="post_mlp_layernorm",
    ),
    "phimoe": Architecture(phi_router, gate="router", layer_norm=True, window="all"),
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE_SHARED,
    "granitemoe_swa": replace(
        _GRANITE_SHARED, window="layer", sinks="all", unrotated=unrotated_granite, lacks=granite_windows_lack
    ),
    "granitemoehybrid": replace(
        _GRANITE_SHARED,
        mamba=("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
        lacks=mamba_lacks,
    ),
    "nemotron_h": Architecture(
        deepseek_v3_router,
        block="mixer",
        shared="shared_experts",
        gateless=True,
        correction="gate.e_score_correction_bias",
        latent_experts=("fc1_latent_proj", "fc2_latent_proj"),
        late_norm=True,
        mamba=("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
        mamba_least_step="time_step_min",
        names=_NEMOTRON_NAMES,
        epsilon="layer_norm_epsilon",
        one_part=True,
        lacks=mamba_lacks,
    ),
    "jamba": Architecture(
        softmax_router,
        block="feed_forward",
        gate="router",
        mamba=("mamba_expand", "mamba_d_state", "mamba_d_conv", "mamba_dt_rank"),
        mamba_1=True,
        names={"norm": "final_layernorm", "post_attention_layernorm": "pre_ff_layernorm"},
        lacks=mamba_lacks,
    ),
    "glm4_moe": _GLM4,
    "glm4_moe_lite": _DEEPSEEK_V3,
    "ernie4_5_moe": Architecture(
        ernie_router,
        shared="shared_experts",
        correction="gate.moe_statics.e_score_correction_bias",
        rope="complex",
    ),
    "dots1": replace(_GLM4, window="layer"),
    "exaone_moe": replace(_GLM4, window="layer", unrotated=full_exaone),
    "hunyuan_v1_moe": Architecture(
        hunyuan_router,
        gate="gate.wg",
        shared="shared_mlp",
        names={"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
        norms_rotated=True,
        lacks=hunyuan_lacks,
    ),
    "hy_v4": replace(
        _DEEPSEEK_V3,
        rope="halves",
        latent_gate="gate_proj",
        latent_sinks=True,
        index_rope="halves",
        index_rotates_last=True,
        index_epsilon=None,
        streams="balanced",
        lacks=indexer_lacks,
    ),
    "hy_v3": Architecture(hunyuan3_router, shared="shared_experts", correction="e_score_correction_bias"),
    "mellum": Architecture(softmax_router, window="layer"),
    "afmoe": Architecture(
        afmoe_router,
        gate="router.gate",
        shared="shared_experts",
        correction="expert_bias",
        window="layer",
        unrotated=is_full,
        late_norm=True,
        norm_by_kernel=False,
        gate_apart=True,
        norm_attended="post_attention_layernorm",
        norm_fed="post_mlp_layernorm",
        names={"post_attention_layernorm": "pre_mlp_layernorm"},
        embedding_scale=afmoe_scale,
    ),
    "minimax_m2": Architecture(minimax_router, correction="e_score_correction_bias", norm_all_heads=True),
    "minimax_m3_vl_text": Architecture(
        minimax_m3_router,
        shared="shared_experts",
        fused_gate_up=True,
        correction="gate.e_score_correction_bias",
        centred_norm=True,
        dense_gate=minimax_m3_gate,
        lacks=minimax_m3_lacks,
    ),
    "mimo_v2_flash": Architecture(
        deepseek_v3_router,
        correction="gate.e_score_correction_bias",
        window="layer",
        sinks="window",
        narrow_values=True,
        value_scale="attention_value_scale",
        kv_heads=mimo_kv_heads,
    ),
    "gemma4_text": GEMMA4,
    "gpt_oss": Architecture(
        chosen_router, gate="router", window="layer", sinks="all", late_norm=True, norm_by_kernel=False
    ),
    "solar_open": _GLM4,
    "llama4_text": LLAMA4,
    "lfm2_moe": Architecture(
        lfm2_router,
        block="feed_forward",
        correction="expert_bias",
        names=_LFM2_NAMES,
        epsilon="norm_eps",
        activation="silu",
    ),
    "deepseek": Architecture(softmax_router, shared="shared_experts"),
    "deepseek_v2": Architecture(deepseek_v2_router, shared="shared_experts", latent=True, rope="complex"),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_linear": replace(_DEEPSEEK_V3, rope="halves", kimi_delta=True),
    "bailing_hybrid": replace(_DEEPSEEK_V3, kimi_delta=True, latent_gate="g_proj"),
    "axk1": replace(_DEEPSEEK_V3, norm_fed="mlp.post_mlp_layernorm"),
    "mistral4": replace(_DEEPSEEK_V3, router=mistral4_router, correction=None, temperature=mistral4_temperature),
    "deepseek_v32": replace(_DEEPSEEK_V3, index_rope="halves", lacks=indexer_lacks),
    "deepseek_v4": Architecture(
        deepseek_v4_router,
        shared="shared_experts",
        correction="gate.e_score_correction_bias",
        table="gate.tid2eid",
        compressed=True,
        late_norm=True,
        streams="balanced",
        dense_gate=limited_silu,
        lacks=deepseek_v4_lacks,
    ),
    "glm_moe_dsa": _GLM_5,
    "glm5_next_text": replace(
        _GLM_5, kimi_delta=True, streams="balanced", narrow_epsilon=None, dense_gate=limited_silu
    ),
}
"""model_type → blocks of the families whose decoders are tiermoe's own."""


def decodes(config: Any) -> bool:
    """Whether tiermoe has a decoder of its own for models with this config."""
    return config.model_type in ARCHITECTURES and not not_computed(config)


def not_computed(config: Any) -> str:
    """The parts of a config of a family in `ARCHITECTURES` that no block computes, in words; empty: none."""
    of, name = ARCHITECTURES[config.model_type], activation_of(config)
    if name not in ACTIVATIONS or not knows_rotary(config):
        kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "unknown")
        return f"{name}, rotary embedding '{kind}'"
    return "" if of.lacks is None else of.lacks(config)


def activation_of(config: Any) -> str:
    """The name of the activation between a dense block's matrices."""
    stated = ARCHITECTURES[config.model_type].activation
    return stated or str(next(filter(None, (getattr(config, name, None) for name in _ACTIVATIONS)), None))


_ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act")
"""What configs call the activation."""
