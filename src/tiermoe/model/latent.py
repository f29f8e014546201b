"""Attention whose cache holds one compressed vector a token (DeepSeek's multi-head latent attention)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.kernels.native.few_tokens_attention import Slabs, few_tokens_workspace
from tiermoe.kernels.native.prompt_attention import (
    Piece,
    prompt_attention,
    prompt_state,
    prompt_workspace,
    takes_prompts,
)
from tiermoe.model.attention import attend, scores_at_once
from tiermoe.model.indexer import IndexerSizes
from tiermoe.model.kv_cache import LayerShape
from tiermoe.model.linear import Linear
from tiermoe.model.norms import Norm
from tiermoe.model.rotary import Turn
from tiermoe.model.step import Step, held, put
from tiermoe.quant.scratch import scratch
from tiermoe.types import Workload

_PIECE = 1024  # positions whose keys and values are expanded at a time
_TOKENS = 8  # of a prompt that attend to chosen latents at a time
_FLOAT_BYTES = 4
_SCORE_BYTES = 14  # of a score of torch's own operations: as float32 three times, and masks; measured


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """What a `LatentAttention` asks memory for, known from a config. indexer: of sparse attention; keeps_index: in this
    layer, whose keys the cache then holds."""

    heads: int
    plain_columns: int
    rotary_columns: int
    value_columns: int
    latent_columns: int
    indexer: IndexerSizes | None = None
    keeps_index: bool = False

    @property
    def shape(self) -> LayerShape:
        index = self.indexer.columns if self.indexer is not None and self.keeps_index else 0
        return LayerShape(1, self.latent_columns + self.rotary_columns, 0, index_columns=index)

    @property
    def token_columns(self) -> int:
        """Columns of a token's queries."""
        return self.heads * (self.plain_columns + self.rotary_columns)

    def prompt_bytes(self, load: Workload, dtype: torch.dtype) -> int:
        """Of one sequence's attention, beside queries: keys and values of all heads, and the kernel's workspace, or a
        few heads' scores; of sequences that are longer than an indexer chooses, what that takes instead."""
        if self.indexer is None or load.context <= self.indexer.most:
            return self._whole_bytes(load, load.context, dtype)
        return self._whole_bytes(load, self.indexer.most, dtype) + self._sparse_bytes(load, self.indexer)

    def _whole_bytes(self, load: Workload, positions: int, dtype: torch.dtype) -> int:
        """Where all positions are attended to."""
        tokens = min(load.chunk, positions)
        keys = self.plain_columns + self.rotary_columns
        heads = self.heads * (2 * self.plain_columns + self.rotary_columns + 2 * self.value_columns)
        native = takes_prompts(dtype, keys, self.value_columns)
        expanded = (_PIECE if native else positions) * (heads + 2 * self.latent_columns) * load.itemsize
        if native:
            known = prompt_state(tokens, self.heads, self.heads, self.value_columns)
            return expanded + known + prompt_workspace(load.threads, keys, self.value_columns)
        masks = tokens * positions * (3 + 4)
        scores = scores_at_once(self.heads, tokens, positions)
        share = min(1.0, scores / (self.heads * tokens * positions))
        widened = 4 * positions * self.heads * (keys + self.value_columns)
        return expanded + masks + scores * _SCORE_BYTES + int(widened * share)

    def _sparse_bytes(self, load: Workload, indexer: IndexerSizes) -> int:
        """Of the search, and of tokens that attend to what it finds: the matrices that expand latents and, of some
        tokens at a time, latents, scores, and queries in the place of latents, all as float32."""
        width = self.latent_columns + self.rotary_columns
        expanding = 2 * self.heads * self.latent_columns * (self.plain_columns + self.value_columns)
        latents = indexer.most * (2 * width + self.latent_columns + 3 * self.heads)
        queries = self.heads * (2 * width + 2 * self.latent_columns + 2 * self.value_columns)
        return indexer.nbytes(load) + _FLOAT_BYTES * (expanding + _TOKENS * (latents + queries))

    def few_tokens_bytes(self, tokens: int, positions: int, threads: int, hidden: int) -> int:
        """Of the native kernel."""
        columns = self.latent_columns + self.rotary_columns
        attended = positions if self.indexer is None else min(positions, self.indexer.most)
        return few_tokens_workspace(
            tokens, attended, threads, (self.heads, 1, columns, self.latent_columns), hidden, self.latent_columns
        )

    @property
    def expanding_bytes(self) -> int:
        """Of what expands latents, in the form that the native kernel takes (`few_tokens`)."""
        return 2 * self.heads * self.latent_columns * (self.plain_columns + self.value_columns)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """query: hidden, or narrow_query of it with a norm → heads of (plain + rotary) columns. compress: hidden → latent +
    one rotary key that all heads share. expand: latent → heads of (plain key + value) columns.

    The cache keeps a latent and a rotary key side by side, as keys; keys and values of all heads are expanded while a
    layer runs, for the native kernel a piece of the positions at a time. A token that an indexer chose positions for
    attends to their latents as they are: its queries are expanded in their place, and what it attended to.
    index_columns: of the keys that the layer's own indexer keeps."""

    query: Linear
    compress: Linear
    latent_norm: Norm
    expand: Linear
    output: Linear
    heads: int
    plain_columns: int
    rotary_columns: int
    value_columns: int
    latent_columns: int
    scale: float
    turn: Turn
    narrow_query: Linear | None = None
    query_norm: Norm | None = None
    index_columns: int = 0

    @property
    def shape(self) -> LayerShape:
        return LayerShape(1, self.latent_columns + self.rotary_columns, 0, index_columns=self.index_columns)

    def __call__(self, x: Tensor, layer: int, step: Step) -> Tensor:
        """x (T, H), normed → (T, H). Writes the tokens' latents into the step's cache."""
        narrow = x if self.narrow_query is None or self.query_norm is None else self.query_norm(self.narrow_query(x))
        query = self.query(narrow).view(x.shape[0], self.heads, -1)
        plain, turning = query[..., : self.plain_columns], query[..., self.plain_columns :]
        compressed = self.compress(x)
        latent = self.latent_norm(compressed[:, : self.latent_columns].contiguous())[:, None]
        rotary = compressed[:, self.latent_columns :]
        query = torch.cat((plain, self.turn(turning, step.cos, step.sin)), dim=-1)
        rotary = self.turn(rotary[:, None], step.cos, step.sin)
        kept, new = step.cache.keys[layer], torch.cat((latent, rotary), dim=-1)
        attended = x.new_empty((x.shape[0], self.heads, self.value_columns))
        for span in step.spans:
            put(kept, span.row, new[span.begin : span.end])
            rows, its = held(kept, span.row, None)[0], slice(span.begin, span.end)
            if step.chosen is None or span.row.end <= step.chosen.shape[1]:
                attended[its] = self._attended(query[its], rows)
            else:
                attended[its] = self._sparsely(query[its], rows, step.chosen[its], step.positions[its])
        return self.output(attended.flatten(1))

    def _attended(self, query: Tensor, kept: Tensor) -> Tensor:
        """query (T, heads, columns) over kept (n, latent + rotary), the last T of which are the tokens' own."""
        if takes_prompts(query.dtype, query.shape[2], self.value_columns):
            return self._in_pieces(query, kept)
        keys = query.new_empty((self.heads, kept.shape[0], query.shape[2]))
        values = query.new_empty((self.heads, kept.shape[0], self.value_columns))
        self._expand(kept, keys, values)
        return attend(query, keys, values, self.scale, None, None)

    def _in_pieces(self, query: Tensor, kept: Tensor) -> Tensor:
        """By the native kernel, so that keys and values of all heads are there for a piece of the positions alone."""
        tokens, heads, columns = query.shape
        keys = scratch.take("expanded keys", (1, heads, _PIECE, columns), query.dtype)
        values = scratch.take("expanded values", (1, heads, _PIECE, self.value_columns), query.dtype)
        state = scratch.take("prompt state", (prompt_state(tokens, heads, heads, self.value_columns),), torch.uint8)
        slabs, attended = Slabs(keys, values), query
        for begin in range(0, kept.shape[0], _PIECE):
            rows = kept[begin : begin + _PIECE]
            self._expand(rows, keys[0, :, : len(rows)], values[0, :, : len(rows)])
            piece = Piece(begin, begin + len(rows), state)
            attended = prompt_attention(query, slabs, 0, kept.shape[0] - tokens, self.scale, piece=piece)
        return attended

    def _sparsely(self, query: Tensor, kept: Tensor, chosen: Tensor, positions: Tensor) -> Tensor:
        """query (T, heads, columns) over those of kept (n, latent + rotary) that are chosen (T, most) for each."""
        packed = self.expand.packed
        expand = packed.encoding.decode(packed.fields, packed.out, packed.in_, torch.float32)
        expand = expand.view(self.heads, -1, self.latent_columns)
        keys, values = expand[:, : self.plain_columns], expand[:, self.plain_columns :]
        result = query.new_empty((len(query), self.heads, self.value_columns))
        for begin in range(0, len(query), _TOKENS):
            some = slice(begin, begin + _TOKENS)
            its = query[some].float()
            plain, turned = its[..., : self.plain_columns], its[..., self.plain_columns :]
            latents = kept[chosen[some].long()].float()
            own = torch.cat((torch.matmul(plain.transpose(0, 1), keys).transpose(0, 1), turned), dim=-1)
            scores = torch.matmul(own, latents.transpose(1, 2)).mul_(self.scale)
            beyond = torch.arange(chosen.shape[1]) > positions[some, None]
            weights = torch.softmax(scores.masked_fill_(beyond[:, None], float("-inf")), dim=-1)
            attended = torch.matmul(weights, latents[..., : self.latent_columns])
            result[some] = torch.matmul(attended.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)
        return result

    def _expand(self, kept: Tensor, keys: Tensor, values: Tensor) -> None:
        """kept (n, latent + rotary) → into keys (heads, n, plain + rotary) and values (heads, n, value)."""
        latents, rotaries = kept[:, : self.latent_columns].contiguous(), kept[:, self.latent_columns :]
        both = self.expand(latents).view(latents.shape[0], self.heads, -1).transpose(0, 1)
        keys[..., : self.plain_columns] = both[..., : self.plain_columns]
        keys[..., self.plain_columns :] = rotaries
        values[:] = both[..., self.plain_columns :]
