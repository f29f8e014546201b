"""The native form of a layer's attention half, for few tokens: what the kernel is told of blocks and steps."""

from __future__ import annotations

import torch
from torch import Tensor

from tiermoe.kernels.native import attention as native
from tiermoe.kernels.native.attention import PackedMatrix
from tiermoe.kernels.native.few_tokens_attention import FewTokensAttention, few_tokens_attention
from tiermoe.model.attention import GroupedAttention
from tiermoe.model.delta import GatedDelta
from tiermoe.model.latent import LatentAttention
from tiermoe.model.norms import LayerNorm, Norm, RootMeanSquare
from tiermoe.model.rotary import turn_halves
from tiermoe.model.short_convolution import ShortConvolution
from tiermoe.quant.plain import Plain


def few_tokens_form(
    before: Norm,
    attention: GroupedAttention | LatentAttention | GatedDelta | ShortConvolution,
    after: Norm,
    rotary_columns: int,
    multiplier: float,
) -> FewTokensAttention | None:
    """The kernel of norm, attention, residual and norm; None where it does not take one of them."""
    norm_before, norm_after = _norm(before), _norm(after)
    if norm_before is None or norm_after is None or isinstance(attention, GatedDelta | ShortConvolution):
        return None
    if isinstance(attention, LatentAttention):
        return _latent(norm_before, attention, norm_after, multiplier)
    return _grouped(norm_before, attention, norm_after, rotary_columns, multiplier)


def _grouped(
    before: native.Norm, attention: GroupedAttention, after: native.Norm, rotary_columns: int, multiplier: float
) -> FewTokensAttention | None:
    if attention.clip is not None or attention.value is None or attention.value_norm is not None:
        return None
    query_norm, key_norm = attention.query_norm, attention.key_norm
    return few_tokens_attention(
        native.GroupedAttention(
            query=attention.query.packed,
            key=attention.key.packed,
            value=attention.value.packed,
            output=attention.output.packed,
            norm_before=before,
            norm_after=after,
            head_columns=attention.columns,
            rotary_columns=rotary_columns,
            scale=attention.scale,
            norm_query=None if query_norm is None else _norm(query_norm),
            norm_key=None if key_norm is None else _norm(key_norm),
            interleaved=attention.turn is not turn_halves,
            window=attention.window or 0,
            sinks=attention.sinks,
            gated=attention.gated,
            residual_multiplier=multiplier,
        )
    )


def _latent(
    before: native.Norm, attention: LatentAttention, after: native.Norm, multiplier: float
) -> FewTokensAttention | None:
    norm_latent = _norm(attention.latent_norm)
    if norm_latent is None or attention.expand.packed.bias is not None:
        return None
    key_up, value_up = _expanding(attention)
    narrow, query_norm = attention.narrow_query, attention.query_norm
    return few_tokens_attention(
        native.LatentAttention(
            query=attention.query.packed,
            latent=attention.compress.packed,
            key_up=key_up,
            value_up=value_up,
            output=attention.output.packed,
            norm_before=before,
            norm_after=after,
            norm_latent=norm_latent,
            head_columns=attention.plain_columns,
            value_columns=attention.value_columns,
            latent_columns=attention.latent_columns,
            rotary_columns=attention.rotary_columns,
            scale=attention.scale,
            query_first=None if narrow is None else narrow.packed,
            norm_query=None if query_norm is None else _norm(query_norm),
            interleaved=attention.turn is not turn_halves,
            residual_multiplier=multiplier,
        )
    )


def _expanding(attention: LatentAttention) -> tuple[PackedMatrix, PackedMatrix]:
    """What makes keys and values of latents, apart and at 16 bits: of keys each head's transpose (heads * latent,
    plain), of values (heads * value, latent)."""
    packed = attention.expand.packed
    heads, latent = attention.heads, attention.latent_columns
    both = packed.encoding.decode(packed.fields, packed.out, packed.in_, torch.bfloat16).view(heads, -1, latent)
    keys = both[:, : attention.plain_columns].transpose(1, 2).reshape(heads * latent, -1).contiguous()
    values = both[:, attention.plain_columns :].reshape(-1, latent).contiguous()
    return _plain(keys), _plain(values)


def _plain(weight: Tensor) -> PackedMatrix:
    return PackedMatrix(Plain(), {"weight": weight}, *weight.shape)


def _norm(norm: Norm) -> native.Norm | None:
    if isinstance(norm, LayerNorm):
        return native.Norm(norm.weight, norm.epsilon, "layer", norm.bias)
    if isinstance(norm, RootMeanSquare):
        if norm.centred:
            return native.Norm(norm.weight, norm.epsilon, "rms_centred")
        return native.Norm(norm.weight, norm.epsilon, "rms_at_once" if norm.late else "rms")
    return None
