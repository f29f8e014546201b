"""What the attention kernel is told of a decoder layer."""

from __future__ import annotations

from typing import Any

from tiermoe.kernels.native.attention import PackedMatrix
from tiermoe.kernels.native.one_token_attention import AttentionWeights
from tiermoe.runtime.dense import PackedLinear

_UNKNOWN = ("clip_qkv", "sliding_window", "attn_logit_softcapping")  # of attentions that the kernel does not compute


def weights_of(layer: Any) -> AttentionWeights | None:
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
    before, after = norms[0].weight, norms[1].weight
    query_norm, key_norm = (getattr(norm, "weight", None) for norm in norms[2:])
    scale, head = float(attention.scaling), int(attention.head_dim)
    return AttentionWeights(query, key, value, output, before, after, query_norm, key_norm, float(epsilon), scale, head)


def _asked(attention: Any, name: str) -> bool:
    """Whether a family's setting is in use that a random token need not show."""
    config = getattr(attention, "config", None)
    return bool(getattr(attention, name, None) or getattr(config, name, None))


def _matrix_of(module: Any) -> PackedMatrix | None:
    return module.packed if isinstance(module, PackedLinear) else None
