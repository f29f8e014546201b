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
from tiermoe.model.kv_cache import LayerShape
from tiermoe.model.linear import Linear
from tiermoe.model.norms import Norm
from tiermoe.model.rotary import Turn
from tiermoe.model.step import Step, held, put
from tiermoe.quant.scratch import scratch
from tiermoe.types import Workload

_PIECE = 1024  # positions whose keys and values are expanded at a time
_SCORE_BYTES = 14  # of a score of torch's own operations: as float32 three times, and masks; measured


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """What a `LatentAttention` asks memory for, known from a config."""

    heads: int
    plain_columns: int
    rotary_columns: int
    value_columns: int
    latent_columns: int

    @property
    def shape(self) -> LayerShape:
        return LayerShape(1, self.latent_columns + self.rotary_columns, 0)

    @property
    def token_columns(self) -> int:
        """Columns of a token's queries."""
        return self.heads * (self.plain_columns + self.rotary_columns)

    def prompt_bytes(self, load: Workload, dtype: torch.dtype) -> int:
        """Of one sequence's attention, beside queries: keys and values of all heads, and the kernel's workspace, or a
        few heads' scores."""
        tokens, positions = min(load.chunk, load.context), load.context
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

    def few_tokens_bytes(self, tokens: int, positions: int, threads: int, hidden: int) -> int:
        """Of the native kernel."""
        columns = self.latent_columns + self.rotary_columns
        return few_tokens_workspace(
            tokens, positions, threads, (self.heads, 1, columns, self.latent_columns), hidden, self.latent_columns
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
    layer runs, for the native kernel a piece of the positions at a time."""

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

    @property
    def shape(self) -> LayerShape:
        return LayerShape(1, self.latent_columns + self.rotary_columns, 0)

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
            rows = held(kept, span.row, None)[0]
            attended[span.begin : span.end] = self._attended(query[span.begin : span.end], rows)
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

    def _expand(self, kept: Tensor, keys: Tensor, values: Tensor) -> None:
        """kept (n, latent + rotary) → into keys (heads, n, plain + rotary) and values (heads, n, value)."""
        latents, rotaries = kept[:, : self.latent_columns].contiguous(), kept[:, self.latent_columns :]
        both = self.expand(latents).view(latents.shape[0], self.heads, -1).transpose(0, 1)
        keys[..., : self.plain_columns] = both[..., : self.plain_columns]
        keys[..., self.plain_columns :] = rotaries
        values[:] = both[..., self.plain_columns :]
