"""Granite: GraniteMoE, with a shared expert, with sliding windows, and Granite 4, most layers of which are Mamba-2.
Multipliers scale embeddings, residuals, attention and logits."""

from __future__ import annotations

import torch

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.base import Attention
from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.attention.linear import is_linear
from tiermoe.model.attention.mamba import MambaSizes, mamba, mamba_lacks
from tiermoe.model.families.family import Family
from tiermoe.model.families.gguf import SINKS, Config, Gguf, block_names, common_fields, window_layers
from tiermoe.model.families.rows import layer_kinds, mamba_rows, mamba_sizes
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import dense, moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope

NAMES = block_names("block_sparse_moe", router="router") | {"ffn_down_shexp": "shared_mlp.output_linear"}
"""Tensors of a block → modules of a layer."""


class GraniteMoe(Family):
    name, model_type = "GraniteMoE", "granitemoe"
    normalised = on_gpu = True

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        rule, shared = RouterRule(config.num_experts_per_tok, scores="chosen"), None
        if w.has("shared_mlp"):
            own = w.at("shared_mlp")
            columns, names = config.shared_intermediate_size, ("input_linear",)
            shared = dense(own, columns, config.hidden_act, first=names, down="output_linear", fused=True)
        part = w.at("block_sparse_moe")
        return Layer(
            w.norm("input_layernorm"),
            self.attention(w, config, index),
            w.norm("post_attention_layernorm"),
            moe(part, rule, config.num_local_experts, config.intermediate_size, router="router", shared=shared),
            multiplier=float(config.residual_multiplier),
        )

    def attention(self, w: Scope, config: ModelConfig, index: int) -> Attention:
        """Of the layer at `w`."""
        return grouped(w.at("self_attn"), config, index, scale=float(config.attention_multiplier))

    def embedding_scale(self, config: ModelConfig, dtype: torch.dtype) -> float:
        return float(config.embedding_multiplier)

    def logits_divisor(self, config: ModelConfig) -> float:
        return float(config.logits_scaling)


class GraniteMoeShared(GraniteMoe):
    name, model_type = "GraniteMoE with a shared expert", "granitemoeshared"
    gguf = Gguf(
        ("granitemoe",), NAMES, "block_sparse_moe.experts", turned=True, fused={"_shexp": "shared_mlp.input_linear"}
    )

    def config(self, file: GgufFile) -> Config:
        if not rotates(file):
            raise file.refusal("has no rotary embedding, which every GraniteMoE has")
        shared = "blk.0.ffn_gate_shexp.weight"
        return {
            **granite(file),
            "shared_intermediate_size": file.shape(shared)[0] if shared in file.tensors else 0,
        }


class GraniteMoeWindows(GraniteMoe):
    name, model_type = "GraniteMoE with sliding windows", "granitemoe_swa"
    gguf = Gguf(
        ("granite_swa",),
        NAMES | SINKS | {"ffn_up_shexp": "shared_mlp.input_linear"},
        "block_sparse_moe.experts",
        turned=True,
    )
    has_unrotated = True

    def attention(self, w: Scope, config: ModelConfig, index: int) -> Attention:
        return grouped(
            w.at("self_attn"),
            config,
            index,
            window=window_at(config, index),
            rotary=None if config.layer_rope_theta[index] else self.unrotated(config),
            scale=float(config.attention_multiplier),
            sinks=True,
        )

    def lacks(self, config: ModelConfig) -> str:
        bases = {base for base in config.layer_rope_theta if base}
        alike = bases <= {config.rope_parameters["rope_theta"]}
        return "" if alike else "layers with rotary embeddings of their own bases"

    def config(self, file: GgufFile) -> Config:
        """ModelError for a file that does not say which layers have a window, or says of some alone whether they have
        a rotary embedding. If it says nothing of these, all have one."""
        config, shared = granite(file), "blk.0.ffn_down_shexp.weight"
        base, every = config["rope_parameters"]["rope_theta"], [True] * file.layers
        rotated = file.of_layers("attention.rope_pattern", "which of its layers have a rotary embedding", every)
        return {
            **config,
            "shared_intermediate_size": file.shape(shared)[1] if shared in file.tensors else 0,
            "sliding_window": file.count("attention.sliding_window", least=1),
            "layer_types": window_layers(file),
            "layer_rope_theta": [base if each else 0 for each in rotated],
        }


class Granite4(GraniteMoe):
    name, model_type = "Granite 4 (hybrid)", "granitemoehybrid"
    on_gpu = False
    gguf = Gguf(
        ("granitehybrid",),
        NAMES,
        "block_sparse_moe.experts",
        turned=True,
        within="mamba",
        fused={"_shexp": "shared_mlp.input_linear"},
    )
    gguf_parts = staticmethod(mamba_rows)

    def attention(self, w: Scope, config: ModelConfig, index: int) -> Attention:
        if not is_linear(config, index):
            return super().attention(w, config, index)
        sizes = MambaSizes(
            config.mamba_n_heads,
            config.mamba_d_head,
            config.mamba_n_groups,
            config.mamba_d_state,
            config.mamba_d_conv - 1,
        )
        return mamba(w.at("mamba"), sizes)

    def lacks(self, config: ModelConfig) -> str:
        return mamba_lacks(config)

    def config(self, file: GgufFile) -> Config:
        sizes, hidden = mamba_sizes(file), file.count("embedding_length", least=1)
        if sizes.values % hidden:
            raise file.refusal(
                f"says that layers of Mamba-2 widen {hidden} columns to {sizes.values}; Granite widens them a whole "
                f"number of times"
            )
        return {
            **granite(file),
            "mamba_n_heads": sizes.heads,
            "mamba_d_head": sizes.columns,
            "mamba_n_groups": sizes.groups,
            "mamba_d_state": sizes.state,
            "mamba_d_conv": sizes.kept + 1,
            "shared_intermediate_size": file.shape_beside_experts("ffn_gate_shexp.weight")[0],
            "position_embedding_type": "rope" if rotates(file) else None,
            "layer_types": layer_kinds(file),
            "mamba_expand": sizes.values // hidden,
        }


def granite(file: GgufFile) -> Config:
    """Fields of Granite models."""
    config = common_fields(file)
    return {
        **config,
        "num_key_value_heads": file.largest("attention.head_count_kv"),  # layers of Mamba-2 have none
        "num_local_experts": file.experts,
        "intermediate_size": file.expert_columns,
        "attention_multiplier": file.decimal(
            "attention.scale", (config["hidden_size"] // config["num_attention_heads"]) ** -0.5
        ),
        "embedding_multiplier": file.decimal("embedding_scale", 1.0),
        "residual_multiplier": file.decimal("residual_scale", 1.0),
        "logits_scaling": file.decimal("logit_scale"),
    }


def rotates(file: GgufFile) -> bool:
    """Whether a Granite model's queries and keys are rotated (models/granite.cpp)."""
    return bool(file.of_model("rope.scaling.finetuned", True))
