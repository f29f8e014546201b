"""Attention over the key/value cache: the attention half of a decoder layer in one call (`FusedAttention`), and
attention alone for a prompt's tokens (`prompt_attention`).

`GroupedAttention` or `LatentAttention` describes a layer, `Step` the tokens, `Slabs` the memory of keys and values. A
token's values depend on its sequence's positions alone, bit for bit, the same in both: neither the other tokens of a
call nor the number of threads matter, nor whether the cache is a ring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe import native
from tiermoe.formats.encoding import Encoding, scratch
from tiermoe.kernels.linear import MatrixForm, address, matrix_form, plain, prepared_at_most
from tiermoe.kernels.norm import Norm
from tiermoe.native import ROWS, _native, structs
from tiermoe.types import FEW_TOKENS

HEAD_COLUMNS = 32  # a head has a multiple of them
LARGEST_HEAD, LARGEST_KEY = 512, 1024  # columns; a key: a latent with its rotary key


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A projection (out, in_): a packed matrix and its bias."""

    encoding: Encoding
    fields: Mapping[str, Tensor]  # of a slot in that encoding
    out: int
    in_: int
    bias: Tensor | None = None  # bfloat16 (out)

    @property
    def device(self) -> torch.device:
        return next(iter(self.fields.values())).device

    def form(self, dtype: torch.dtype) -> MatrixForm | None:
        """Its form for products in `dtype`; None where the kernels do not take it, or its device."""
        on_cpu = self.device.type == "cpu"
        return matrix_form(self.encoding, self.out, self.in_, dtype) if on_cpu else None

    def described(self) -> structs.Projection | None:
        """`structs.Projection`, valid as long as the tensors live; None where the kernels do not take the matrix."""
        form = self.form(torch.bfloat16)
        if form is None or (self.bias is not None and not plain(self.bias)):
            return None
        return structs.Projection(structs.Matrix.from_buffer_copy(form.pack(self.fields)), address(self.bias))


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Grouped-query attention of a layer: head h attends to keys and values of kv head h // (heads / kv heads)."""

    query: PackedMatrix  # (heads * head_columns, H); gated: of each head a query's rows, then value_columns of a gate
    key: PackedMatrix  # (kv heads * head_columns, H)
    value: PackedMatrix  # (kv heads * value_columns, H)
    output: PackedMatrix  # (H, heads * value_columns)
    norm_before: Norm | None  # None, as norm_after: attention alone, of what is normed
    norm_after: Norm | None
    head_columns: int
    rotary_columns: int  # the first ones of a head: columns i and rotary_columns / 2 + i rotate together
    scale: float  # of scores
    norm_query: Norm | None = None  # as wide as a head, or as all of them
    norm_key: Norm | None = None  # likewise
    value_columns: int | None = None  # None: head_columns
    interleaved: bool = False  # columns 2 i and 2 i + 1 rotate together; the cache has them as i and half + i
    rotated_at_once: bool = False  # interleaved columns are rotated in float32 and rounded once
    window: int = 0  # positions that a token attends to, the token's own included; 0: all
    chunked: bool = False  # a token attends from a multiple of the window on
    sinks: Tensor | None = None  # float32 (heads): a score without a value that joins a head's softmax
    gated: bool = False  # what a head attends to is multiplied by the sigmoid of the gate
    residual_multiplier: float = 1.0  # of the output before the residual sum
    norms_rotated: bool = False  # heads are normed after they are rotated, not before


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Latent attention of a layer (DeepSeek-V2): keys and values come from a latent of each position and from a rotary
    key that all heads share. The cache has normed latents and rotated keys, the halves of a rotary key also where
    interleaved."""

    query: PackedMatrix  # (heads * (head_columns + rotary_columns), H), or (.., R) of query_first's normed outputs
    latent: PackedMatrix  # (latent_columns + rotary_columns, H)
    key_up: PackedMatrix  # (heads * latent_columns, head_columns): the transpose of what makes a head's keys of latents
    value_up: PackedMatrix  # (heads * value_columns, latent_columns)
    output: PackedMatrix  # (H, heads * value_columns)
    norm_before: Norm | None  # None, as norm_after: attention alone, of what is normed
    norm_after: Norm | None
    norm_latent: Norm
    head_columns: int  # of a query without a position
    value_columns: int
    latent_columns: int
    rotary_columns: int
    scale: float  # of scores
    query_first: PackedMatrix | None = None  # (R, H)
    norm_query: Norm | None = None  # of query_first's outputs
    interleaved: bool = True
    residual_multiplier: float = 1.0  # of the output before the residual sum
    rotated_at_once: bool = False
    sinks: Tensor | None = None  # float32 (heads): a score without a value that joins a head's softmax
    gate: PackedMatrix | None = None  # (heads, H) or (heads * value_columns, H), by whose sigmoid values are multiplied


def pack_layer(weights: GroupedAttention | LatentAttention) -> bytes | None:
    """`structs.Attention` of a layer, valid as long as the tensors live; None where the kernel does not take the shapes
    or encodings, or does not run on this machine."""
    return _latent(weights) if isinstance(weights, LatentAttention) else _grouped(weights)


def _grouped(weights: GroupedAttention) -> bytes | None:
    query, key, value, output = weights.query, weights.key, weights.value, weights.output
    head, hidden = weights.head_columns, output.out
    value_columns = weights.value_columns or head
    query_columns = head + (value_columns if weights.gated else 0)
    heads, kv_heads = query.out // query_columns, key.out // head
    shapes = [
        (query, heads * query_columns, hidden), (key, kv_heads * head, hidden),
        (value, kv_heads * value_columns, hidden), (output, hidden, heads * value_columns),
    ]  # fmt: skip
    rotates = 0 < weights.rotary_columns <= head and weights.rotary_columns % 2 == 0
    if not kv_heads or heads % kv_heads or not _columns_suit(head, value_columns) or not rotates:
        return None
    by_head = weights.gated or weights.norms_rotated
    query_norm = _norms(weights.norm_query, (head,) if by_head else (head, query.out))
    key_norm = _norms(weights.norm_key, (head,) if weights.norms_rotated else (head, key.out))
    if not query_norm or not key_norm or _any_layer_norm(weights.norm_query, weights.norm_key):
        return None
    sizes = (heads, kv_heads, head, value_columns, weights.rotary_columns, 0, weights.window)
    projections = (query, key, value, output, None, None, None)
    return _packed(weights, projections, shapes, weights.norm_key, weights.sinks, sizes)


def _norms(norm: Norm | None, widths: tuple[int, ...]) -> bool:
    """Whether a norm, if any, is as wide as it may be."""
    return norm is None or norm.weight.numel() in widths


def _latent(weights: LatentAttention) -> bytes | None:
    head, latent, rotary = weights.head_columns, weights.latent_columns, weights.rotary_columns
    first, hidden = weights.query_first, weights.output.out
    heads = weights.query.out // (head + rotary)
    shapes = [
        (weights.query, heads * (head + rotary), first.out if first else hidden),
        (weights.latent, latent + rotary, hidden), (weights.key_up, heads * latent, head),
        (weights.value_up, heads * weights.value_columns, latent),
        (weights.output, hidden, heads * weights.value_columns),
    ]  # fmt: skip
    if first:
        shapes.append((first, first.out, hidden))
    if weights.gate and (weights.gate.out not in (heads, heads * weights.value_columns) or weights.gate.in_ != hidden):
        return None
    if (first is None) != (weights.norm_query is None):
        return None
    if any(each and each.bias is not None for each in (weights.key_up, weights.value_up, weights.gate)):
        return None
    if not takes_latents(torch.bfloat16, head, weights.value_columns, latent, rotary):
        return None
    projections = (weights.query, weights.latent, weights.value_up, weights.output, first, weights.key_up, weights.gate)
    sizes = (heads, 1, head, weights.value_columns, rotary, latent, 0)
    return _packed(weights, projections, shapes, weights.norm_latent, weights.sinks, sizes)


def _packed(
    weights: GroupedAttention | LatentAttention,
    projections: Sequence[PackedMatrix | None],
    shapes: list[tuple[PackedMatrix, int, int]],
    norm_key: Norm | None,
    sinks: Tensor | None,
    sizes: tuple[int, int, int, int, int, int, int],
) -> bytes | None:
    norms = (weights.norm_before, weights.norm_after, weights.norm_query, norm_key)
    if any((matrix.out, matrix.in_) != (out, in_) or out % ROWS for matrix, out, in_ in shapes):
        return None
    if any(norm is not None and not norm.suits() for norm in norms) or (sinks is not None and not _are_sinks(sinks)):
        return None
    packed = [None if matrix is None else matrix.described() for matrix in projections]
    if any((matrix is None) != (each is None) for matrix, each in zip(projections, packed, strict=True)):
        return None
    query, key, value, output, query_first, key_up, gate = (each or structs.Projection() for each in packed)
    before, after, query_norm, latent_or_key = (norm.described() if norm else structs.Norm() for norm in norms)
    heads, kv_heads, key_columns, value_columns, rotary_columns, latent_columns, window = sizes
    return _native.pack(
        structs.Attention(
            query=query, key=key, value=value, output=output, query_first=query_first, key_up=key_up, gate=gate,
            before=before, after=after, query_norm=query_norm, key_norm=latent_or_key, sinks=address(sinks),
            heads=heads, kv_heads=kv_heads, key_columns=key_columns, value_columns=value_columns,
            rotary_columns=rotary_columns,
            latent_columns=latent_columns, window=window,
            gated=isinstance(weights, GroupedAttention) and weights.gated,
            interleaved=2 if weights.rotated_at_once else weights.interleaved,
            norms_rotated=isinstance(weights, GroupedAttention) and weights.norms_rotated,
            chunked=isinstance(weights, GroupedAttention) and weights.chunked,
            scale=weights.scale, residual_multiplier=weights.residual_multiplier,
        )
    )  # fmt: skip


def _columns_suit(head: int, value: int) -> bool:
    return all(columns and columns % HEAD_COLUMNS == 0 and columns <= LARGEST_HEAD for columns in (head, value))


def _any_layer_norm(*norms: Norm | None) -> bool:
    return any(norm is not None and norm.kind == "layer" for norm in norms)


_TILE = 128  # positions of a piece of work
_PROJECTIONS = 3
_OWN_TOKENS = 8  # whose inputs each thread makes for itself
_FEWEST_IN_BLOCKS = 8  # tokens of a sequence that follow each other: fewer are computed one by one
_HEAD_TOKENS = 64  # that go through a head's own matrix at a time


@dataclass(frozen=True, slots=True)
class Attended:
    """What the kernel's workspace follows from: heads of queries and of keys, columns of a key and of a value as they
    are attended to, `projected` columns of a token in all that matrices give and take between the hidden states,
    columns of the widest input, and of a latent, 0: none."""

    heads: int
    kv_heads: int
    key: int
    value: int
    projected: int
    widest: int
    latent: int = 0

    def workspace(self, tokens: int, positions: int, threads: int, sequences: int) -> int:
        """Upper bound of the kernel's workspace in bytes, over all steps of at most `tokens` tokens in `sequences`
        sequences. A token attends to at most `positions`."""
        few = min(tokens, FEW_TOKENS)
        alone = min(few, (_FEWEST_IN_BLOCKS - 1) * sequences)
        return max(self._step(tokens, 0, positions, threads), self._step(few, alone, positions, threads))

    def _step(self, tokens: int, alone: int, positions: int, threads: int) -> int:
        """`workspace` of a step in which `alone` of the tokens are computed by themselves, the others by blocks."""
        inputs = max(tokens, min(tokens, _OWN_TOKENS) * threads)
        known = inputs * (_PROJECTIONS * prepared_at_most(self.widest) + 2 * self.widest) + 64 * _PROJECTIONS * threads
        of_heads = _HEAD_TOKENS * (2 * max(self.latent, self.key) + prepared_at_most(self.latent)) if self.latent else 0
        blocks = 24 * tokens * (1 + self.heads // self.kv_heads // _QUERY_ROWS)
        each = 2 * tokens * (self.projected + self.heads * self.key) + blocks
        shared = prompt_workspace(threads, self.key, self.value) + threads * of_heads + 1024
        tiles = alone * (-(-positions // _TILE) + 1)
        return known + each + shared + tiles * (4 * self.heads * (self.value + 16) + 32)


class Slabs:
    """A layer's key/value cache, bfloat16 and contiguous: keys (slabs, kv heads, room, head), values (slabs, kv heads,
    room, value); of latent attention keys (slabs, 1, room, latent + rotary) and no values. Position p lies in row p.

    ring: position p lies in row p % room; the room is a window and as many positions as a step adds to a sequence.
    scales: keys and values are codes (`model.kv_memory`), int8, or uint8 of two columns each; bfloat16 (slabs, kv
    heads, room, 1) of each.

    ValueError: of another dtype, shape or layout. Keeps the tensors alive."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor | None = None,
        ring: bool = False,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        coded = torch.uint8 if keys.dtype == torch.uint8 else torch.int8
        dtype = torch.bfloat16 if scales is None else coded
        for name, tensor, kind in (("keys", keys, dtype), ("values", values, dtype), *_named(scales)):
            fits = tensor is None or (tensor.dtype == kind and tensor.is_contiguous() and tensor.device.type == "cpu")
            if tensor is not None and (not fits or tensor.ndim != 4 or tensor.shape[:3] != keys.shape[:3]):
                raise ValueError(f"{name} must be contiguous {str(kind)[6:]} (slabs, heads, room, columns) on the CPU")
        self.keys, self.values, self.ring, self.scales = keys, values, ring, scales
        slabs, heads, room = keys.shape[:3]
        in_one = 2 if dtype == torch.uint8 else 1
        self.columns = tuple(0 if each is None else each.shape[3] * in_one for each in (keys, values))
        key_scales, value_scales = (None, None) if scales is None else scales
        self.packed = _native.pack(
            structs.Slabs(
                keys=keys.data_ptr(), values=address(values), key_scales=address(key_scales),
                value_scales=address(value_scales), bits=8 * dtype.itemsize // in_one, slabs=slabs, kv_heads=heads,
                room=room, key_columns=self.columns[0], value_columns=self.columns[1], ring=ring,
            )
        )  # fmt: skip


def _are_sinks(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.device.type == "cpu"


def _named(scales: tuple[Tensor, Tensor] | None) -> list[tuple[str, Tensor, torch.dtype]]:
    names = ("scales of keys", "scales of values")
    return [(name, each, torch.bfloat16) for name, each in zip(names, scales or (), strict=False)]


class Step:
    """Tokens of a step, for all layers with the same rotary embedding.

    slabs, positions: int64 (T), the slab of a token's sequence and the row of the token's key and value in it. Tokens
    of one slab have different positions. cos, sin: bfloat16 or float32 (T, rotary columns). temperatures: float32
    (T), by which queries are multiplied; None: 1. first: int64 (T), where padding on the left ends; None: 0. A token
    attends to positions max(first, position - window + 1) .. position of the slab, those that the step writes
    included. chosen: int32 (T, most), the only positions that a token attends to, ascending; a token with fewer than
    `most` positions has them at the row's beginning. None: all.

    ValueError: of another dtype, shape or layout. Keeps the tensors alive; they must not change while it is used."""

    def __init__(
        self,
        slabs: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        first: Tensor | None = None,
        chosen: Tensor | None = None,
        temperatures: Tensor | None = None,
    ) -> None:
        self.tokens = slabs.numel()
        whole = [slabs, positions] if first is None else [slabs, positions, first]
        if any(each.dtype != torch.int64 or each.shape != (self.tokens,) or not each.is_contiguous() for each in whole):
            raise ValueError(f"slabs, positions and first must be contiguous int64 ({self.tokens})")
        if not self.tokens:
            raise ValueError("a step has at least one token")
        if any(each.ndim != 2 or len(each) != self.tokens or each.device.type != "cpu" for each in (cos, sin)):
            raise ValueError(f"cos and sin must be ({self.tokens}, rotary columns) on the CPU")
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        if cos.shape != sin.shape:
            raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} differ")
        if temperatures is not None and (temperatures.dtype != torch.float32 or temperatures.shape != (self.tokens,)):
            raise ValueError(f"temperatures must be float32 ({self.tokens})")
        if chosen is not None and (chosen.dtype != torch.int32 or not chosen.is_contiguous() or chosen.ndim != 2):
            raise ValueError(f"chosen must be contiguous int32 ({self.tokens}, positions)")
        if chosen is not None and len(chosen) != self.tokens:
            raise ValueError(f"positions are chosen for {len(chosen)} of {self.tokens} tokens")
        self._held = (slabs, positions, cos, sin, first)
        self._chosen, self._temperatures = chosen, temperatures
        self.results: tuple[Tensor, Tensor] | None = None  # of the last layer
        self.packed = _native.pack(
            structs.Step(
                tokens=self.tokens, slabs=slabs.data_ptr(), positions=positions.data_ptr(), first=address(first),
                cos=cos.data_ptr(), sin=sin.data_ptr(), rotary_columns=cos.shape[1], chosen=address(chosen),
                most=0 if chosen is None else chosen.shape[1], temperatures=address(temperatures),
            )
        )  # fmt: skip

    def choosing(self, chosen: Tensor | None) -> Step:
        """The same step, with `chosen` positions for each token."""
        return Step(*self._held, chosen, self._temperatures)


class FusedAttention:
    """The attention half of one layer. Keeps the weights alive."""

    def __init__(self, weights: GroupedAttention | LatentAttention, packed: bytes) -> None:
        self.weights = weights
        self._packed = packed
        self._hidden = weights.output.out

    def __call__(self, x: Tensor, step: Step, slabs: Slabs) -> tuple[Tensor, Tensor]:
        """x (T, H), bfloat16 and contiguous → (x + the attention's output, the norm of that), each (T, H) and valid
        until the step's next layer; without norms the output first, and nothing. Keys and values of all tokens are
        written to their slabs before a token attends.

        ValueError: an x of another dtype, shape or layout; a step or slabs that do not fit the layer; a position
        beyond the slab's room. The interpreter's lock is released meanwhile."""
        if x.shape != (step.tokens, self._hidden) or not plain(x):
            raise ValueError(f"x must be contiguous bfloat16 ({step.tokens}, {self._hidden}), not {tuple(x.shape)}")
        threads = torch.get_num_threads()
        nbytes = _native.workspace(self._packed, step.packed, slabs.packed, threads)
        if step.results is None:
            step.results = torch.empty_like(x), torch.empty_like(x)
        out, normed = step.results
        _native.attend(
            self._packed, step.packed, slabs.packed, scratch.address("attention", nbytes), x.data_ptr(),
            out.data_ptr(), normed.data_ptr(), threads,
        )  # fmt: skip
        return out, normed


def fused_attention(weights: GroupedAttention | LatentAttention) -> FusedAttention | None:
    """The `FusedAttention` of a layer; None where the kernel does not take the shapes or encodings, or does not run on
    this machine."""
    packed = pack_layer(weights)
    return None if packed is None else FusedAttention(weights, packed)


_QUERY_ROWS = 64  # queries of a block of a prompt


def takes_prompts(dtype: torch.dtype, key_columns: int, value_columns: int) -> bool:
    """Whether the kernel runs on this machine's CPU, for heads of so many columns."""
    fits = all(0 < columns <= LARGEST_HEAD and columns % HEAD_COLUMNS == 0 for columns in (key_columns, value_columns))
    return fits and dtype == torch.bfloat16 and native.available()


def takes_latents(dtype: torch.dtype, head: int, value: int, latent: int, rotary: int) -> bool:
    """Whether `FusedAttention` takes latent attention of these sizes on this machine's CPU."""
    fits = not (latent % 64 or value % 64 or rotary % HEAD_COLUMNS) and latent + rotary <= LARGEST_KEY
    return fits and takes_prompts(dtype, head, value) and _columns_suit(head, value)


def prompt_workspace(threads: int, key_columns: int, value_columns: int) -> int:
    """Workspace of the kernel, in bytes, beside queries, keys, values and result."""
    return 4 * threads * ((_QUERY_ROWS + _TILE) * (key_columns + value_columns + 16) + (2 * _TILE + 6) * _QUERY_ROWS)


def prompt_attention(
    query: Tensor,
    slabs: Slabs,
    slab: int,
    first: int,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    """query (T, heads, columns), bfloat16: the tokens of a sequence from position `first` on, in position. Their keys
    and values, and those before, are in slab `slab`. window: positions that each attends to, its own included; None:
    all. chunked: a token attends from a multiple of the window on. sinks: float32 (heads), scores without a value that
    join each softmax → (T, heads, value columns).

    ValueError: of another dtype or shape; slabs that do not fit. The interpreter's lock is released meanwhile."""
    tokens, heads, columns = query.shape
    query = query.contiguous()
    if not plain(query) or columns != slabs.columns[0] or slabs.values is None:
        raise ValueError(f"queries must be bfloat16 (T, heads, {slabs.columns[0]}), not {tuple(query.shape)}")
    if sinks is not None and (not _are_sinks(sinks) or sinks.numel() != heads):
        raise ValueError(f"sinks must be contiguous float32 ({heads})")
    out = torch.empty((tokens, heads, slabs.columns[1]), dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    workspace = scratch.address("attention", _native.prompt_workspace(slabs.packed, threads))
    prompt = structs.Prompt(
        query=query.data_ptr(), out=out.data_ptr(), out_stride=slabs.columns[1], sinks=address(sinks), tokens=tokens,
        heads=heads, slab=slab, first=first, window=window or 0, chunked=chunked, scale=scale,
    )  # fmt: skip
    _native.attend_prompt(slabs.packed, _native.pack(prompt), workspace, threads)
    return out
