"""Jamba: Mamba-1, attention without positions in every few layers, experts in every other, a softmax router."""

from __future__ import annotations

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.base import Attention
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.attention.linear import is_linear
from tiermoe.model.attention.mamba import Mamba1Sizes, mamba_1, mamba_lacks
from tiermoe.model.families.family import Family
from tiermoe.model.families.gguf import OUTSIDE, Config, Gguf, block_names, common_fields
from tiermoe.model.families.rows import layer_kinds, mamba_1_rows
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import moe_or_dense
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope

NAMES = block_names("feed_forward", router="router", norms=("input_layernorm", "pre_ff_layernorm"))
"""Tensors of a block → modules of a layer."""


class Jamba(Family):
    name, model_type = "Jamba", "jamba"
    gguf = Gguf(
        ("jamba",), NAMES, "feed_forward.experts", outside=OUTSIDE | {"output_norm": "final_layernorm"}, within="mamba"
    )
    gguf_parts = staticmethod(mamba_1_rows)
    continues = False
    normalised = False
    final_norm = "model.final_layernorm"

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        attention: Attention
        if is_linear(config, index):
            channels, kept = config.mamba_expand * config.hidden_size, config.mamba_d_conv - 1
            attention = mamba_1(w.at("mamba"), Mamba1Sizes(channels, config.mamba_d_state, kept, config.mamba_dt_rank))
        else:
            attention = grouped(w.at("self_attn"), config, index)
        part, rule, inner = w.at("feed_forward"), RouterRule(config.num_experts_per_tok), config.intermediate_size
        return Layer(
            w.norm("input_layernorm"),
            attention,
            w.norm("pre_ff_layernorm"),
            moe_or_dense(part, config, rule, config.num_experts, inner=inner, router="router"),
        )

    def lacks(self, config: ModelConfig) -> str:
        return mamba_lacks(config)

    def config(self, file: GgufFile) -> Config:
        config, kinds, dense = common_fields(file), layer_kinds(file), set(file.dense_layers)
        del config["rope_parameters"]  # queries and keys have no position
        inner_size, hidden = file.count("ssm.inner_size", least=1), file.count("embedding_length", least=1)
        attention = _every(file, [layer for layer, kind in enumerate(kinds) if kind == "full_attention"])
        mixtures = _every(file, [layer for layer in range(len(kinds)) if layer not in dense])
        if inner_size % hidden:
            raise file.refusal(
                f"says that layers of Mamba widen {hidden} columns to {inner_size}; Jamba widens them a whole number "
                f"of times"
            )
        return {
            **config,
            "num_key_value_heads": file.largest("attention.head_count_kv"),  # layers of Mamba have none
            "num_experts": file.experts,
            "intermediate_size": file.expert_columns,
            "attn_layer_period": attention[0],
            "attn_layer_offset": attention[1],
            "expert_layer_period": mixtures[0],
            "expert_layer_offset": mixtures[1],
            "mamba_expand": inner_size // hidden,
            "mamba_d_state": file.count("ssm.state_size", least=1),
            "mamba_d_conv": file.count("ssm.conv_kernel", least=1),
            "mamba_dt_rank": file.count("ssm.time_step_rank", least=1),
        }


def _every(file: GgufFile, layers: list[int]) -> tuple[int, int]:
    """(period, offset) of layers of one kind. ModelError where they do not come at one distance."""
    count = file.layers
    offset, *others = layers or [count]
    period = others[0] - offset if others else max(offset + 1, count - offset)
    if layers != list(range(offset, count, period)) or offset >= period:
        raise file.refusal(f"has layers of one kind at {layers}, which no Jamba has")
    return period, offset
