"""Decoding a token of each sequence in few calls: where the dense layers are packed, attention, routers and blocks of a
decoder have forwards of their own for that, and norms for any number of tokens. transformers' own stay in place for
everything else.

Nothing is taken over by name alone: each part must give what transformers' forward gives for random tokens, so a family
that scales, biases or orders something differently keeps its own.
"""

from __future__ import annotations

from typing import Any

from tiermoe.kernels.native.one_token_attention import one_token_attention
from tiermoe.runtime.dense import PackedLinear
from tiermoe.runtime.one_token.block import OneTokenBlock, one_token_block
from tiermoe.runtime.one_token.layer import OneTokenLayer
from tiermoe.runtime.one_token.norm import native_norm
from tiermoe.runtime.one_token.room import ROOM
from tiermoe.runtime.one_token.router import one_token_router
from tiermoe.runtime.one_token.taken_over import TakenOver
from tiermoe.runtime.one_token.weights import weights_of
from tiermoe.runtime.shells import is_shell

__all__ = ["ROOM", "TakenOver", "take_over"]


def take_over(model: Any) -> list[TakenOver]:
    """Replaces the forwards that the kernels can compute; returns what gives them back. None where the dense layers are
    not packed: then one token is computed as transformers does."""
    if not any(isinstance(module, PackedLinear) for module in model.modules()):
        return []
    taken: list[TakenOver] = []
    blocks: dict[Any, OneTokenBlock] = {}
    for block in model.modules():
        gate = getattr(block, "gate", None) or getattr(block, "router", None)
        if gate is None or not is_shell(getattr(block, "experts", block)):
            continue
        router = one_token_router(gate)
        if router is not None:
            taken.append(router)
            fast = one_token_block(block, gate, router)
            if fast is not None:
                blocks[block] = fast
    for layer in model.modules():
        if _is_decoder_layer(layer) and (attention := _layer(layer, blocks.get(layer.mlp))) is not None:
            taken.append(attention)
    taken += filter(None, map(native_norm, model.modules()))
    for each in taken:
        each.attach()
    return taken


def _is_decoder_layer(module: Any) -> bool:
    return hasattr(module, "self_attn") and hasattr(module, "mlp")


def _layer(layer: Any, block: OneTokenBlock | None) -> OneTokenLayer | None:
    weights = weights_of(layer)
    kernel = one_token_attention(weights) if weights else None
    fast = OneTokenLayer(layer, kernel, block) if kernel else None
    return fast if fast and fast.agrees() else None
