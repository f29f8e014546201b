"""How many heads, columns and positions the layers of a family's decoder have, from its config alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiermoe.errors import ModelError
from tiermoe.model.architectures import ARCHITECTURES, Architecture, decodes
from tiermoe.model.attention import GroupedSizes
from tiermoe.model.delta import LinearSizes
from tiermoe.model.indexer import IndexerSizes
from tiermoe.model.latent import LatentSizes
from tiermoe.model.linear_attention import delta_sizes, is_linear
from tiermoe.model.rotary import layer_kinds
from tiermoe.model.short_convolution import ConvolutionSizes, convolution_sizes, is_convolution

AttentionSizes = GroupedSizes | LatentSizes | LinearSizes | ConvolutionSizes
"""Of one layer, what its attention, or what stands in its place, asks memory for."""


def attention_sizes(config: Any, has: Callable[[str], bool]) -> list[AttentionSizes] | None:
    """Of each layer of the decoder that a model with this config gets, what its attention asks memory for; None where
    it gets none of ours. has: whether the checkpoint holds a tensor of this name."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None or not decodes(config):
        return None
    if architecture.latent:
        return [_latent_sizes(architecture, config, index) for index in range(config.num_hidden_layers)]
    return [_layer_sizes(architecture, config, index, has) for index in range(config.num_hidden_layers)]


def _latent_sizes(architecture: Architecture, config: Any, index: int) -> LatentSizes:
    indexer = None
    if architecture.index_turn is not None:
        indexer = IndexerSizes(config.index_n_heads, config.index_head_dim, config.index_topk)
    return LatentSizes(
        config.num_attention_heads,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.kv_lora_rank,
        indexer,
        has_indexer(architecture, config, index),
    )


def _layer_sizes(
    architecture: Architecture, config: Any, index: int, has: Callable[[str], bool]
) -> GroupedSizes | LinearSizes | ConvolutionSizes:
    if is_linear(config, index):
        return LinearSizes(delta_sizes(config))
    if is_convolution(config, index):
        return convolution_sizes(config)
    its = config.per_layer_config[index]
    return GroupedSizes(
        its.num_attention_heads,
        its.num_key_value_heads,
        head_columns(its),
        window_of(architecture, config, index),
        has(f"model.layers.{index}.self_attn.sinks"),
        architecture.gated,
        rotary_at(config, index),
        not architecture.side_by_side,
    )


def window_of(architecture: Architecture, config: Any, index: int) -> int | None:
    window = getattr(config, "sliding_window", None)
    if window is not None and window < 0:
        raise ModelError(f"the config says that attention sees {window} tokens; download the model again")
    slides = architecture.window == "all" or (
        architecture.window == "layer" and config.layer_types[index] == "sliding_attention"
    )
    return int(window) if window and slides else None


def has_indexer(architecture: Architecture, config: Any, index: int) -> bool:
    """Whether a layer has an indexer of its own."""
    kinds = getattr(config, "indexer_types", None)
    return architecture.index_turn is not None and (kinds is None or kinds[index] == "full")


def turned_columns(config: Any, kind: str | None) -> int:
    """Of a head, in layers of one of `layer_kinds`."""
    if ARCHITECTURES[config.model_type].latent:
        return int(config.qk_rope_head_dim)
    if kind is not None:
        return head_columns(config.per_layer_config[kind])
    return int(head_columns(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))


def rotary_at(config: Any, index: int) -> int:
    """Which of `layer_kinds` layer `index` is of."""
    kinds = layer_kinds(config)
    return 0 if kinds == [None] else kinds.index(config.layer_types[index])


def head_columns(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
