"""Tiny random checkpoints of every family, written by transformers' own `save_pretrained`."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
)
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated

from tiermoe.model.families import FAMILIES
from tiermoe.model.hf import configuration_deepseek, modeling_deepseek

configuration_deepseek.register()
modeling_deepseek.register()

_SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "sliding_window": 6,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "num_shared_experts": 1, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "index_topk": 4, "index_head_dim": 16, "index_n_heads": 16, "hc_mult": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_head_dim": 16, "linear_num_heads": 4, "mamba_d_state": 8,
}  # fmt: skip
"""What a small config has of the entries that its family knows."""
_GRANITE = {
    "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "shared_intermediate_size": 48,
    "embedding_multiplier": 6.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0,
}  # fmt: skip

# as published where transformers (5.22) normalises all groups of Granite 4 together
GRANITE_GROUPS = 2 if "group_size" in inspect.signature(GraniteMoeHybridRMSNormGated).parameters else 1

_SCALES = ("router.scale", "per_expert_scale", "operator_norm.weight", "q_layernorm.weight")

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
"""A chat template that shows roles by their first letter."""

CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": None,
        "sliding_window": None,
    },
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": None},
    "qwen2_moe": {"num_experts_per_tok": 4, "shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
    "qwen3_moe": {"head_dim": 16},
    "qwen3_next": {
        "shared_expert_intermediate_size": 64, "mlp_only_layers": [1], "linear_value_head_dim": 32,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "qwen3_5_moe_text": {
        "shared_expert_intermediate_size": 64, "linear_value_head_dim": 32,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "qwen4_exp_text": {
        "shared_expert_intermediate_size": 64, "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2,
        "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4,
        "ple_layer_ids": [1, 3], "ple_embed_dim": 32, "ngram_vocab_size_base": 64, "heads_per_ngram": 2,
        "split_ngram_parts": 2, "make_ngram_vocab_size_divisible_by": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "olmoe": {"num_experts_per_tok": 5, "intermediate_size": 32},
    "flex_olmo": {"intermediate_size": 32},
    "kolibri1": {"norm_topk_prob": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "deepseek": {"n_shared_experts": 2},
    "deepseek_v2": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "topk_method": "greedy", "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4,
        "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": None,
        "topk_group": None,
    },
    "deepseek_v3": {"num_experts_per_tok": 4, "n_group": 2, "num_key_value_heads": 4},
    "deepseek_v32": {"num_experts_per_tok": 4, "n_group": 2, "index_topk": 6, "num_key_value_heads": 4},
    "deepseek_v4": {
        "intermediate_size": 32, "num_key_value_heads": 1, "o_lora_rank": 16, "o_groups": 2, "hc_sinkhorn_iters": 3,
        "partial_rotary_factor": 0.5, "sliding_window": 32, "mlp_layer_types": ["hash_moe", "hash_moe", "moe"],
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "gemma4_text": {
        "enable_moe_block": True, "top_k_experts": 3, "global_head_dim": 32, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": 20.0,
    },
    "glm4_moe": {"head_dim": 16},
    "axk1": {"num_experts_per_tok": 4, "n_group": 2, "num_key_value_heads": 4},
    "afmoe": {
        "route_scale": 2.5, "mup_enabled": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "glm4_moe_lite": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4, "first_k_dense_replace": 1,
        "moe_intermediate_size": 32, "n_shared_experts": 1, "head_dim": 8,
    },
    "glm_moe_dsa": {"index_topk": 6, "indexer_types": ["full", "shared", "full"], "num_key_value_heads": 4},
    "glm5_next_text": {
        "qk_rope_head_dim": 0, "index_kpool": 2,
        "layer_types": ["indexed_attention", "linear_attention", "indexed_attention"], "hc_sinkhorn_iters": 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "swiglu_limit": 1.0, "rms_norm_eps": 1e-3,
        "num_key_value_heads": 4, "first_k_dense_replace": 1,
    },
    "ernie4_5_moe": {"moe_k": 3, "moe_num_shared_experts": 2},
    "dots1": {"norm_topk_prob": True, "max_window_layers": 2},
    "exaone_moe": {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "llama4_text": {
        "num_experts_per_tok": 1, "intermediate_size": 32, "intermediate_size_mlp": 64, "moe_layers": [0, 2],
        "no_rope_layers": [1, 0, 1], "attention_chunk_size": 6, "floor_scale": 10, "attn_scale": 0.5,
    },
    "kimi_linear": {
        "q_lora_rank": None, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "n_group": 2,
        "num_key_value_heads": 4, "first_k_dense_replace": 1,
    },
    "bailing_hybrid": {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
        "head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "first_k_dense_replace": 2, "q_lora_rank": None,
    },
    "hunyuan_v1_moe": {
        "moe_topk": 3, "intermediate_size": 32,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 100.0},
    },
    "hy_v4": {
        "index_topk": 6, "indexer_types": ["full", "shared", "full"], "hc_magnitude": 1.5,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "swiglu_limit": 1.0, "rms_norm_eps": 1e-3, "hc_eps": 0.01,
        "num_key_value_heads": 4, "first_k_dense_replace": 1,
    },
    "hy_v3": {},
    "mellum": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "mistral4": {
        "num_experts_per_tok": 4, "n_group": 2,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 9,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
        },
        "num_key_value_heads": 4,
    },
    "solar_open": {},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "routed_scaling_factor": 1.5},
    "gpt_oss": {
        "num_local_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 64, "head_dim": 16,
        "sliding_window": 128,
    },
    "granitemoe": {"num_experts_per_tok": 2, "intermediate_size": 32},
    "granitemoeshared": _GRANITE,
    "granitemoe_swa": {
        **_GRANITE, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "layer_rope_theta": [0, 1e4, 1e4],
    },
    "granitemoehybrid": {
        **_GRANITE, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "mamba_n_heads": 8,
        "mamba_d_head": 16, "mamba_n_groups": GRANITE_GROUPS, "mamba_chunk_size": 4,
    },
    "jamba": {
        "intermediate_size": 32, "num_hidden_layers": 4, "expert_layer_period": 2, "expert_layer_offset": 1,
        "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_dt_rank": 4,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe", "mlp"],
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16,
        "moe_shared_expert_intermediate_size": 48, "moe_latent_size": 32, "routed_scaling_factor": 2.5,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 4,
        "sliding_window": None,
    },
    "minimax_m2": {"intermediate_size": 32},
    "mimo_v2_flash": {
        "num_experts_per_tok": 4, "num_key_value_heads": 1, "head_dim": 24,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "minimax_m3_vl_text": {
        "intermediate_size": 32, "dense_intermediate_size": 64, "index_n_heads": 2, "index_block_size": 4,
        "index_topk_blocks": 2, "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "swiglu_limit": 1.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "switch_transformers": {
        "d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 4, "num_hidden_layers": 4,
        "num_decoder_layers": 4, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "expert_capacity": 4,
        "decoder_start_token_id": 0,
    },
}  # fmt: skip
"""model_type → entries beside `_SMALL`, of the families that tests of parity run."""


class Glm5Next(AutoModelForMultimodalLM):
    """The whole model, made of its text part's config: transformers has no class for the text part alone."""

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Any:
        sees = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
        whole = AutoConfig.for_model("glm5_next", text_config=config.to_dict(), vision_config=sees)
        return AutoModelForMultimodalLM.from_config(whole, **options)


def auto_class(model_type: str) -> Any:
    others = {
        "switch_transformers": AutoModelForSeq2SeqLM, "mistral4": AutoModelForMultimodalLM, "glm5_next_text": Glm5Next,
    }  # fmt: skip
    return others.get(model_type, AutoModelForCausalLM)


def known(cls: Any, entries: dict[str, Any]) -> dict[str, Any]:
    """The entries that a class of configs has."""
    names = {*inspect.signature(cls).parameters, *cls.attribute_map}
    return {name: value for name, value in entries.items() if name in names}


def config_of(model_type: str, **changes: Any) -> Any:
    """transformers' config of a tiny model."""
    own, cls = {**CONFIGS.get(model_type, {}), **changes}, CONFIG_MAPPING[model_type]
    usual = {name: value for name, value in known(cls, _SMALL).items() if cls.attribute_map.get(name) not in own}
    return AutoConfig.for_model(model_type, **copy.deepcopy({**usual, **own}))  # configs write into what they are given


def write(
    directory: Path, model_type: str, dtype: torch.dtype, shard: str = "5GB", seed: int = 0, **changes: Any
) -> Path:
    """Writes a random checkpoint (`make_random`) into `directory` and returns it."""
    torch.manual_seed(seed)
    config = config_of(model_type, **changes)
    model = auto_class(model_type).from_config(config, dtype=dtype, experts_implementation="eager")
    make_random(model)
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):  # as published, whatever transformers keeps in float32
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(directory, max_shard_size=shard)
    write_tokenizer(directory)
    return directory


def make_random(model: Any) -> None:
    """Gives a model weights that are large enough that routing and logits are not flat."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
            elif "bias" in name or not parameter.any():  # norms that add one
                torch.nn.init.normal_(parameter, std=0.05)
            elif name.endswith(_SCALES) or "feedforward_layernorm" in name or "mlp_layernorm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(len(buffer), model.config.num_local_experts).argsort(1)[:, : buffer.shape[1]])
            elif name.endswith(("e_score_correction_bias", "expert_bias")):
                torch.nn.init.normal_(buffer, std=0.05)
            elif name.endswith("layer_scalar"):
                buffer.fill_(0.75)


def write_tokenizer(directory: Path, vocabulary: int = 128) -> None:
    """A tokenizer of single bytes, enough to run the commands on a tiny model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(33, 127)]
    words = ["<pad>", "<s>", "</s>", "<unk>", "Ġ", *letters, "Ċ"]
    words += [f"<extra{index}>" for index in range(vocabulary - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            pre_tokenizers.Split("", "isolated"),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(directory)


def oracle(directory: Path, model_type: str, dtype: torch.dtype) -> Any:
    """The plain model: transformers' eager experts. Its weights are copied into memory of their own: where a
    checkpoint is mapped they may lie at any address, and matrix products round differently at another alignment."""
    model = auto_class(model_type).from_pretrained(directory, dtype=dtype, experts_implementation="eager")
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval()


OWN_DECODERS = sorted(name for name, family in FAMILIES.items() if family.decodes)
"""model_types of the families with a decoder of our own."""
