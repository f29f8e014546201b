"""Hunyuan: A13B, Hunyuan 3, and Hunyuan 4 with latent attention that an indexer leads and independent residual
streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.attention.indexers import IndexerSizes, indexer
from tiermoe.model.attention.latent import has_indexer, latent
from tiermoe.model.families.deepseek_v3 import (
    INDEXER,
    V3_NAMES,
    full_layers,
    indexer_lacks,
    indexer_sizes,
    indexer_types,
    v3_part,
)
from tiermoe.model.families.deepseek_v4 import CONNECTIONS, HEAD, gate_limit
from tiermoe.model.families.family import Family, HeadFormat, LatentFamily
from tiermoe.model.families.fields import (
    AGAIN,
    SIGMOID,
    Config,
    dense_columns,
    expert_columns,
    expert_count,
    grouped_fields,
    in_first_block,
    latent_fields,
    layer_count,
    leading_dense,
)
from tiermoe.model.families.names import OUTSIDE, Gguf, block_names
from tiermoe.model.layer import Layer
from tiermoe.model.moe import DenseBlock, MoeBlock, moe_or_dense
from tiermoe.model.rotary import rope_halves
from tiermoe.model.routers import RouterRule
from tiermoe.model.streams import MeanMixer, StreamLayer, balanced, balanced_mixer
from tiermoe.model.weights import Scope

NAMES = {
    "attn_sinks": "self_attn.sinks",
    "attn_gate": "self_attn.gate_proj",
    **INDEXER,
    **CONNECTIONS,
}
"""Tensors of a block → modules or parameters of a layer, beside the usual ones."""
_HEADS = {"attn_q_b": "attention.key_length_mla", "indexer.attn_q_b": "attention.indexer.key_length"}
"""Tensors of several heads whose last columns are rotated → the entry that has a head's columns."""
_ONE_HEAD = ("attn_kv_a_mqa", "indexer.attn_k", "indexer.k_norm")


V1_NAMES = block_names(router="gate.wg", shared="shared_mlp", head_norms=("query_layernorm", "key_layernorm"))
"""Tensors of a block → modules of a layer, of A13B."""
_V3_NAMES = block_names(correction="e_score_correction_bias", shared="shared_experts")


class HunyuanV1(Family):
    """Norms of queries and keys come after the rotary embedding."""

    name, model_type = "Hunyuan (A13B)", "hunyuan_v1_moe"
    gguf = Gguf(("hunyuan-moe",), V1_NAMES)
    wide = ("mlp.gate.wg.weight",)
    normalised = True

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        norms = ("query_layernorm", "key_layernorm")
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, norms=norms, norms_rotated=True),
            w.norm("post_attention_layernorm"),
            self.part(w.at("mlp"), config),
        )

    def part(self, w: Scope, config: Any) -> MoeBlock | DenseBlock:
        """The feed-forward part: dense in the layers that have no router."""
        inner = config.intermediate_size
        return moe_or_dense(
            w,
            RouterRule(used(config)[0], normalise=True, wide=True, rounded=False),
            config.hidden_act,
            experts=config.num_experts,
            inner=inner,
            dense_inner=inner,
            shared_inner=inner,
            shared="shared_mlp",
            router="gate.wg",
        )

    def lacks(self, config: Any) -> str:
        return "" if len(set(used(config))) == 1 else "layers that use different numbers of experts"

    def config(self, file: GgufFile) -> Config:
        return {
            **grouped_fields(file),
            "model_type": "hunyuan_v1_moe",
            "num_experts": expert_count(file),
            "intermediate_size": expert_columns(file),
        }


def used(config: Any) -> list[int]:
    """Experts of a token, one number for all layers or one for each."""
    return config.moe_topk if isinstance(config.moe_topk, list) else [config.moe_topk]


class HunyuanV3(Family):
    name, model_type = "Hunyuan 3", "hy_v3"
    gguf = Gguf(("hy_v3",), _V3_NAMES)
    normalised = True
    mtp_head = HeadFormat({"model.layers.{}.final_layernorm.": "shared_head.norm."})

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, norms=("q_norm", "k_norm")),
            w.norm("post_attention_layernorm"),
            self.part(w.at("mlp"), config),
        )

    def part(self, w: Scope, config: Any) -> MoeBlock | DenseBlock:
        """The feed-forward part: dense in the layers that have no router."""
        rule = RouterRule(
            config.num_experts_per_tok,
            scores="sigmoid",
            normalise=True,
            epsilon=1e-20,
            wide=True,
            rounded=False,
            scale=float(config.router_scaling_factor),
        )
        return moe_or_dense(
            w,
            rule,
            config.hidden_act,
            experts=config.num_experts,
            inner=config.moe_intermediate_size,
            dense_inner=config.intermediate_size,
            shared_inner=(config.num_shared_experts or 0) * config.moe_intermediate_size,
            correction="e_score_correction_bias",
        )

    def config(self, file: GgufFile) -> Config:
        """ModelError where routers do not score as Hunyuan's do, or shared experts are no whole number of experts."""
        sigmoid = file.count("expert_gating_func", SIGMOID) == SIGMOID  # models/hy-v3.cpp
        if not sigmoid or file.of_model("expert_weights_norm") is not True:
            raise ModelError(
                f"{file.path} has no sigmoid router whose weights sum to 1, which every Hunyuan 3 has; {AGAIN}"
            )
        dense, columns = leading_dense(file), expert_columns(file)
        shared = in_first_block(file, "ffn_gate_shexp.weight", 2)[0]
        if not columns or shared % columns:
            raise ModelError(
                f"{file.path} has {shared} columns between the matrices of the shared experts and {columns} between "
                f"those of an expert, and Hunyuan 3 several times as many; {AGAIN}"
            )
        return {
            **grouped_fields(file),
            "model_type": "hy_v3",
            "num_experts": expert_count(file),
            "num_shared_experts": shared // columns,
            "moe_intermediate_size": columns,
            "intermediate_size": dense_columns(file),
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layer_count(file) - dense),
            "router_scaling_factor": file.decimal("expert_weights_scale"),
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        }


class HunyuanV4(LatentFamily):
    name, model_type = "Hunyuan 4", "hy_v4"
    gguf = Gguf(("hy_v4",), V3_NAMES | NAMES, outside=OUTSIDE | HEAD, states_shapes=False)
    in_streams = True

    def layer(self, w: Scope, config: Any, index: int) -> StreamLayer:
        own, part = has_indexer(config, index), w.at("self_attn")
        attention = latent(
            part,
            config,
            rope=rope_halves,
            gate="gate_proj",
            gate_columns=config.num_attention_heads * config.v_head_dim,
            sinks=True,
            indexer=IndexerSizes.of(config),
            keeps_index=own,
        )
        return StreamLayer(
            balanced(w.at("attn_hc"), config, w.norm("input_layernorm")),
            attention,
            balanced(w.at("ffn_hc"), config, w.norm("post_attention_layernorm")),
            v3_part(w.at("mlp"), config),
            indexer(part, config, rotates_last=True, key_epsilon=None) if own else None,
        )

    def lacks(self, config: Any) -> str:
        return indexer_lacks(config)

    def end(self, w: Scope, config: Any) -> Callable[[Tensor], Tensor]:
        norm = w.norm("model.norm")
        return balanced_mixer(w.at("model.hc_head"), config, norm) if w.has("model.hc_head.hc_fn") else MeanMixer(norm)

    def config(self, file: GgufFile) -> Config:
        config = latent_fields(file)
        if file.count("expert_gating_func", SIGMOID) != SIGMOID:
            raise ModelError(f"{file.path} has routers that score by no sigmoid, which every Hunyuan 4 does; {AGAIN}")
        dense, full = config.pop("first_k_dense_replace"), full_layers(file)
        if not full[0]:
            raise ModelError(f"{file.path} has no indexer in its first layer, which every Hunyuan 4 has; {AGAIN}")
        return {
            **config,
            "model_type": "hy_v4",
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layer_count(file) - dense),
            **indexer_sizes(file),
            "indexer_types": indexer_types(full),
            "swiglu_limit": gate_limit(file),
            "hc_mult": file.count("hyper_connection.count", least=1),
            "hc_eps": file.decimal("hyper_connection.epsilon"),
            "hc_magnitude": file.decimal("hyper_connection.magnitude"),
        }

    def gguf_order(self, file: GgufFile, stem: str, rows: int) -> Tensor | None:
        """Where each row of a parameter is in a tensor whose heads' last columns are rotated: the first of each pair of
        neighbours, then the second ones. None for other tensors."""
        if stem not in _HEADS and stem not in _ONE_HEAD:
            return None
        rotary = file.count("rope.dimension_count", least=2)
        columns = file.count(_HEADS[stem], least=1) if stem in _HEADS else rows
        if rows % columns or rotary % 2 or rotary > columns:
            raise ModelError(
                f"{file.path}: {stem} of {rows} rows has no heads of {columns}, of which {rotary} are rotated; {AGAIN}"
            )
        heads = torch.arange(rows).view(-1, columns)
        first, second = heads[:, -rotary::2], heads[:, columns - rotary + 1 :: 2]
        return torch.cat((heads[:, : columns - rotary], first, second), dim=1).flatten()
