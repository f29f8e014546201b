"""Hunyuan: A13B, Hunyuan 3, and Hunyuan 4 with latent attention that an indexer leads and independent residual
streams."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import AGAIN, GgufFile
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
from tiermoe.model.families.deepseek_v4 import CONNECTIONS, HEAD, gate_limit, mixed_or_mean
from tiermoe.model.families.family import Family, HeadFormat, LatentFamily
from tiermoe.model.families.gguf import (
    OUTSIDE,
    SIGMOID,
    SINKS,
    Config,
    Gguf,
    block_names,
    grouped_fields,
    latent_fields,
    mlp_layer_types,
)
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import moe_or_dense
from tiermoe.model.rotary import rope_halves
from tiermoe.model.routers import RouterRule
from tiermoe.model.streams import StreamLayer, balanced
from tiermoe.model.weights import Scope

NAMES = SINKS | {"attn_gate": "self_attn.gate_proj"} | INDEXER | CONNECTIONS
"""Tensors of a block → modules or parameters of a layer, beside the usual ones."""
_HEADS = {"attn_q_b": "attention.key_length_mla", "indexer.attn_q_b": "attention.indexer.key_length"}
"""Tensors of several heads whose last columns are rotated → the entry that has a head's columns."""
_ONE_HEAD = ("attn_kv_a_mqa", "indexer.attn_k", "indexer.k_norm")
_V1_NAMES = block_names(router="gate.wg", shared="shared_mlp", head_norms=("query_layernorm", "key_layernorm"))
"""Tensors of a block → modules of a layer, of A13B."""
_CORRECTION = "e_score_correction_bias"
_V3_NAMES = block_names(correction=_CORRECTION, shared="shared_experts")


class HunyuanV1(Family):
    """Norms of queries and keys come after the rotary embedding."""

    name, model_type = "Hunyuan (A13B)", "hunyuan_v1_moe"
    on_gpu = True
    gguf = Gguf(("hunyuan-moe",), _V1_NAMES)
    wide = ("mlp.gate.wg.weight",)
    normalised = True

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        norms = ("query_layernorm", "key_layernorm")
        part = moe_or_dense(
            w.at("mlp"),
            config,
            RouterRule(used(config)[0], normalise=True, wide=True, rounded=False),
            config.num_experts,
            shared=1,
            inner=config.intermediate_size,
            router="gate.wg",
            shared_name="shared_mlp",
        )
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, norms=norms, norms_rotated=True),
            w.norm("post_attention_layernorm"),
            part,
        )

    def lacks(self, config: ModelConfig) -> str:
        return "" if len(set(used(config))) == 1 else "layers that use different numbers of experts"

    def config(self, file: GgufFile) -> Config:
        return {
            **grouped_fields(file),
            "num_experts": file.experts,
            "intermediate_size": file.expert_columns,
        }


def used(config: ModelConfig) -> list[int]:
    """Experts of a token, one number for all layers or one for each."""
    return config.moe_topk if isinstance(config.moe_topk, list) else [config.moe_topk]


class HunyuanV3(Family):
    name, model_type = "Hunyuan 3", "hy_v3"
    on_gpu = True
    gguf = Gguf(("hy_v3",), _V3_NAMES)
    normalised = True
    mtp_head = HeadFormat({"model.layers.{}.final_layernorm.": "shared_head.norm."})

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        rule = RouterRule(
            config.num_experts_per_tok,
            scores="sigmoid",
            normalise=True,
            epsilon=1e-20,
            wide=True,
            rounded=False,
            scale=float(config.router_scaling_factor),
        )
        experts, shared = config.num_experts, config.num_shared_experts
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, norms=("q_norm", "k_norm")),
            w.norm("post_attention_layernorm"),
            moe_or_dense(w.at("mlp"), config, rule, experts, shared=shared, correction=_CORRECTION),
        )

    def config(self, file: GgufFile) -> Config:
        """ModelError where routers do not score as Hunyuan's do, or shared experts are no whole number of experts."""
        sigmoid = file.count("expert_gating_func", SIGMOID) == SIGMOID  # models/hy-v3.cpp
        if not sigmoid or file.of_model("expert_weights_norm") is not True:
            raise file.refusal("has no sigmoid router whose weights sum to 1, which every Hunyuan 3 has")
        columns = file.expert_columns
        shared = file.shape_beside_experts("ffn_gate_shexp.weight")[0]
        if not columns or shared % columns:
            raise file.refusal(
                f"has {shared} columns between the matrices of the shared experts and {columns} between those of an "
                f"expert, and Hunyuan 3 several times as many"
            )
        return {
            **grouped_fields(file),
            "num_experts": file.experts,
            "num_shared_experts": shared // columns,
            "moe_intermediate_size": columns,
            "intermediate_size": file.dense_columns,
            "mlp_layer_types": mlp_layer_types(file),
            "router_scaling_factor": file.decimal("expert_weights_scale"),
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        }


class HunyuanV4(LatentFamily):
    name, model_type = "Hunyuan 4", "hy_v4"
    gguf = Gguf(("hy_v4",), V3_NAMES | NAMES, outside=OUTSIDE | HEAD, states_shapes=False)
    in_streams = True

    def layer(self, w: Scope, config: ModelConfig, index: int) -> StreamLayer:
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

    def lacks(self, config: ModelConfig) -> str:
        return indexer_lacks(config)

    def end(self, w: Scope, config: ModelConfig) -> Callable[[Tensor], Tensor]:
        return mixed_or_mean(w, config)

    def config(self, file: GgufFile) -> Config:
        config = latent_fields(file)
        if file.count("expert_gating_func", SIGMOID) != SIGMOID:
            raise file.refusal("has routers that score by no sigmoid, which every Hunyuan 4 does")
        del config["first_k_dense_replace"]
        full = full_layers(file)
        if not full[0]:
            raise file.refusal("has no indexer in its first layer, which every Hunyuan 4 has")
        return {
            **config,
            "mlp_layer_types": mlp_layer_types(file),
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
