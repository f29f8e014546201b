"""Decoding one token: the attention half of each decoder layer in one native call instead of some sixty of torch's.

transformers' own forward stays in place for everything else: prompts, batches, masks, other caches, hooks, gradients. A
layer is taken only if its attention has the parts that the kernel computes with, and if both forwards agree on a random
token at loading, so that a family that scales, biases or orders something differently keeps its own.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from tiermoe.kernels.native.attention import AttentionWeights, OneTokenAttention, PackedMatrix, one_token_attention
from tiermoe.runtime.dense import PackedLinear

ROOM = 64  # positions by which a key/value cache grows: appending a token copies none but every 64th time
_PAST = 5  # positions before the token on which both forwards must agree
_AGREE = 0.02  # relative error of their outputs; bfloat16 rounds to 0.004


def take_over(model: Any) -> list[OneTokenLayer]:
    """Replaces the forward of the decoder layers that the kernel can compute; returns what gives it back."""
    taken = []
    for layer in model.modules():
        if isinstance(getattr(layer, "self_attn", None), torch.nn.Module) and hasattr(layer, "mlp"):
            weights = _weights_of(layer)
            kernel = one_token_attention(weights) if weights else None
            if kernel is not None:
                fast = OneTokenLayer(layer, kernel)
                if fast.agrees():
                    fast.attach()
                    taken.append(fast)
    return taken


class OneTokenLayer:
    """A decoder layer's forward: the kernel for one token that needs nothing else, transformers' own for the rest."""

    def __init__(self, layer: Any, kernel: OneTokenAttention) -> None:
        self._layer = layer
        self._kernel = kernel
        self._forward = layer.forward
        self._attention = layer.self_attn
        self._index = self._attention.layer_idx
        self._watched = [self._attention, layer.input_layernorm, layer.post_attention_layernorm]
        self._parts = list(self._attention._modules.values())

    def attach(self) -> None:
        self._layer.forward = self

    def detach(self) -> None:
        """transformers' own forward, as before."""
        del self._layer.forward

    def __call__(self, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        cache = named.get("past_key_values")
        if arguments or not self._is_plain(hidden_states, named, cache):
            return self._forward(hidden_states, *arguments, **named)
        return self._one_token(hidden_states, named["position_embeddings"], cache.layers[self._index])

    def agrees(self) -> bool:
        """Whether both forwards give the same for a random token after random ones, up to rounding. In place of the
        experts stands a function of their input alone."""
        layer, mlp = self._layer, self._layer.mlp
        hidden, head = self._kernel.weights.query.in_, self._kernel.weights.head_columns
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).bfloat16()

        angles = torch.randn(1, 1, head // 2, generator=generator).repeat(1, 1, 2)
        kv_heads = self._kernel.weights.key.out // head
        past = [random(1, kv_heads, _PAST, head) for _ in range(2)]
        token = random(1, 1, hidden)
        named = {"position_embeddings": (angles.cos().bfloat16(), angles.sin().bfloat16()), "attention_mask": None}
        layer.mlp = _Double()
        try:
            with torch.no_grad():
                want = self._forward(token, past_key_values=self._cache_of(past), **named)
                got = self._one_token(token, named["position_embeddings"], self._cache_of(past).layers[self._index])
        except (TypeError, KeyError, RuntimeError):  # a forward of another shape
            return False
        finally:
            layer.mlp = mlp
        if not isinstance(want, torch.Tensor) or want.shape != got.shape:
            return False
        return bool((want.float() - got.float()).norm() <= _AGREE * want.float().norm())

    def _one_token(self, hidden: torch.Tensor, position: Any, cache: DynamicLayer) -> torch.Tensor:
        room, length = _room_in(cache), cache.keys.shape[2]
        residual, normed = self._kernel(hidden, *position, room.keys, room.values, length)
        room.show(cache, length + 1)
        result: torch.Tensor = residual + self._layer.mlp(normed)
        return result

    def _is_plain(self, hidden: torch.Tensor, named: dict[str, Any], cache: Any) -> bool:
        """Whether nothing but this token, its position and a cache that grows is asked for."""
        if hidden.numel() != hidden.shape[-1] or named.get("attention_mask") is not None or torch.is_grad_enabled():
            return False
        position = named.get("position_embeddings")
        if not isinstance(position, tuple):
            return False
        if not isinstance(cache, DynamicCache) or cache.offloading or len(cache.layers) <= self._index:
            return False
        layer = cache.layers[self._index]
        if type(layer) is not DynamicLayer or not layer.is_initialized or layer.keys.shape[0] != 1:
            return False
        if any(module._forward_hooks or module._forward_pre_hooks for module in self._watched):
            return False
        tensors = (hidden, layer.keys, layer.values, *position)
        plain = all(tensor.dtype == torch.bfloat16 for tensor in tensors) and hidden.is_contiguous()
        return plain and list(self._attention._modules.values()) == self._parts

    def _cache_of(self, past: list[torch.Tensor]) -> DynamicCache:
        cache = DynamicCache()
        cache.update(past[0], past[1], 0)
        cache.layers = cache.layers * (self._index + 1)
        return cache


class _Room:
    """A key/value cache with places for tokens to come: a layer's `keys` and `values` are views of its first ones."""

    def __init__(self, cache: DynamicLayer) -> None:
        self.keys, self.values = _grown(cache.keys), _grown(cache.values)
        self._shown: tuple[torch.Tensor, torch.Tensor] | None = None

    def show(self, cache: DynamicLayer, length: int) -> None:
        """Makes the first `length` positions what the layer holds."""
        cache.keys, cache.values = self._shown = self.keys[:, :, :length], self.values[:, :, :length]

    def takes_one_more(self, cache: DynamicLayer) -> bool:
        """Whether the layer holds what was last shown, and not what somebody cropped, reordered or copied."""
        shown = self._shown is not None and cache.keys is self._shown[0] and cache.values is self._shown[1]
        return shown and cache.keys.shape[2] < self.keys.shape[2]


def _room_in(cache: DynamicLayer) -> _Room:
    room: _Room | None = getattr(cache, "tiermoe_room", None)
    if room is None or not room.takes_one_more(cache):
        room = cache.tiermoe_room = _Room(cache)
    return room


def _grown(held: torch.Tensor) -> torch.Tensor:
    batch, heads, length, columns = held.shape
    grown = torch.empty((batch, heads, length + ROOM, columns), dtype=held.dtype)
    grown[:, :, :length] = held
    return grown


class _Double(torch.nn.Module):
    """Stands for a layer's experts."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2


def _weights_of(layer: Any) -> AttentionWeights | None:
    """A decoder layer's weights, where it has the kernel's parts and no others."""
    attention = layer.self_attn
    norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    norms += [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    matrices = [_matrix_of(getattr(attention, name, None)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    epsilons = {getattr(norm, "variance_epsilon", None) for norm in norms if norm is not None}
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
    if None in matrices or None in norms[:2] or len(epsilons) != 1 or None in epsilons or set(attention._modules) - known:
        return None
    before, after, query, key = (None if norm is None else norm.weight for norm in norms)
    return AttentionWeights(
        *[matrix for matrix in matrices if matrix is not None], before, after, query, key,
        float(epsilons.pop()), float(attention.scaling), int(attention.head_dim),
    )  # fmt: skip


def _matrix_of(module: Any) -> PackedMatrix | None:
    return module.packed if isinstance(module, PackedLinear) and module.bias is None else None
