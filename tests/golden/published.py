"""Small checkpoints as models of their families are published: llama.cpp's converter reads config entries and names of
parameters that transformers has replaced by its own."""

from __future__ import annotations

from typing import Any

import torch

import mtp_models
from gguf_cases import Case

Config = dict[str, Any]
Tensors = dict[str, Any]


def published(case: Case, config: Config, tensors: Tensors) -> None:
    """Changes what transformers has saved, in place."""
    if case.head:
        mtp_models.publish_head(case.family, config, tensors)
    if case.family in _SCORES:
        config["scoring_func"] = _SCORES[case.family]
    if (own := globals().get(f"_{case.family}")) is not None:
        own(config, tensors, config.get("layer_types") or [])


_SCORES = {
    "deepseek_v2": "softmax",
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "dots1", "kimi_linear", "exaone_moe"), "sigmoid"),
    **dict.fromkeys(("afmoe", "minimax_m2", "minimax_m3_vl_text", "mimo_v2_flash", "bailing_hybrid"), "sigmoid"),
    "mistral4": "softmax",
}
"""Families whose published configs say what routers score by, which transformers takes for granted."""


def _renamed(tensors: Tensors, *changes: tuple[str, str]) -> None:
    for name in list(tensors):
        new = name
        for old, other in changes:
            new = new.replace(old, other)
        tensors[new] = tensors.pop(name)


def _deepseek_v4(config: Config, tensors: Tensors, kinds: list[str]) -> None:
    rates = {"sliding_attention": 0, **config["compress_rates"]}
    config |= {
        "num_hash_layers": config["mlp_layer_types"].count("hash_moe"),
        "compress_ratios": [rates[kind] for kind in kinds] + [0],  # of a layer that predicts several tokens
    }
    rope = config.pop("rope_parameters")["compress"]
    if rope["rope_type"] == "yarn":
        own = ("rope_theta", "partial_rotary_factor", "attention_factor")
        config["rope_scaling"] = {name: value for name, value in rope.items() if name not in own}
    head = [(f"hc_head.hc_{part}", f"hc_head_{part}") for part in ("fn", "base", "scale")]
    _renamed(tensors, ("model.", ""), ("embed_tokens", "embed"), (".attn.norm.", ".attn.kv_norm."), *head)


def _hy_v4(config: Config, tensors: Tensors, kinds: list[str]) -> None:
    """llama.cpp rotates neighbouring columns and transformers those of both halves, of the same matrices: one of both
    is wrong. Here the columns are in turns, so that llama.cpp computes what transformers does."""
    parts = [(f"hc_pre.hc_{part}_layer.hc_", f"hc_{part}_layer.hc_pre.hc_") for part in ("attn", "mlp")]
    _renamed(
        tensors,
        ("hc_pre.hc_head.", "hc_head."),
        ("mlp.linear_gate", "mlp.gate_proj"),
        ("experts.linear_gate", "experts.gate_proj"),
        *parts,
    )
    rotated = config["qk_rope_head_dim"]
    columns = {
        "q_b_proj.weight": config["qk_nope_head_dim"] + rotated,
        "kv_a_proj_with_mqa.weight": config["kv_lora_rank"] + rotated,
        **dict.fromkeys(("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias"), config["index_head_dim"]),
    }
    for name, value in tensors.items():
        for count in (count for end, count in columns.items() if name.endswith(end)):
            heads = value.view(-1, count, *value.shape[1:])
            plain, turned = heads[:, : count - rotated], heads[:, count - rotated :]
            turned = turned.unflatten(1, (2, -1)).swapaxes(1, 2).flatten(1, 2)
            tensors[name] = torch.cat((plain, turned), dim=1).view(value.shape)


def _qwen4_exp_text(config: Config, tensors: Tensors, kinds: list[str]) -> None:
    """Without it the converter writes that blocks have 0 positions."""
    config["layer_types"] = ["linear_attention" if kind == "linear_attention" else "full_attention" for kind in kinds]


def _kimi_linear(config: Config, tensors: Tensors, kinds: list[str]) -> None:
    config["linear_attn_config"] = {
        "full_attn_layers": [at + 1 for at, kind in enumerate(kinds) if kind != "linear_attention"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        "head_dim": config["linear_head_dim"],
    }
    config |= {"n_group": config["num_expert_group"], "norm_topk_prob": config["moe_renormalize"]}
    dense = [(f"moe.{part}_proj", f"moe@{part}_proj") for part in ("gate", "up", "down")]
    _renamed(tensors, *dense, ("block_sparse_moe@", "mlp."))


def _glm5_next_text(config: Config, tensors: Tensors, kinds: list[str]) -> None:
    text = config["text_config"]
    text |= {
        "linear_attn_config": {
            "num_heads": text["linear_num_heads"],
            "short_conv_kernel_size": text["linear_conv_kernel_dim"],
            "head_dim": text["linear_head_dim"],
            "gate_lower_bound": text["linear_lower_bound"],
        },
        "mla_use_nope": True,
        "scoring_func": "sigmoid",
    }


def _bailing_hybrid(config: Config, tensors: Tensors, kinds: list[str]) -> None:
    config |= {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "head_dim": config["linear_head_dim"],
        "layer_group_size": 1 + kinds.index("full_attention"),
        "no_kda_lora": True,
        "gated_attention_proj_granularity_type": "head_wise",
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * config["num_shared_experts"],
        "first_k_dense_replace": config["mlp_layer_types"].count("dense"),
        "n_group": config["num_expert_group"],
        "norm_topk_prob": config["moe_renormalize"],
        "num_experts_per_tok": config["num_experts_per_token"],
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": config["model_max_length"],
    }


def _granitemoehybrid(config: Config, tensors: Tensors, kinds: list[str]) -> None:
    config["layer_types"] = ["mamba" if kind == "linear_attention" else "attention" for kind in kinds]


def _granitemoe_swa(config: Config, tensors: Tensors, kinds: list[str]) -> None:
    bases = config["layer_rope_theta"]
    config["no_rope_layers"] = [int(bool(base)) for base in bases or kinds]


def _afmoe(config: Config, tensors: Tensors, kinds: list[str]) -> None:
    config["route_norm"] = True


def _nemotron_h(config: Config, tensors: Tensors, kinds: list[str]) -> None:
    config["norm_eps"] = config["layer_norm_epsilon"]


def _phimoe(config: Config, tensors: Tensors, kinds: list[str]) -> None:
    config["architectures"] = ["PhiMoEForCausalLM"]
    config.setdefault("original_max_position_embeddings", config["max_position_embeddings"])


def _minimax_m2(config: Config, tensors: Tensors, kinds: list[str]) -> None:
    config["rotary_dim"] = config["head_dim"]


def _minimax_m3_vl_text(config: Config, tensors: Tensors, kinds: list[str]) -> None:
    config |= {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "rotary_dim": int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]),
        "n_shared_experts": config["shared_intermediate_size"] // config["intermediate_size"],
        "moe_layer_freq": [int(kind == "sparse") for kind in config["mlp_layer_types"]],
        "sparse_attention_config": {
            "sparse_num_index_heads": config["index_n_heads"],
            "sparse_index_dim": config["index_head_dim"],
            "sparse_topk_blocks": config["index_topk_blocks"],
            "sparse_block_size": config["index_block_size"],
            "sparse_local_block": config["index_local_blocks"],
        },
    }
    for name in list(tensors):
        if name.endswith("gate_up_proj.weight"):
            for part, half in zip(("gate", "up"), tensors.pop(name).chunk(2), strict=True):
                tensors[name.replace("gate_up", part)] = half
        elif ".experts." in name:
            stem, value = name.rpartition(".")[0], tensors.pop(name)
            parts = {"w2": value} if "down" in name else dict(zip(("w1", "w3"), value.chunk(2, dim=1), strict=True))
            for each, stacked in parts.items():
                tensors |= {f"{stem}.{at}.{each}.weight": matrix for at, matrix in enumerate(stacked)}
    moe = [(f"mlp.{part}", f"block_sparse_moe.{part}") for part in ("experts", "shared_experts", "gate.")]
    bias = ("gate.e_score_correction_bias", "e_score_correction_bias")
    index = [(f"indexer.{part}_", f"index_{part}_") for part in "qk"]
    _renamed(tensors, *moe, bias, *index)


def _mimo_v2_flash(config: Config, tensors: Tensors, kinds: list[str]) -> None:
    """Layers with a window have queries, keys and values in one matrix, as MiMo-V2.5 has them."""
    rope = config.pop("rope_parameters")
    full, windowed = rope["full_attention"], rope["sliding_attention"]
    config |= {
        **{f"swa_{name}": config[name] for name in ("head_dim", "v_head_dim", "num_attention_heads")},
        "swa_num_key_value_heads": config["num_key_value_heads"] * 2,
        "swa_rope_theta": windowed["rope_theta"],
        "rope_theta": full["rope_theta"],
        "partial_rotary_factor": full["partial_rotary_factor"],
        "topk_method": "noaux_tc",
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in kinds],
        "layernorm_epsilon": config["rms_norm_eps"],
        "sliding_window": config["sliding_window"] - 1,
    }
    for layer, kind in enumerate(kinds):
        stem = f"model.layers.{layer}.self_attn"
        if kind == "sliding_attention":
            parts = [tensors.pop(f"{stem}.{name}_proj.weight") for name in "qkv"]
            tensors[f"{stem}.qkv_proj.weight"] = torch.cat(parts)


def _mistral4(config: Config, tensors: Tensors, kinds: list[str]) -> None:
    config["architectures"] = ["Mistral3ForConditionalGeneration"]


def _hunyuan_v1_moe(config: Config, tensors: Tensors, kinds: list[str]) -> None:
    layers = config["num_hidden_layers"]
    config |= {
        "moe_intermediate_size": [config["intermediate_size"]] * layers,
        "moe_topk": [config["moe_topk"]] * layers,
        "num_shared_expert": [1] * layers,
    }
