"""What one chunk of tokens needs beside weights and cache. Checked against measured peaks (docs/results.md)."""

from __future__ import annotations

import math

import torch

from tiermoe import native
from tiermoe.config import MIB, Settings
from tiermoe.kernels import decodes
from tiermoe.runtime.blueprint import Blueprint
from tiermoe.runtime.kv_needs import attention_shape
from tiermoe.store.layout import ExpertFormat

_ALLOCATOR = 1.15  # what the allocator holds beyond the tensors that live, measured
_PACKED_OPERATOR_TOKENS = 12  # from more tokens on, kernels may decode a matrix first (kernels/cpu.py)


def activation_bytes(blueprint: Blueprint, formats: list[ExpertFormat], settings: Settings, context: int) -> int:
    """The most that one chunk needs beside weights and cache: a layer's tensors that live at the same time (those of a
    norm with its float32 copies, of its attention or of its experts), one decoded matrix where many tokens meet packed
    weights, and the logits."""
    config, item = blueprint.config, blueprint.dtype.itemsize
    at_once = context if blueprint.family.encoder_decoder else min(settings.chunk, context)
    tokens = at_once * settings.batch
    hidden = int(getattr(config, "hidden_size", 0) or config.d_model)
    heads, kv_heads, head_dim = attention_shape(config)
    matrices = [part.out_in for form in formats for part in form.layer.parts if part.is_matrix]
    top_k = max(layer.top_k for layer in blueprint.layers)
    residual = 2 * hidden * item
    norm = hidden * (item + 3 * 4)
    attention = heads * head_dim * (8 * item + 3 * 4)
    experts = (hidden * (top_k + 3) + 3 * max(map(max, matrices))) * item
    scores = tokens * context * 5
    repeated = 2 * settings.batch * context * heads * head_dim * item if kv_heads < heads else 0
    logits = settings.batch * int(config.vocab_size) * 16
    return (
        int(tokens * (residual + max(norm, attention, experts)) * _ALLOCATOR)
        + scores
        + repeated
        + (_decoded_bytes(formats, settings, blueprint.dtype) if tokens > _PACKED_OPERATOR_TOKENS else 0)
        + logits
    )


def _decoded_bytes(formats: list[ExpertFormat], settings: Settings, dtype: torch.dtype) -> int:
    """The largest matrix that a kernel decodes for many tokens, with its temporaries; 0 where none does. Dense layers
    are about as large as experts' matrices."""
    parts = [(form, part) for form in formats for part in form.layer.parts if part.is_matrix]
    dense = settings.dense_bits_used == 8 or (settings.dense_bits_used == 4 and not native.available())
    decoded = [
        math.prod(part.out_in)
        for form, part in parts
        if dense or decodes(form.encodings.get(part.name), *part.out_in, dtype)
    ]
    return max(decoded) * dtype.itemsize + 4 * MIB if decoded else 0
