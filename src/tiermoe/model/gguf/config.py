"""Config of transformers that a GGUF file describes, a function an architecture of llama.cpp. Sizes come from the
tensors' shapes where these tell them."""

from __future__ import annotations

from typing import Any

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile, Strings, rounded
from tiermoe.model.gguf.linear_attention import linear_config
from tiermoe.model.gguf.shapes import (
    AGAIN,
    blocks,
    dense_inner,
    dense_layers,
    experts,
    in_first_block,
    inner,
    leading_dense,
    linear_layers,
    shape,
)

Config = dict[str, Any]

_SOFTMAX, SIGMOID = 1, 2
"""`expert_gating_func`."""
_THETA = 10000.0  # of the rotary embedding where the file says nothing
_BETA_FAST, _BETA_SLOW = 32.0, 1.0  # llama.cpp's of YaRN
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
"""Tokens that end an answer whatever else the file says (`special_eog_ids` of src/llama-vocab.cpp)."""


def common(file: GgufFile) -> Config:
    """The fields that all families have."""
    return {
        "vocab_size": shape(file, "token_embd.weight", 2)[0],
        "hidden_size": file.count("embedding_length"),
        "num_hidden_layers": blocks(file),
        "num_attention_heads": file.uniform_count("attention.head_count"),
        "max_position_embeddings": file.count("context_length"),
        "rms_norm_eps": file.decimal("attention.layer_norm_rms_epsilon"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": rope_parameters(file),
        "bos_token_id": token_id(file, "bos"),
        "eos_token_id": end_ids(file) or None,
        "pad_token_id": token_id(file, "padding"),
    }


def grouped(file: GgufFile) -> Config:
    """A model with grouped-query attention."""
    heads = file.uniform_count("attention.head_count")
    return {
        **common(file),
        "num_key_value_heads": file.uniform_count("attention.head_count_kv", heads),
        "head_dim": file.count("attention.key_length", file.count("embedding_length") // heads, least=1),
    }


def partly_turned(file: GgufFile) -> Config:
    """A model with partial rotary embedding: some columns of each head are rotated."""
    config = grouped(file)
    share = file.count("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    config["rope_parameters"]["partial_rotary_factor"] = share
    return config


def qwen3moe(file: GgufFile) -> Config:
    return {
        **grouped(file),
        "model_type": "qwen3_moe",
        "num_experts": experts(file),
        "moe_intermediate_size": inner(file),
        "intermediate_size": dense_inner(file),
        "mlp_only_layers": dense_layers(file),
        "norm_topk_prob": True,  # models/qwen3moe.cpp
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def qwen2moe(file: GgufFile) -> Config:
    return {
        **grouped(file),
        "model_type": "qwen2_moe",
        "num_experts": experts(file),
        "moe_intermediate_size": inner(file),
        "shared_expert_intermediate_size": in_first_block(file, "ffn_gate_shexp.weight", 2)[0],
        "intermediate_size": dense_inner(file),
        "mlp_only_layers": dense_layers(file),
        "norm_topk_prob": False,  # models/qwen2moe.cpp
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def mixtral(file: GgufFile) -> Config:
    return {
        **grouped(file),
        "model_type": "mixtral",
        "num_local_experts": experts(file),
        "intermediate_size": inner(file),
        "sliding_window": None,
    }


def olmoe(file: GgufFile) -> Config:
    return {
        **grouped(file),
        "model_type": "olmoe",
        "num_experts": experts(file),
        "intermediate_size": inner(file),
        "clip_qkv": file.decimal("attention.clamp_kqv", None),
        "norm_topk_prob": False,  # models/olmoe.cpp
    }


def gpt_oss(file: GgufFile) -> Config:
    config = grouped(file)
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False  # as OpenAI's configs say
    layers = range(config["num_hidden_layers"])
    return {
        **config,
        "model_type": "gpt_oss",
        "num_local_experts": experts(file),
        "intermediate_size": inner(file),
        "sliding_window": file.count("attention.sliding_window"),
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in layers],
    }


def deepseek(file: GgufFile) -> Config:
    if (scale := file.decimal("expert_weights_scale", 1.0)) != 1.0:
        raise ModelError(f"{file.path} scales its experts' weights by {scale:g}, which no DeepSeekMoE does")
    return {
        **grouped(file),
        "model_type": "deepseek",
        "n_routed_experts": experts(file),
        "n_shared_experts": file.count("expert_shared_count"),
        "moe_intermediate_size": inner(file),
        "intermediate_size": dense_inner(file),
        "first_k_dense_replace": leading_dense(file),
        "norm_topk_prob": False,  # models/deepseek.cpp
    }


def latent(file: GgufFile) -> Config:
    """A model with latent attention."""
    rotary = file.count("rope.dimension_count")
    key = file.count("attention.key_length_mla", file.count("attention.key_length"))
    return {
        **common(file),
        "num_key_value_heads": file.uniform_count("attention.head_count"),
        "q_lora_rank": file.count("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": file.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": file.count("attention.value_length_mla", file.count("attention.value_length")),
        "n_routed_experts": experts(file),
        "n_shared_experts": file.count("expert_shared_count"),
        "moe_intermediate_size": inner(file),
        "intermediate_size": dense_inner(file),
        "first_k_dense_replace": leading_dense(file),
        "routed_scaling_factor": file.decimal("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(file.of_model("expert_weights_norm", False)),
        "n_group": file.count("expert_group_count", 1),
        "topk_group": file.count("expert_group_used_count", 1),
    }


def deepseek2(file: GgufFile) -> Config:
    corrected = any(name.endswith("exp_probs_b.bias") for name in file.tensors)  # no DeepSeek-V2 is
    sigmoid = file.count("expert_gating_func", SIGMOID if corrected else _SOFTMAX) == SIGMOID
    config = latent(file)
    if sigmoid:
        return {**config, "model_type": "deepseek_v3"}
    if config["norm_topk_prob"]:
        raise ModelError(f"{file.path} scales a softmax router's weights to a fixed sum, which no DeepSeek-V2 does")
    return {
        **config,
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy" if config["n_group"] > 1 else "greedy",
    }


def kimi_linear(file: GgufFile) -> Config:
    config = latent(file)
    del config["rope_parameters"]  # no layer has positions
    linear = linear_layers(file)
    if True not in linear:
        raise ModelError(f"{file.path} has no layer of linear attention, which every Kimi Linear has; {AGAIN}")
    first, dense = linear.index(True), config.pop("first_k_dense_replace")
    return {
        **config,
        "model_type": "kimi_linear",
        "num_local_experts": config.pop("n_routed_experts"),
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (len(linear) - dense),
        "norm_topk_prob": True,  # models/kimi-linear.cpp
        "layer_types": ["linear_attention" if each else "full_attention" for each in linear],
        "linear_head_dim": file.count("kda.head_dim"),
        "linear_num_heads": shape(file, f"blk.{first}.ssm_beta.weight", 2)[0],
        "linear_conv_kernel_dim": file.count("ssm.conv_kernel"),
    }


def mistral4(file: GgufFile) -> Config:
    config = latent(file)
    rope = config["rope_parameters"]
    if rope["rope_type"] != "yarn":
        raise ModelError(f"{file.path} does not scale its rotary embedding by yarn, which every Mistral 4 does")
    rope["llama_4_scaling_beta"] = file.decimal("attention.temperature_scale")
    return {**config, "model_type": "mistral4"}


def qwen35moe(file: GgufFile) -> Config:
    """Qwen3.5, and Qwen3-Next where all layers have experts."""
    if dense := dense_layers(file):
        raise ModelError(
            f"{file.path} has layers without experts ({', '.join(map(str, dense))}), which no Qwen3-Next or Qwen3.5 "
            f"that was published has; take the model's safetensors"
        )
    return {
        **partly_turned(file),
        **linear_config(file),
        "model_type": "qwen3_5_moe_text",
        "num_experts": experts(file),
        "moe_intermediate_size": inner(file),
        "shared_expert_intermediate_size": in_first_block(file, "ffn_gate_shexp.weight", 2)[0],
    }


def glm4moe(file: GgufFile) -> Config:
    return {
        **partly_turned(file),
        "model_type": "glm4_moe",
        "n_routed_experts": experts(file),
        "n_shared_experts": file.count("expert_shared_count"),
        "moe_intermediate_size": inner(file),
        "intermediate_size": dense_inner(file),
        "first_k_dense_replace": leading_dense(file),
        "routed_scaling_factor": file.decimal("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(file.of_model("expert_weights_norm", False)),
        "n_group": file.count("expert_group_count", 1),
        "topk_group": file.count("expert_group_used_count", 1),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def exaone_moe(file: GgufFile) -> Config:
    return {
        **grouped(file),
        "model_type": "exaone_moe",
        "num_experts": experts(file),
        "num_shared_experts": file.count("expert_shared_count"),
        "moe_intermediate_size": inner(file),
        "intermediate_size": dense_inner(file),
        "first_k_dense_replace": leading_dense(file),
        "routed_scaling_factor": file.decimal("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(file.of_model("expert_weights_norm", False)),
        "sliding_window": file.count("attention.sliding_window"),
        "layer_types": window_layers(file),
    }


def afmoe(file: GgufFile) -> Config:
    sigmoid = file.count("expert_gating_func", SIGMOID) == SIGMOID
    if not sigmoid or not file.of_model("expert_weights_norm", True):
        raise ModelError(f"{file.path} has no sigmoid router whose weights sum to 1, which every AFMoE has; {AGAIN}")
    return {
        **grouped(file),
        "model_type": "afmoe",
        "num_experts": experts(file),
        "num_shared_experts": file.count("expert_shared_count"),
        "moe_intermediate_size": inner(file),
        "intermediate_size": dense_inner(file),
        "num_dense_layers": leading_dense(file),
        "route_scale": file.decimal("expert_weights_scale", 1.0),
        "sliding_window": file.count("attention.sliding_window"),
        "global_attn_every_n_layers": 4,  # models/afmoe.cpp, as the next
        "mup_enabled": True,
    }


def hunyuan_moe(file: GgufFile) -> Config:
    return {
        **grouped(file),
        "model_type": "hunyuan_v1_moe",
        "num_experts": experts(file),
        "intermediate_size": inner(file),
    }


def lfm2moe(file: GgufFile) -> Config:
    convolution = [f"blk.{layer}.shortconv.conv.weight" in file.tensors for layer in range(blocks(file))]
    first = leading_dense(file)
    config = common(file)
    return {
        **config,
        "model_type": "lfm2_moe",
        "num_key_value_heads": file.largest("attention.head_count_kv"),  # convolutions have none
        "norm_eps": config["rms_norm_eps"],
        "layer_types": ["conv" if each else "full_attention" for each in convolution],
        "conv_L_cache": file.count("shortconv.l_cache"),
        "num_dense_layers": first,
        "num_experts": experts(file),
        "moe_intermediate_size": inner(file),
        "intermediate_size": dense_inner(file),
        "use_expert_bias": f"blk.{first}.exp_probs_b.bias" in file.tensors,
        "norm_topk_prob": True,  # models/lfm2moe.cpp
    }


def granitemoe(file: GgufFile) -> Config:
    if not rotates(file):
        raise ModelError(f"{file.path} has no rotary embedding, which every GraniteMoE has; {AGAIN}")
    shared = "blk.0.ffn_gate_shexp.weight"
    return {
        **granite(file),
        "model_type": "granitemoeshared",
        "shared_intermediate_size": shape(file, shared, 2)[0] if shared in file.tensors else 0,
    }


def granite(file: GgufFile) -> Config:
    """Fields of Granite models."""
    config = common(file)
    return {
        **config,
        "num_key_value_heads": file.largest("attention.head_count_kv"),  # layers of Mamba-2 have none
        "num_local_experts": experts(file),
        "intermediate_size": inner(file),
        "attention_multiplier": file.decimal(
            "attention.scale", (config["hidden_size"] // config["num_attention_heads"]) ** -0.5
        ),
        "embedding_multiplier": file.decimal("embedding_scale", 1.0),
        "residual_multiplier": file.decimal("residual_scale", 1.0),
        "logits_scaling": file.decimal("logit_scale"),
    }


def granite_swa(file: GgufFile) -> Config:
    """GraniteMoE with sliding windows. ModelError where the file does not say which layers have a window, or says of
    some alone whether they have a rotary embedding. Where it says nothing of these, all have one."""
    config, shared = granite(file), "blk.0.ffn_down_shexp.weight"
    count, base = blocks(file), config["rope_parameters"]["rope_theta"]
    rotated = file.of_model("attention.rope_pattern", [True] * count)
    if not isinstance(rotated, list) or len(rotated) < count:
        raise ModelError(f"{file.path} does not say which of its layers have a rotary embedding; {AGAIN}")
    return {
        **config,
        "model_type": "granitemoe_swa",
        "shared_intermediate_size": shape(file, shared, 2)[1] if shared in file.tensors else 0,
        "sliding_window": file.count("attention.sliding_window", least=1),
        "layer_types": window_layers(file),
        "layer_rope_theta": [base if each else 0 for each in rotated[:count]],
    }


def rotates(file: GgufFile) -> bool:
    """Whether a Granite model's queries and keys are rotated (models/granite.cpp)."""
    return bool(file.of_model("rope.scaling.finetuned", True))


def ernie45moe(file: GgufFile) -> Config:
    first = leading_dense(file)
    return {
        **grouped(file),
        "model_type": "ernie4_5_moe",
        "moe_num_experts": experts(file),
        "moe_num_shared_experts": file.count("expert_shared_count", 0),
        "moe_intermediate_size": inner(file),
        "intermediate_size": dense_inner(file),
        "moe_layer_start_index": first,
        "moe_layer_end_index": blocks(file) - 1,
        "moe_layer_interval": 1,
    }


# parts of several configs


def window_layers(file: GgufFile) -> list[str]:
    """`layer_types` of a config by which layers have a window. ModelError where the file does not say."""
    slides, count = file.of_model("attention.sliding_window_pattern"), blocks(file)
    if not isinstance(slides, list) or len(slides) < count:
        raise ModelError(f"{file.path} does not say which of its layers have a window; {AGAIN}")
    return ["sliding_attention" if each else "full_attention" for each in slides[:count]]


def rope_parameters(file: GgufFile) -> dict[str, Any]:
    """`rope_parameters` of a config. ModelError for a scaling that is not linear or YaRN."""
    theta = file.decimal("rope.freq_base", _THETA)
    kind = file.of_model("rope.scaling.type", "none")
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        found |= {"rope_type": "linear", "factor": file.decimal("rope.scaling.factor")}
    elif kind == "yarn":
        found |= _yarn(file)
    elif kind != "none":
        raise ModelError(f"{file.path} scales its rotary embedding by '{kind}'; linear and yarn are computed")
    return found


def _yarn(file: GgufFile) -> dict[str, Any]:
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
        if (factor := file.decimal(key, 1.0)) != 1.0:
            raise ModelError(f"{file.path} sets {key} to {factor:g}, which tiermoe does not compute")
    found = {
        "rope_type": "yarn",
        "factor": file.decimal("rope.scaling.factor"),
        "original_max_position_embeddings": file.count("rope.scaling.original_context_length"),
        "beta_fast": file.decimal("rope.scaling.yarn_beta_fast", _BETA_FAST),
        "beta_slow": file.decimal("rope.scaling.yarn_beta_slow", _BETA_SLOW),
    }
    if multiplier := file.decimal("rope.scaling.yarn_log_multiplier", 0.0):  # DeepSeek's mscale_all_dim, a tenth of it
        scale = rounded(10 * multiplier)
        found |= {"mscale": scale, "mscale_all_dim": scale}
    return found


def end_ids(file: GgufFile) -> list[int]:
    """Ids of the tokens that end an answer, the file's end token first."""
    tokens = file.strings("tokenizer.ggml.tokens")
    found = [token_id(file, name) for name in ("eos", "eot", "eom")]
    there = {token: index for index, token in enumerate(tokens) if token in _ENDS}
    if "<|return|>" in there and "<|call|>" in there:  # gpt-oss: it ends a message, not the answer
        there.pop("<|end|>", None)
    return list(dict.fromkeys([*(token for token in found if token is not None), *there.values()]))


def token_id(file: GgufFile, name: str) -> int | None:
    """The id of a token that the file names ('bos', 'eos', 'padding', …); None where it names none of its own."""
    token = file.entries.get(f"tokenizer.ggml.{name}_token_id")
    tokens = file.entries.get("tokenizer.ggml.tokens")
    return token if isinstance(token, int) and isinstance(tokens, Strings) and 0 <= token < tokens.count else None
