"""What every layer of a decoder needs to know of the step that runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.batch import Batch, Row
from tiermoe.kernels.native.delta import delta_rows
from tiermoe.kernels.native.few_tokens_attention import Step as NativeStep
from tiermoe.model.kv_cache import KVCache
from tiermoe.model.kv_codes import decode, encode
from tiermoe.model.rotary import Rotary
from tiermoe.native import available
from tiermoe.types import FEW_TOKENS


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of a row: `begin` .. `end` of the step's."""

    row: Row
    begin: int
    end: int


class Step:
    """A batch with its tensors. positions, slabs: int64 (T); angles: of each rotary embedding cos and sin, (T, columns)
    in the model's dtype; cos, sin: those of the first. native: what the attention kernel is told of few tokens, which
    turns by the first. states: of each row where its recurrent state before and after the step lies, in a cache that
    has them; pieces: what the kernel of linear attention is told. longest: tokens of the longest sequence, with the
    step's. chosen: what an indexer chose (`choose`)."""

    def __init__(self, batch: Batch, cache: KVCache, *rotaries: Rotary) -> None:
        self.cache = cache
        self.spans: list[Span] = []
        for row in batch.rows:
            begin = self.spans[-1].end if self.spans else 0
            self.spans.append(Span(row, begin, begin + len(row.tokens)))
        self.positions = torch.tensor(batch.positions)
        self.slabs = torch.tensor(batch.slabs)
        self.longest = max(row.end for row in batch.rows)
        self.angles = [self._angles_of(rotary) for rotary in rotaries]
        self.cos, self.sin = self.angles[0]
        self.chosen: Tensor | None = None
        self.native = self._native() if len(batch.tokens) <= FEW_TOKENS else None
        kept = cache.recurrent
        self.states = [] if kept is None else [kept.begin(row.slab, row.first) for row in batch.rows]
        lengths = [len(row.tokens) for row in batch.rows]
        self.pieces = list(delta_rows([(length, *of) for length, of in zip(lengths, self.states, strict=False)]))

    @property
    def tokens(self) -> int:
        return self.spans[-1].end

    def choose(self, chosen: Tensor | None) -> None:
        """From here on a token attends to these positions of its sequence alone: int32 (T, most), ascending, of a token
        with fewer the first so many. None: to all."""
        if self.native is not None and (chosen is not None or self.chosen is not None):
            self.native = self.native.choosing(chosen)
        self.chosen = chosen

    def _angles_of(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """A row's depend on its own sequence's length alone, whatever runs beside it."""
        if len(self.spans) == 1 or len({rotary.scale(span.row.end) for span in self.spans}) == 1:
            return rotary.at(self.positions, self.longest)
        each = [rotary.at(self.positions[span.begin : span.end], span.row.end) for span in self.spans]
        return torch.cat([cos for cos, _ in each]), torch.cat([sin for _, sin in each])

    def _native(self) -> NativeStep | None:
        """What the attention kernel is told of the tokens; None where no kernel can run."""
        if not available() or self.cache.dtype != torch.bfloat16:
            return None
        return NativeStep(self.slabs, self.positions, self.cos.bfloat16(), self.sin.bfloat16())


def write(cache: KVCache, layer: int, row: Row, keys: Tensor, values: Tensor) -> None:
    """Puts a row's keys and values (T, heads, columns) into a layer's cache, as codes where it holds codes."""
    for kept, scales, new in ((cache.keys, cache.key_scales, keys), (cache.values, cache.value_scales, values)):
        if cache.bits == 8:
            new, its = encode(new)
            put(scales[layer], row, its)
        put(kept[layer], row, new)


def read(cache: KVCache, layer: int, row: Row, window: int | None) -> tuple[Tensor, Tensor]:
    """The keys and values that a row's tokens may attend to (`held`), in the cache's dtype."""
    keys, values = held(cache.keys[layer], row, window), held(cache.values[layer], row, window)
    if cache.bits == 16:
        return keys, values
    key_scales, value_scales = (held(each[layer], row, window) for each in (cache.key_scales, cache.value_scales))
    return decode(keys, key_scales, cache.dtype), decode(values, value_scales, cache.dtype)


def put(kept: Tensor, row: Row, new: Tensor) -> None:
    """Writes a row's keys or values (T, heads, columns) into kept (slabs, heads, room, columns)."""
    room = kept.shape[2]
    slab, new = kept[row.slab], new.transpose(0, 1)
    if row.end <= room:
        slab[:, row.first : row.end] = new
        return
    if len(row.tokens) > room:
        raise ValueError(f"{len(row.tokens)} tokens in a window with room for {room}")
    slab[:, torch.arange(row.first, row.end) % room] = new


def held(kept: Tensor, row: Row, window: int | None) -> Tensor:
    """The keys or values that a row's tokens may attend to, (heads, n, columns) by ascending position, the row's last
    one at the end."""
    room = kept.shape[2]
    begin = 0 if window is None else max(0, row.first - window + 1)
    if row.end <= room:
        return kept[row.slab, :, begin : row.end]
    return kept[row.slab][:, torch.arange(begin, row.end) % room]
