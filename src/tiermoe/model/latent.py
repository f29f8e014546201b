"""Attention whose cache holds one compressed vector a token (DeepSeek's multi-head latent attention)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.kernels.native.few_tokens_attention import few_tokens_workspace
from tiermoe.model.attention import attend, scores_at_once
from tiermoe.model.kv_cache import LayerShape
from tiermoe.model.linear import Linear
from tiermoe.model.norms import Norm
from tiermoe.model.rotary import Turn
from tiermoe.model.step import Step, held, put

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

    def prompt_bytes(self, tokens: int, positions: int, itemsize: int) -> int:
        """Of one sequence's attention, beside queries: keys and values of all heads, and a few heads' scores."""
        heads = self.heads * (2 * self.plain_columns + self.rotary_columns + 2 * self.value_columns)
        expanded = positions * (heads + 2 * self.latent_columns) * itemsize
        masks = tokens * positions * (3 + 4)
        scores = scores_at_once(self.heads, tokens, positions)
        share = min(1.0, scores / (self.heads * tokens * positions))
        widened = 4 * positions * self.heads * (self.plain_columns + self.rotary_columns + self.value_columns)
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
    layer runs."""

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
            keys, values = self._expanded(held(kept, span.row, None)[0])
            attended[span.begin : span.end] = attend(query[span.begin : span.end], keys, values, self.scale, None, None)
        return self.output(attended.flatten(1))

    def _expanded(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """kept (n, latent + rotary) → keys (heads, n, plain + rotary), values (heads, n, value)."""
        latents, rotaries = kept[:, : self.latent_columns].contiguous(), kept[:, self.latent_columns :]
        both = self.expand(latents).view(latents.shape[0], self.heads, -1).transpose(0, 1)
        plain, values = both[..., : self.plain_columns], both[..., self.plain_columns :]
        return torch.cat((plain, rotaries[None].expand(self.heads, -1, -1)), dim=-1), values
