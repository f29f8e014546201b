"""What a step of tokens needs between and inside the layers, beside weights and cache: each part from its owner.

Checked against measured peaks (docs/results.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tiermoe import native
from tiermoe.config import Settings
from tiermoe.errors import ConfigError
from tiermoe.kernels import decoded_bytes, prepared_bytes
from tiermoe.kernels.native.matrix import prepared_at_most
from tiermoe.model import cache_probe, generic, kv_cache
from tiermoe.model.attention import GroupedSizes
from tiermoe.model.blueprint import Blueprint
from tiermoe.model.cache_probe import LayerCache
from tiermoe.model.delta import LinearSizes
from tiermoe.model.embedding import table_keys
from tiermoe.model.latent import LatentSizes
from tiermoe.model.layer_sizes import AttentionSizes, attention_sizes
from tiermoe.model.rotary import table_bytes
from tiermoe.model.short_convolution import ConvolutionSizes
from tiermoe.store.layout import ExpertFormat
from tiermoe.types import Need, Phase, Workload

_ALLOCATOR = 1.15  # what the allocator holds beyond the tensors that live, measured
_PACKED_OPERATOR_TOKENS = 12  # from more tokens on, kernels may decode a matrix first (kernels/cpu.py)
_PROBED = 256  # tokens after which every layer keeps something, a compressed cache too
_LOGIT_BYTES = 16  # of a token's logits: in the model's dtype, as float32, and what a draw makes of them
_SCORED_COPIES = 2  # of the logits of tokens that are scored, in the model's dtype: some decoders scale them


def decoder_needs(
    blueprint: Blueprint, formats: Sequence[ExpertFormat], settings: Settings, load: Workload, device: str
) -> list[Need]:
    """Key/value cache and activations of the decoder that a model gets on a device, for a workload."""
    sizes = sizes_of(blueprint, settings, device)
    if blueprint.family.encodes:
        load = replace(load, chunk=load.context)  # its prompt is read at once
    if sizes is None:
        eager = getattr(blueprint.skeleton.config, "_attn_implementation", None) == "eager"
        latent = blueprint.family.latent_kv or generic.expands_latents(blueprint.config)
        grown = _grown(blueprint)
        its = generic.needs(blueprint.config, load, latent, eager, grown)
        heads, _, head_dim = generic.attention_shape(blueprint.config)
        columns = heads * head_dim
    else:
        its = kv_cache.needs([each.shape for each in sizes], load) + _attention_needs(blueprint, sizes, load)
        columns = max(each.token_columns for each in sizes)
    return its + _layer_needs(blueprint, formats, settings, load, columns)


def _grown(blueprint: Blueprint) -> Sequence[LayerCache] | None:
    """The layers of a model's own cache, of which an encoder alone has none; None: they follow from the config."""
    if blueprint.family.encodes:
        return [] if blueprint.family.encoder_class else None
    return cache_probe.measured(blueprint.skeleton, _PROBED)


def sizes_of(blueprint: Blueprint, settings: Settings, device: str) -> Sequence[AttentionSizes] | None:
    """Of each layer of our own decoder, what its attention asks memory for; None where transformers' code runs."""
    if settings.decoder == "generic" or blueprint.family.encodes or device != "cpu":
        return None
    return attention_sizes(blueprint.config, blueprint.checkpoint.__contains__)


def sizes_for(
    option: str, flag: str, lacking: str, blueprint: Blueprint, settings: Settings, device: str
) -> Sequence[AttentionSizes]:
    """`sizes_of`. ConfigError where transformers' code runs: `option` is not for it, whose cache `lacking` tells of;
    leave `flag` out."""
    sizes = sizes_of(blueprint, settings, device)
    if sizes is None:
        raise ConfigError(
            f"{option} is for tiermoe's own decoders on a CPU, and {blueprint.family.name} runs here by transformers' "
            f"code, whose cache {lacking}; leave {flag} out"
        )
    return sizes


def longest_request(blueprint: Blueprint, settings: Settings, context: int, device: str) -> int | None:
    """Bytes of keys and values that one sequence of the whole context takes; None where transformers' code runs."""
    sizes = sizes_of(blueprint, settings, device)
    if sizes is None:
        return None
    shapes, item = [each.shape for each in sizes], blueprint.dtype.itemsize
    return kv_cache.sequence_bytes(shapes, context, context, min(settings.chunk, context), item, settings.kv_bits)


def expanding_needs(blueprint: Blueprint, settings: Settings, device: str) -> list[Need]:
    """Dense weights that a decoder makes of others and keeps: taps of convolutions, and for the native kernels latent
    attention's."""
    sizes = sizes_of(blueprint, settings, device) or []
    by_kernels = blueprint.dtype == torch.bfloat16 and native.available()
    latents = sum(each.expanding_bytes for each in sizes if by_kernels and isinstance(each, LatentSizes))
    taps = sum(
        each.taps_bytes
        for each in sizes
        if isinstance(each, ConvolutionSizes) or (by_kernels and isinstance(each, LinearSizes))
    )
    made = (("matrices that expand latents", latents), ("convolutions' taps", taps))
    return [Need("dense", held, Phase.RUNNING, what) for what, held in made if held]


def _attention_needs(blueprint: Blueprint, sizes: Sequence[AttentionSizes], load: Workload) -> list[Need]:
    """One layer's attention, of one sequence after the other, or of few tokens by the native kernel. Each kind of layer
    keeps a workspace of its own."""
    hidden = int(blueprint.config.hidden_size)
    widest = max(hidden, int(getattr(blueprint.config, "q_lora_rank", None) or 0))
    kinds = [[each for each in sizes if type(each) is kind] for kind in {type(each) for each in sizes}]
    many = sum(max(each.prompt_bytes(load, blueprint.dtype) for each in alike) for alike in kinds)
    few = max(each.few_tokens_bytes(load.tokens, load.context, load.threads, widest) for each in sizes)
    turned: dict[int, int] = {}
    for each in sizes:
        its = each.rotary if isinstance(each, GroupedSizes) else 0
        turned[its] = max(turned.get(its, 0), each.rotary_columns)
    tables = sum(table_bytes(load.context, columns, load.itemsize) for columns in turned.values())
    return [
        Need("activations", tables, Phase.RUNNING, "angles of positions"),
        Need("activations", many, Phase.RUNNING, "attention"),
        Need("activations", few, Phase.RUNNING, "attention of few tokens"),
    ]


def _layer_needs(
    blueprint: Blueprint, formats: Sequence[ExpertFormat], settings: Settings, load: Workload, columns: int
) -> list[Need]:
    """A layer's tensors that live at the same time (those of a norm with its float32 copies, of its projections or of
    its feed-forward part), one decoded matrix where many tokens meet packed weights, and the logits. columns: of a
    token's queries."""
    config, item, tokens = blueprint.config, load.itemsize, load.tokens
    hidden = int(getattr(config, "hidden_size", 0) or config.d_model)
    matrices = [part.out_in for form in formats for part in form.layer.parts if part.is_matrix]
    top_k = max(layer.top_k for layer in blueprint.layers)
    norm = hidden * (item + 3 * 4)
    attention = columns * (8 * item + 3 * 4)
    experts = (hidden * (top_k + 3) + 3 * max(map(max, matrices))) * item
    dense = 3 * _widest_dense(blueprint) * item
    decoded = decoded_bytes(formats, settings.dense_bits_used, blueprint.dtype)
    known = tokens * prepared_at_most(_widest_dense(blueprint)) if native.available() else 0
    prepared = max(prepared_bytes(formats, top_k, tokens, blueprint.dtype), known)
    return [
        Need(
            "activations",
            int(tokens * (2 * hidden * item + max(norm, attention, experts, dense)) * _ALLOCATOR),
            Phase.RUNNING,
            "of one prefill chunk",
        ),
        Need("activations", decoded if tokens > _PACKED_OPERATOR_TOKENS else 0, Phase.RUNNING, "a decoded matrix"),
        Need("activations", prepared, Phase.RUNNING, "what products know of their tokens"),
        Need("activations", load.sequences * int(config.vocab_size) * _LOGIT_BYTES, Phase.RUNNING, "logits"),
        Need(
            "activations",
            load.use.scored * int(config.vocab_size) * item * _SCORED_COPIES,
            Phase.RUNNING,
            "logits of tokens that are scored",
        ),
    ]


def _widest_dense(blueprint: Blueprint) -> int:
    """Columns of what a dense matrix gives at the most, embeddings and output layer apart: they give a row a token."""
    vocabulary, stored = int(blueprint.config.vocab_size), blueprint.checkpoint.tensors
    tables = table_keys(blueprint)
    shapes = [stored[key].shape for key in blueprint.dense_keys if key not in tables]
    return max((max(shape) for shape in shapes if len(shape) == 2 and vocabulary not in shape), default=0)
