"""Qwen3.8: Qwen3-Next's layers in residual streams, with sparse attention to blocks of positions and features of
n-grams."""

from __future__ import annotations

from typing import Any

from collections.abc import Callable

from torch import Tensor

from tiermoe.model.attention.block_indexer import block_indexer
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.attention.linear import gated_delta, is_linear
from tiermoe.model.attention.ngrams import ngrams
from tiermoe.model.families.family import Family
from tiermoe.model.families.qwen2_moe import part_with_gated_expert
from tiermoe.model.streams import StreamLayer, connection, stream_mixer
from tiermoe.model.weights import NormKind, Scope


class Qwen4(Family):
    name, model_type = "Qwen3.8", "qwen4_exp_text"
    plain_router = in_streams = True
    norms = NormKind(centred=True)

    def layer(self, w: Scope, config: Any, index: int) -> StreamLayer:
        features = ngrams(w.at("ple"), config) if index + 1 in (config.ple_layer_ids or ()) else None
        indexed = config.layer_types[index] == "indexed_attention"
        indexer = block_indexer(w.at("self_attn.indexer"), config) if indexed else None
        if is_linear(config, index):
            attention = gated_delta(w.at("linear_attn"), config, None if features is None else features.sizes)
        else:
            norms = ("q_norm", "k_norm")
            attention = grouped(w.at("self_attn"), config, index, norms=norms, gated=True, indexer=indexer)
        return StreamLayer(
            connection(w.at("attn_hyper_connection"), config),
            attention,
            connection(w.at("mlp_hyper_connection"), config),
            part_with_gated_expert(w.at("mlp"), config, normalise=bool(config.norm_topk_prob)),
            indexer,
            features,
        )

    def end(self, w: Scope, config: Any) -> Callable[[Tensor], Tensor]:
        return stream_mixer(w.at("model.hyper_connection_mixer"), config)
