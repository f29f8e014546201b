"""Small models that tests have as GGUF files: a family, and changes of its small config (`tiny`).

llama.cpp's converter wrote a header of each (`golden/gguf`): `python tests/golden/remake.py` after a change here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import tiny


@dataclass(frozen=True)
class Case:
    family: str
    changes: dict[str, Any]
    head: bool = False  # whether the last layer is that of an MTP head


_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
         "beta_slow": 1.0, "factor": 4.0}  # fmt: skip
_SCALED = {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24,
         "short_factor": [1 + i / 8 for i in range(8)], "long_factor": [1 + i for i in range(8)],
         "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 16.0, "low_freq_factor": 1.0,
           "high_freq_factor": 1.0, "original_max_position_embeddings": 8192}  # fmt: skip
"""Of Llama 4 Scout, but for the base."""
_WINDOWED = {"rope_type": "default", "rope_theta": 1e4}
_LINEAR = ["linear_attention", "linear_attention", "full_attention"]
_FULL, _SHARED = "full", "shared"
_QWEN4 = {
    "output_gate_type": "sigmoid", "hc_lowrank": 32, "ple_layer_ids": [1], "ple_embed_dim": 128,
    "linear_value_head_dim": 32, "linear_num_value_heads": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}  # fmt: skip
_LLAMA4 = {
    "num_hidden_layers": 4, "interleave_moe_layer_step": 2, "moe_layers": None, "no_rope_layers": None,
    "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1,
}  # fmt: skip
_QWEN3 = {"norm_topk_prob": True, "mlp_only_layers": []}
_NARROW = {**_QWEN3, "hidden_size": 64, "moe_intermediate_size": 64}
"""Rows and columns that 3 and 2 bits take."""
_WIDE = {**_QWEN3, "hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
"""Rows of whole blocks of every type."""
_NEMOTRON = {"max_position_embeddings": 1 << 20}  # the converter writes no other

CASES: dict[str, Case] = {name: Case(*each) for name, each in {
    "qwen3_moe": ("qwen3_moe", _QWEN3),
    "qwen3_moe tied": ("qwen3_moe", {**_QWEN3, "tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {"mlp_only_layers": []}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 32, "rope_parameters": {**_YARN, "truncate": False}}),
    "deepseek": ("deepseek", {}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 lite": ("deepseek_v2", {"q_lora_rank": None, "rope_parameters": _SCALED}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v32": ("deepseek_v32", {}),
    "deepseek_v32 yarn": ("deepseek_v32", {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek_v4": ("deepseek_v4", {"swiglu_limit": 0.5, "index_topk": 3, "sliding_window": 16}),
    "deepseek_v4 yarn": ("deepseek_v4", {
        "rope_parameters": _YARN, "scoring_func": "sigmoid", "layer_types": ["compressed_sparse_attention"] * 3,
    }),
    "hy_v4": ("hy_v4", {"index_topk": 10}),
    "hy_v4 yarn": ("hy_v4", {"rope_parameters": _SCALED, "indexer_types": [_FULL] * 3}),
    "qwen3_next": ("qwen3_next", {"mlp_only_layers": [], "linear_num_value_heads": 6}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"linear_num_value_heads": 6}),
    "qwen4_exp": ("qwen4_exp_text", _QWEN4),
    "qwen4_exp of longer n-grams": ("qwen4_exp_text", {
        **_QWEN4, "ple_layer_ids": [3], "ngram_size": 4, "ple_embed_dim": 192, "ple_conv_kernel_size": 3, "seed": 77,
        "make_ngram_vocab_size_divisible_by": 128, "hc_count": 3, "indexer_compress_ratio": 2,
        "linear_num_value_heads": 4, "tie_word_embeddings": True,
    }),
    "qwen4_exp without n-grams": ("qwen4_exp_text", {**_QWEN4, "ple_layer_ids": [], "linear_num_value_heads": 4}),
    "kimi_linear": ("kimi_linear", {"n_group": 1, "topk_group": 1, "linear_head_dim": 32}),
    "glm5_next": ("glm5_next_text", {"linear_head_dim": 32, "linear_lower_bound": -2.0, "swiglu_limit": 0.5}),
    "glm5_next of shared choices": ("glm5_next_text", {
        "linear_lower_bound": None, "layer_types": ["linear_attention", *["indexed_attention"] * 2], "hc_eps": 1e-5,
        "indexer_types": [_FULL, _FULL, _SHARED], "routed_scaling_factor": 1.7,
    }),
    "ling3": ("bailing_hybrid", {"head_dim": 32, "kda_lower_bound": -3.3, "layer_types": _LINEAR}),
    "phimoe": ("phimoe", {"attention_bias": True, "lm_head_bias": True, "rope_parameters": _LONG}),
    "phimoe without biases": ("phimoe", {"sliding_window": 7}),
    "dots1": ("dots1", {
        "sliding_window": None, "head_dim": 32, "routed_scaling_factor": 1.5, "n_shared_experts": 2,
    }),
    "dots1 with biases": ("dots1", {"sliding_window": None, "attention_bias": True, "norm_topk_prob": False}),
    "glm4_moe": ("glm4_moe", {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 1.5}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
    "glm_moe_dsa of wide indexers alone": ("glm_moe_dsa", {"indexer_types": [_FULL] * 3, "index_n_heads": 64}),
    "glm_moe_dsa of 8 layers": ("glm_moe_dsa", {"num_hidden_layers": 8, "indexer_types": [_FULL] * 8}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "minimax_m2": ("minimax_m2", {}),
    "minimax_m3": ("minimax_m3_vl_text", {"swiglu_limit": 7.0}),
    "minimax_m3 of other blocks": ("minimax_m3_vl_text", {
        "swiglu_limit": 7.0, "index_block_size": 3, "index_topk_blocks": 3, "index_local_blocks": 2,
        "shared_intermediate_size": 64,
    }),
    "mimo_v2_flash": ("mimo_v2_flash", {"attention_value_scale": 0.5, "sliding_window": 7}),
    "mistral4": ("mistral4", {}),
    "exaone_moe": ("exaone_moe", {}),
    "afmoe": ("afmoe", {"num_hidden_layers": 4, "layer_types": None}),
    "llama4": ("llama4_text", _LLAMA4),
    "llama4 of other layers": ("llama4_text", {
        **_LLAMA4, "interleave_moe_layer_step": 1, "tie_word_embeddings": True, "rope_parameters": _LLAMA3,
    }),
    "llama4 of 128 experts": ("llama4_text", {
        **_LLAMA4, "num_local_experts": 128, "use_qk_norm": False, "intermediate_size": 8, "head_dim": 64,
        "rope_parameters": {**_LLAMA3, "rope_theta": 500000.0, "factor": 8.0},
    }),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "hy_v3": ("hy_v3", {"router_scaling_factor": 1.5, "mlp_layer_types": ["dense", "dense", "sparse"]}),
    "hy_v3 of more shared experts": ("hy_v3", {"num_shared_experts": 2, "mlp_layer_types": ["sparse"] * 3}),
    "mellum": ("mellum", {"rope_parameters": {
        "full_attention": {**_YARN, "rope_theta": 500000.0}, "sliding_attention": _WINDOWED,
    }}),
    "mellum of another factor": ("mellum", {"rope_parameters": {
        "full_attention": {**_YARN, "attention_factor": 1.5}, "sliding_attention": _WINDOWED,
    }}),
    "mellum without windows": ("mellum", {"layer_types": ["full_attention"] * 3, "sliding_window": None}),
    "gemma4": ("gemma4_text", {}),
    "gemma4 with values of their own": ("gemma4_text", {
        "attention_k_eq_v": False, "num_global_key_value_heads": None, "final_logit_softcapping": None,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "tie_word_embeddings": False,
    }),
    "lfm2_moe": ("lfm2_moe", {"routed_scaling_factor": 1.0}),  # the converter writes no other
    "granitemoe": ("granitemoeshared", {"shared_intermediate_size": 0, "residual_multiplier": 0.5}),
    "granitemoeshared": ("granitemoeshared", {"shared_intermediate_size": 64, "attention_multiplier": 0.2}),
    "granitemoehybrid": ("granitemoehybrid", {"shared_intermediate_size": 64, "max_position_embeddings": 1 << 20}),
    "granitemoe_swa": ("granitemoe_swa", {"sliding_window": 7, "shared_intermediate_size": 64}),
    "granitemoe_swa with positions everywhere": ("granitemoe_swa", {"layer_rope_theta": None}),
    "jamba": ("jamba", {}),
    "jamba of other periods": ("jamba", {
        "attn_layer_period": 8, "attn_layer_offset": 2, "expert_layer_period": 1, "expert_layer_offset": 0,
    }),
    "nemotron_h": ("nemotron_h", _NEMOTRON),
    "nemotron_h without latents": ("nemotron_h", {
        **_NEMOTRON, "moe_latent_size": None, "tie_word_embeddings": True,
    }),
}.items()}  # fmt: skip
"""Name → a model whose file is compared with transformers in all that `test_gguf_models` has."""

_HEADED = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
           "moe_intermediate_size": 64, "intermediate_size": 64, "num_hidden_layers": 4}  # fmt: skip
_LATENT_HEADED = {name: value for name, value in _HEADED.items() if name != "head_dim"} | {"num_key_value_heads": 4}
_MIXED = {"layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2],
          "mlp_layer_types": ["dense", "sparse", "sparse", "dense"]}  # fmt: skip

OTHERS: dict[str, Case] = {
    "qwen3_moe of 4096 tokens": Case("qwen3_moe", {**_QWEN3, "vocab_size": 4096}),
    "qwen3_moe of 4096 tokens, tied": Case("qwen3_moe", {**_QWEN3, "vocab_size": 4096, "tie_word_embeddings": True}),
    "qwen3_moe, narrow": Case("qwen3_moe", _NARROW),
    "qwen3_moe, narrow, of 2 layers": Case("qwen3_moe", {**_NARROW, "num_hidden_layers": 2}),
    "qwen3_moe, narrow, of 4096 tokens": Case("qwen3_moe", {**_NARROW, "vocab_size": 4096}),
    "qwen3_moe, wide": Case("qwen3_moe", _WIDE),
    "qwen3_moe of 100 M weights": Case("qwen3_moe", {
        **_WIDE, "vocab_size": 4096, "hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 64,
    }),
    "qwen3_5_moe of wide heads": Case("qwen3_5_moe_text", {
        **dict.fromkeys(("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 256),
        "linear_num_value_heads": 6, "linear_value_head_dim": 128, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    }),
    "deepseek_v3 of 64 columns": Case("deepseek_v3", {"kv_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}),
    "gemma4 of 64 columns": Case("gemma4_text", {"moe_intermediate_size": 64}),
    "llama4 of 8192 tokens": Case("llama4_text", {
        **_LLAMA4, "vocab_size": 8192, "hidden_size": 512, "rope_parameters": _LLAMA3,
    }),
    "glm4_moe with a head": Case("glm4_moe", _HEADED, head=True),
    "exaone_moe with a head": Case("exaone_moe", {**_HEADED, **_MIXED}, head=True),
    "mimo_v2_flash with a head": Case("mimo_v2_flash", {**_HEADED, **_MIXED}, head=True),
    "hy_v3 with a head": Case("hy_v3", _HEADED, head=True),
    "glm4_moe_lite with a head": Case("glm4_moe_lite", _LATENT_HEADED, head=True),
    # all positions are chosen: of some, bfloat16 chooses others than float32
    "glm_moe_dsa with a head": Case("glm_moe_dsa", {
        **_LATENT_HEADED, "index_topk": 64, "indexer_types": [_FULL, _SHARED, _FULL, _FULL],
    }, head=True),
    "deepseek_v32 with a head": Case("deepseek_v32", {**_LATENT_HEADED, "index_topk": 64}, head=True),
}  # fmt: skip
"""Models of other tests."""


def case_of(name: str) -> Case:
    return CASES.get(name) or OTHERS[name]


def random_model(case: Case, **changes: Any) -> Any:
    """transformers' eager model with random weights in float32."""
    torch.manual_seed(0)
    config = tiny.config_of(case.family, **{**case.changes, **changes})
    model = tiny.auto_class(case.family).from_config(config, dtype=torch.float32, experts_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                torch.nn.init.normal_(buffer, std=0.05)
            elif name.endswith("layer_scalar"):
                torch.nn.init.uniform_(buffer, 0.5, 1.5)
            elif name.endswith("tid2eid"):
                buffer.copy_(torch.stack([torch.randperm(8)[: buffer.shape[1]] for _ in range(len(buffer))]))
    return model
