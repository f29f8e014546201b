"""Decoding one token: the attention half of each decoder layer in one native call instead of some sixty of torch's.

transformers' own forward stays in place for everything else: prompts, batches, masks, other caches, hooks, gradients. A
layer is taken only if its attention has the parts that the kernel computes with, and if both forwards agree on a random
token at loading, so that a family that scales, biases or orders something differently keeps its own.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.utils import output_capturing
from transformers.utils.output_capturing import _active_collector

from tiermoe.kernels.native.attention import AttentionWeights, OneTokenAttention, PackedMatrix, one_token_attention
from tiermoe.runtime.dense import PackedLinear
from tiermoe.runtime.one_token_router import OneTokenRouter, one_token_router
from tiermoe.runtime.shells import is_shell

ROOM = 64  # positions by which a key/value cache grows: appending a token copies none but every 64th time
_UNKNOWN = ("clip_qkv", "sliding_window", "attn_logit_softcapping")  # of attentions that the kernel does not compute
_PAST = 5  # positions before the token on which both forwards must agree
_AGREE = 0.02  # relative error of their outputs; bfloat16 rounds to 0.004


def take_over(model: Any) -> list[OneTokenLayer | OneTokenRouter]:
    """Replaces the forward of the decoder layers and routers that the kernels can compute; returns what gives it back.

    None where the dense layers are not packed: then one token is computed as transformers does."""
    if not any(isinstance(module, PackedLinear) for module in model.modules()):
        return []
    found = [fast for module in model.modules() if (fast := _layer_of(module) or _router_in(module)) is not None]
    for fast in found:
        fast.attach()
    return found


def _layer_of(layer: Any) -> OneTokenLayer | None:
    if not isinstance(getattr(layer, "self_attn", None), torch.nn.Module) or not hasattr(layer, "mlp"):
        return None
    weights = _weights_of(layer)
    kernel = one_token_attention(weights) if weights else None
    fast = OneTokenLayer(layer, kernel) if kernel else None
    return fast if fast and fast.agrees() else None


def _router_in(block: Any) -> OneTokenRouter | None:
    router = getattr(block, "gate", None) or getattr(block, "router", None)
    return one_token_router(router) if router is not None and is_shell(getattr(block, "experts", block)) else None


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
        self._position = (1, 1, kernel.weights.head_columns)

    def attach(self) -> None:
        self._layer.forward = self

    def detach(self) -> None:
        """transformers' own forward, as before."""
        del self._layer.forward

    def __call__(self, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        cache = named.get("past_key_values")
        if arguments or not self._is_plain(hidden_states, named, cache):
            return self._forward(hidden_states, *arguments, **named)
        assert cache is not None
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
        cos, sin = position
        residual, normed = self._kernel(hidden, cos, sin, room.keys, room.values, length)
        room.show(cache, length + 1)
        result: torch.Tensor = residual + self._layer.mlp(normed)
        return result

    def _is_plain(self, hidden: torch.Tensor, named: dict[str, Any], cache: Any) -> bool:
        """Whether nothing but this token, its position and a cache that grows is asked for."""
        if hidden.numel() != hidden.shape[-1] or named.get("attention_mask") is not None or torch.is_grad_enabled():
            return False
        position = named.get("position_embeddings")
        if not isinstance(position, tuple) or position[0].shape != self._position or not position[0].is_contiguous():
            return False  # some families rotate a part of a head
        if not isinstance(cache, DynamicCache) or cache.offloading or len(cache.layers) <= self._index:
            return False
        layer = cache.layers[self._index]
        if type(layer) is not DynamicLayer or not layer.is_initialized or layer.keys.shape[0] != 1:
            return False
        if _attentions_asked() or any(_hooked(module) for module in self._watched):
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
    if attention._parameters or any(_asked(attention, name) for name in _UNKNOWN):
        return None
    norms: list[Any] = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    norms += [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    matrices = [_matrix_of(getattr(attention, name, None)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    epsilons = {getattr(norm, "variance_epsilon", None) for norm in norms if norm is not None}
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
    query, key, value, output = matrices
    epsilon = epsilons.pop() if len(epsilons) == 1 else None
    if query is None or key is None or value is None or output is None or set(attention._modules) - known:
        return None
    if epsilon is None or norms[0] is None or norms[1] is None:
        return None
    before, after, query_norm, key_norm = (None if norm is None else norm.weight for norm in norms)
    head = int(attention.head_dim)
    return AttentionWeights(
        query, key, value, output, before, after, query_norm, key_norm, float(epsilon), float(attention.scaling), head
    )


def _attentions_asked() -> bool:
    """Whether this call collects attention weights (output_attentions)."""
    collected = _active_collector.get()
    return collected is not None and "attentions" in collected


def _hooked(module: torch.nn.Module) -> bool:
    """Whether a module has hooks, other than those that transformers leaves once outputs have been collected."""
    if not module._forward_hooks and not module._forward_pre_hooks:
        return False
    left = all(hook.__module__ == output_capturing.__name__ for hook in module._forward_hooks.values())
    return bool(module._forward_pre_hooks) or not left


def _asked(attention: Any, name: str) -> bool:
    """Whether a family's setting is in use that a random token need not show."""
    config = getattr(attention, "config", None)
    return bool(getattr(attention, name, None) or getattr(config, name, None))


def _matrix_of(module: Any) -> PackedMatrix | None:
    return module.packed if isinstance(module, PackedLinear) else None
