"""Decoding a token of each sequence: the attention half of each decoder layer in one native call instead of some sixty
of torch's.

transformers' own forward stays in place for everything else: prompts, masks that hide more than a padding on the left,
other caches, hooks, gradients. A layer is taken only if its attention has the parts that the kernel computes with, and
if both forwards agree on a random token at loading, so that a family that scales, biases or orders something
differently keeps its own.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from tiermoe.kernels.native.one_token_attention import OneTokenAttention
from tiermoe.runtime.one_token.asked import collected, hooked
from tiermoe.runtime.one_token.block import OneTokenBlock
from tiermoe.runtime.one_token.padding import first_positions
from tiermoe.runtime.one_token.room import room_in
from tiermoe.runtime.one_token.taken_over import TakenOver, alike
from tiermoe.types import FEW_TOKENS

_PAST = 5  # positions before the token on which both forwards must agree
_AGREE = 0.02  # relative error of their outputs


class OneTokenLayer(TakenOver):
    """A decoder layer's forward: the kernel for a token of each sequence that needs nothing else, transformers' own
    for the rest."""

    def __init__(self, layer: Any, kernel: OneTokenAttention, block: OneTokenBlock | None) -> None:
        super().__init__(layer)
        self._block = block
        self._kernel = kernel
        self._attention = layer.self_attn
        self._index = self._attention.layer_idx
        self._watched = [self._attention, layer.input_layernorm, layer.post_attention_layernorm]
        self._parts = list(self._attention._modules.values())
        self._head = kernel.weights.head_columns

    def __call__(self, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        cache = named.get("past_key_values")
        if arguments or not self._is_plain(hidden_states, named, cache):
            return self._forward(hidden_states, *arguments, **named)
        assert cache is not None
        held, mask = cache.layers[self._index], named.get("attention_mask")
        first = None
        if mask is not None:
            first = first_positions(mask, hidden_states.shape[0], held.keys.shape[2] + 1)
            if first is None:
                return self._forward(hidden_states, *arguments, **named)
        return self._one_token(hidden_states, named["position_embeddings"], held, first)

    def agrees(self) -> bool:
        """Whether both forwards give the same for a random token after random ones, up to rounding. In place of the
        experts stands a function of their input alone."""
        layer, mlp, block = self._module, self._module.mlp, self._block
        hidden, head = self._kernel.weights.query.in_, self._kernel.weights.head_columns
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).bfloat16()

        angles = torch.randn(1, 1, head // 2, generator=generator).repeat(1, 1, 2)
        kv_heads = self._kernel.weights.key.out // head
        past = [random(1, kv_heads, _PAST, head) for _ in range(2)]
        token = random(1, 1, hidden)
        named = {"position_embeddings": (angles.cos().bfloat16(), angles.sin().bfloat16()), "attention_mask": None}
        layer.mlp, self._block = _Double(), None
        try:
            with torch.no_grad():
                want = self._forward(token, past_key_values=self._cache_of(past), **named)
                got = self._one_token(token, named["position_embeddings"], self._cache_of(past).layers[self._index])
        except (TypeError, KeyError, RuntimeError):  # a forward of another shape
            return False
        finally:
            layer.mlp, self._block = mlp, block
        return alike(want, got, _AGREE)

    def _one_token(
        self, hidden: torch.Tensor, position: Any, cache: DynamicLayer, first: torch.Tensor | None = None
    ) -> torch.Tensor:
        room, length = room_in(cache), cache.keys.shape[2]
        cos, sin = position
        residual, normed = self._kernel(hidden, cos, sin, room.keys, room.values, length, first)
        room.show(cache, length + 1)
        if self._block is not None and self._block.is_plain():
            return self._block(normed, residual)
        result: torch.Tensor = residual + self._module.mlp(normed)
        return result

    def _is_plain(self, hidden: torch.Tensor, named: dict[str, Any], cache: Any) -> bool:
        """Whether nothing but a token of each sequence, its position and a cache that grows is asked for."""
        sequences, tokens = hidden.shape[:2] if hidden.ndim == 3 else (0, 0)
        if tokens != 1 or sequences > FEW_TOKENS or torch.is_grad_enabled():
            return False
        position = named.get("position_embeddings")
        if not isinstance(position, tuple) or position[0].shape[1:] != (1, self._head):
            return False  # some families rotate a part of a head
        if position[0].shape[0] not in (1, sequences) or not position[0].is_contiguous():
            return False
        if not isinstance(cache, DynamicCache) or cache.offloading or len(cache.layers) <= self._index:
            return False
        layer = cache.layers[self._index]
        if type(layer) is not DynamicLayer or not layer.is_initialized or layer.keys.shape[0] != sequences:
            return False
        if collected("attentions") or any(hooked(module) for module in self._watched):
            return False
        if not hidden.is_contiguous() or not position[1].is_contiguous():
            return False
        tensors = (hidden, layer.keys, layer.values, *position)
        return (
            all(tensor.dtype == torch.bfloat16 for tensor in tensors)
            and list(self._attention._modules.values()) == self._parts
        )

    def _cache_of(self, past: list[torch.Tensor]) -> DynamicCache:
        cache = DynamicCache()
        cache.update(past[0], past[1], 0)
        cache.layers = cache.layers * (self._index + 1)
        return cache


class _Double(torch.nn.Module):
    """Stands for a layer's experts."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2
