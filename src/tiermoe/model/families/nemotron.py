"""Nemotron-H (Nemotron 3): a layer is Mamba-2, attention without positions, a dense block, or experts without a gate,
which may take fewer columns than hidden states have; DeepSeek-V3's router."""

from __future__ import annotations

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.base import Attention
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.attention.linear import is_linear
from tiermoe.model.attention.mamba import MambaSizes, mamba, mamba_lacks
from tiermoe.model.families.deepseek_v3 import CORRECTION, v3_router
from tiermoe.model.families.family import Family
from tiermoe.model.families.gguf import Config, Gguf, block_names, common_fields
from tiermoe.model.families.rows import layer_kinds, mamba_rows, mamba_sizes
from tiermoe.model.layer import AttentionLayer, FeedForwardLayer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import DenseBlock, MoeBlock, dense, moe
from tiermoe.model.weights import NormKind, Scope

_FIRST = ("up_proj",)
NAMES = block_names(
    "mixer",
    correction=CORRECTION,
    shared="shared_experts",
    attention="mixer",
    norms=("norm", "post_attention_layernorm"),
) | {"ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj"}
"""Tensors of a block → modules of a layer."""
OUTSIDE_NAMES = {"token_embd": "embeddings", "output_norm": "norm_f"}


class NemotronH(Family):
    name, model_type = "Nemotron-H (Nemotron 3)", "nemotron_h"
    gguf = Gguf(("nemotron_h_moe",), NAMES, "mixer.experts", outside=OUTSIDE_NAMES, turned=True, within="mixer")
    gguf_parts = staticmethod(mamba_rows)
    embedding, final_norm = "model.embeddings", "model.norm_f"
    norms = NormKind(late=True, epsilon="layer_norm_epsilon")

    def layer(self, w: Scope, config: ModelConfig, index: int) -> AttentionLayer | FeedForwardLayer:
        norm, mixer = w.norm("norm"), w.at("mixer")
        if config.layer_types[index] in ("moe", "mlp"):
            return FeedForwardLayer(norm, self.part(mixer, config))
        attention: Attention
        if is_linear(config, index):
            sizes = MambaSizes(
                config.mamba_num_heads,
                config.mamba_head_dim,
                config.n_groups,
                config.ssm_state_size,
                config.conv_kernel - 1,
            )
            attention = mamba(mixer, sizes, float(config.time_step_min))
        else:
            attention = grouped(mixer, config, index)
        return AttentionLayer(norm, attention)

    def part(self, w: Scope, config: ModelConfig) -> MoeBlock | DenseBlock:
        """A dense block, or experts."""
        activation, width = config.mlp_hidden_act, config.moe_latent_size
        if not w.has("gate.weight"):
            return dense(w, config.intermediate_size, activation, first=_FIRST)
        shared, columns = None, config.moe_shared_expert_intermediate_size
        if w.has("shared_experts"):
            shared = dense(w.at("shared_experts"), columns, activation, first=_FIRST)
        return moe(
            w,
            v3_router(config),
            config.n_routed_experts,
            config.moe_intermediate_size,
            correction=CORRECTION,
            shared=shared,
            latent=("fc1_latent_proj", "fc2_latent_proj", width) if width else None,
            gateless=True,
        )

    def lacks(self, config: ModelConfig) -> str:
        return mamba_lacks(config)

    def config(self, file: GgufFile) -> Config:
        config, sizes = common_fields(file), mamba_sizes(file)
        del config["rope_parameters"]  # queries and keys have no position
        return {
            **config,
            "mamba_num_heads": sizes.heads,
            "mamba_head_dim": sizes.columns,
            "n_groups": sizes.groups,
            "ssm_state_size": sizes.state,
            "conv_kernel": sizes.kept + 1,
            "layers_block_type": layer_kinds(file),
            "layer_norm_epsilon": config["rms_norm_eps"],
            "num_key_value_heads": file.largest("attention.head_count_kv"),  # other layers have none
            "head_dim": file.count("attention.key_length", least=1),
            "n_routed_experts": file.experts,
            "n_shared_experts": file.count("expert_shared_count"),
            "moe_intermediate_size": file.expert_columns,
            "moe_shared_expert_intermediate_size": file.shape_beside_experts("ffn_up_shexp.weight")[0],
            "moe_latent_size": _rows(file, "ffn_latent_down"),
            "intermediate_size": _rows(file, "ffn_up") or file.expert_columns,
            "routed_scaling_factor": file.decimal("expert_weights_scale", 1.0),
            "norm_topk_prob": bool(file.of_model("expert_weights_norm", False)),
            "n_group": file.count("expert_group_count", 1),
            "topk_group": file.count("expert_group_used_count", 1),
        }


def _rows(file: GgufFile, stem: str) -> int | None:
    """Rows of the first layer's matrix of this name; None where no layer has one."""
    names = (f"blk.{layer}.{stem}.weight" for layer in range(file.layers))
    return next((file.shape(name)[0] for name in names if name in file.tensors), None)
