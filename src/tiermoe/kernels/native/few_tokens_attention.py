"""The attention half of a decoder layer for few tokens, of any sequences and positions, in one call: norm, projections,
rotary embedding, attention over the key/value cache, output projection, residual, norm.

A layer is described by `GroupedAttention` or `LatentAttention`, what the tokens are by `Step`, and where their keys and
values lie by `Slabs`. A token's values depend on its sequence's earlier positions alone, bit for bit: neither the other
tokens of a call nor the number of threads matter, nor whether the cache is a ring.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tiermoe.kernels.native.attention import GroupedAttention, LatentAttention, address, pack_layer, plain
from tiermoe.kernels.native.matrix import prepared_at_most
from tiermoe.native import _native
from tiermoe.quant.scratch import scratch
from tiermoe.types import FEW_TOKENS

_TILE = 256  # positions of a piece of work
_PROJECTIONS = 3


def few_tokens_workspace(
    tokens: int, positions: int, threads: int, heads: tuple[int, int, int, int], hidden: int, latent: int
) -> int:
    """The most that the kernel's workspace takes for so many tokens that attend to up to `positions` each. heads: query
    heads, key/value heads, columns of a key and of a value as they are attended to. hidden: of the model, or of a
    narrow query if that is wider. latent: columns of a latent, 0: none."""
    count, kv_heads, key, value = heads
    tokens = min(tokens, FEW_TOKENS)
    tiles = tokens * (-(-positions // _TILE) + 1)
    widest = max(hidden, count * max(key, value), latent)
    known = _PROJECTIONS * (tokens * prepared_at_most(widest) + 64)
    shared = threads * (known + 2 * tokens * (hidden + max(latent, key)))
    projected = 2 * tokens * (2 * hidden + count * (2 * key + value) + kv_heads * (key + value))
    return shared + projected + tiles * (4 * count * (value + 16) + 32)


class Slabs:
    """A layer's key/value cache, bfloat16 and contiguous: keys (slabs, kv heads, room, head), values (slabs, kv heads,
    room, value); of latent attention keys (slabs, 1, room, latent + rotary) and no values. Position p lies in row p, of
    a ring in row p % room: its room holds a window and as many positions as a step adds to a sequence. scales: of keys
    and values that are codes, int8 (`model.kv_codes`), bfloat16 (slabs, kv heads, room, 1) each.

    ValueError: of another dtype, shape or layout. Keeps the tensors alive."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor | None = None,
        ring: bool = False,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        dtype = torch.bfloat16 if scales is None else torch.int8
        for name, tensor, its in (("keys", keys, dtype), ("values", values, dtype), *_named(scales)):
            fits = tensor is None or (tensor.dtype == its and tensor.is_contiguous() and tensor.device.type == "cpu")
            if tensor is not None and (not fits or tensor.ndim != 4 or tensor.shape[:3] != keys.shape[:3]):
                raise ValueError(f"{name} must be contiguous {str(its)[6:]} (slabs, heads, room, columns) on the CPU")
        self.keys, self.values, self.ring, self.scales = keys, values, ring, scales
        slabs, heads, room, columns = keys.shape
        key_scales, value_scales = (None, None) if scales is None else scales
        self.packed = _native.slabs(
            keys.data_ptr(), address(values), address(key_scales), address(value_scales), slabs, heads, room, columns,
            0 if values is None else values.shape[3], ring,
        )  # fmt: skip


def _named(scales: tuple[Tensor, Tensor] | None) -> list[tuple[str, Tensor, torch.dtype]]:
    names = ("scales of keys", "scales of values")
    return [(name, each, torch.bfloat16) for name, each in zip(names, scales or (), strict=False)]


class Step:
    """The tokens of a step: slabs and positions int64 (T), whose cache and where in it a token's key and value go; cos
    and sin bfloat16 (T, rotary columns); first int64 (T), where padding on the left ends, None: 0. A token attends to
    positions max(first, position - window + 1) .. position of its slab, those that the step writes included. Tokens of
    one slab have different positions. Serves all layers that rotate alike.

    chosen int32 (T, most): a token attends to these positions of its slab alone, ascending, of one with fewer than
    `most` positions to the first so many of its row; None: to all.

    ValueError: of another dtype, shape or layout. Keeps the tensors alive; they must not change while it is used."""

    def __init__(
        self,
        slabs: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        first: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> None:
        self.tokens = slabs.numel()
        whole = [slabs, positions] if first is None else [slabs, positions, first]
        if any(each.dtype != torch.int64 or each.shape != (self.tokens,) or not each.is_contiguous() for each in whole):
            raise ValueError(f"slabs, positions and first must be contiguous int64 ({self.tokens})")
        if not 0 < self.tokens <= FEW_TOKENS:
            raise ValueError(f"{self.tokens} tokens in a step: 1 to {FEW_TOKENS}")
        if any(not plain(each) or each.ndim != 2 or len(each) != self.tokens for each in (cos, sin)):
            raise ValueError(f"cos and sin must be contiguous bfloat16 ({self.tokens}, rotary columns)")
        if cos.shape != sin.shape:
            raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} differ")
        if chosen is not None and (chosen.dtype != torch.int32 or not chosen.is_contiguous() or chosen.ndim != 2):
            raise ValueError(f"chosen must be contiguous int32 ({self.tokens}, positions)")
        if chosen is not None and len(chosen) != self.tokens:
            raise ValueError(f"positions are chosen for {len(chosen)} of {self.tokens} tokens")
        self._held = (slabs, positions, cos, sin, first)
        self._chosen = chosen
        self.packed = _native.step(
            self.tokens, slabs.data_ptr(), positions.data_ptr(), address(first), cos.data_ptr(), sin.data_ptr(),
            cos.shape[1], address(chosen), 0 if chosen is None else chosen.shape[1],
        )  # fmt: skip

    def choosing(self, chosen: Tensor | None) -> Step:
        """The same tokens, of which each attends to what is `chosen` for it."""
        return Step(*self._held, chosen)


class FewTokensAttention:
    """One layer's. Keeps the weights alive."""

    def __init__(self, weights: GroupedAttention | LatentAttention, packed: bytes) -> None:
        self.weights = weights
        self._packed = packed
        self._hidden = weights.output.out

    def __call__(self, x: Tensor, step: Step, slabs: Slabs) -> tuple[Tensor, Tensor]:
        """x (T, H), bfloat16 and contiguous → (x + the attention's output, the norm of that), each (T, H). Keys and
        values of all tokens are written to their slabs before a token attends.

        ValueError: an x of another dtype, shape or layout; a step or slabs that do not fit the layer; a position
        beyond the slab's room. The interpreter's lock is released meanwhile."""
        if x.shape != (step.tokens, self._hidden) or not plain(x):
            raise ValueError(f"x must be contiguous bfloat16 ({step.tokens}, {self._hidden}), not {tuple(x.shape)}")
        threads = torch.get_num_threads()
        nbytes = _native.workspace(self._packed, step.packed, slabs.packed, threads)
        out, normed = torch.empty_like(x), torch.empty_like(x)
        _native.attend(
            self._packed, step.packed, slabs.packed, scratch.address("attention", nbytes), x.data_ptr(),
            out.data_ptr(), normed.data_ptr(), threads,
        )  # fmt: skip
        return out, normed


def few_tokens_attention(weights: GroupedAttention | LatentAttention) -> FewTokensAttention | None:
    """The kernel of a layer; None where its shapes, encodings or this machine do not suit it."""
    packed = pack_layer(weights)
    return None if packed is None else FewTokensAttention(weights, packed)
