"""A decoder built from blocks: tokens in, logits out, for prompts and generated tokens alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from tiermoe.batch import Batch
from tiermoe.kernels.native.few_tokens_attention import FewTokensAttention
from tiermoe.model.attention import GroupedAttention
from tiermoe.model.delta import GatedDelta
from tiermoe.model.feed_forward import DenseBlock, Experts, MoeBlock, SideBySide
from tiermoe.model.finite import FiniteLayer
from tiermoe.model.indexer import Indexer
from tiermoe.model.kv_cache import KVCache, LayerShape
from tiermoe.model.latent import LatentAttention
from tiermoe.model.linear import Linear
from tiermoe.model.norms import Norm
from tiermoe.model.rotary import Rotary
from tiermoe.model.routers import Router
from tiermoe.model.short_convolution import ShortConvolution
from tiermoe.model.step import Step
from tiermoe.types import FEW_TOKENS

Attention = GroupedAttention | LatentAttention | GatedDelta | ShortConvolution
"""What a layer relates tokens by."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Norm, attention, residual, norm, feed-forward part, residual. multiplier: of what is added (Granite). few: the
    first four for few tokens in one native call, where the kernel takes them. indexer: says before what the tokens
    attend to. norm_attended: of what attention gives, before it is added (Gemma 4)."""

    norm_before: Norm
    attention: Attention
    norm_after: Norm
    feed_forward: MoeBlock | DenseBlock | SideBySide
    multiplier: float = 1.0
    few: FewTokensAttention | None = None
    indexer: Indexer | None = None
    norm_attended: Norm | None = None

    def __call__(self, x: Tensor, index: int, step: Step) -> Tensor:
        """x (T, H) → (T, H)."""
        return self.feed_forward.add(*self._attended(x, index, step), self.multiplier)

    def apart(self, xs: Sequence[Tensor], index: int, steps: Sequence[Step]) -> list[Tensor]:
        """What a call with each x and its step gives, bit for bit; each expert comes once for all of them."""
        attended = [self._attended(x, index, step) for x, step in zip(xs, steps, strict=True)]
        return self.feed_forward.add_apart(attended, self.multiplier)

    def _attended(self, x: Tensor, index: int, step: Step) -> tuple[Tensor, Tensor]:
        """The norm of x with what attention gives, and that itself, (T, H) each."""
        if self.indexer is not None:
            self.indexer(self.norm_before(x), index, step)
        if self.few is not None and step.native is not None:
            x, normed = self.few(x, step.native, step.cache.native(index))
            return normed, x
        attended = self.attention(self.norm_before(x), index, step)
        attended = attended if self.norm_attended is None else self.norm_attended(attended)
        x = x + (attended if self.multiplier == 1 else attended * self.multiplier)
        return self.norm_after(x), x

    def watched(self, wrap: Callable[[Any], Any]) -> Layer:
        """The layer with wrap(part) in the place of its dense parts."""
        return replace(
            self,
            attention=wrap(self.attention),
            feed_forward=self.feed_forward.watched(wrap),
            few=None if self.few is None else wrap(self.few),
            indexer=None if self.indexer is None else wrap(self.indexer),
        )

    @property
    def by_row(self) -> bool:
        """Whether a token's values do not depend on the others of a call of few tokens."""
        indexes = self.indexer is None or self.indexer.by_row
        return self.few is not None and self.feed_forward.by_row and indexes


class Decoder:
    """A model's `layers` with the embedding before and the output layer behind them. softcap: logits are this times
    tanh of their share of it (Gemma 4)."""

    rows_together = True

    def __init__(
        self,
        embedding: Callable[[Tensor], Tensor],
        layers: Sequence[Layer],
        norm: Norm,
        head: Linear,
        rotaries: Sequence[Rotary],
        dtype: torch.dtype,
        embedding_scale: float = 1.0,
        logits_divisor: float = 1.0,
        kv_bits: int = 16,
        softcap: float | None = None,
    ) -> None:
        self._embedding = embedding
        self.layers = list(layers)
        self._norm = norm
        self._head = head
        self._rotaries = list(rotaries)
        self._dtype = dtype
        self._embedding_scale = embedding_scale
        self._logits_divisor = logits_divisor
        self._kv_bits = kv_bits
        self._softcap = softcap

    @property
    def rewinds(self) -> bool:
        """A sequence's last step can be taken back."""
        return True

    @property
    def verifies(self) -> bool:
        """Whether tokens that are verified together get the bits that each gets alone."""
        return self._head.by_row and all(layer.by_row for layer in self.layers)

    @property
    def shapes(self) -> list[LayerShape]:
        """What each layer's cache holds."""
        return [layer.attention.shape for layer in self.layers]

    @property
    def routers(self) -> list[Router]:
        """Of the MoE layers, in the order they run."""
        return [block.router for block in self._moe_blocks()]

    def watch(self, wrap: Callable[[Any], Any]) -> Callable[[], None]:
        """Puts wrap(part), which is called as the part is, in the place of everything that computes with dense weights:
        attention, dense blocks, shared experts, the output layer. Returns what puts them back."""
        layers, head = list(self.layers), self._head
        self._head = wrap(head)
        self.layers = [layer.watched(wrap) for layer in layers]

        def undo() -> None:
            self.layers, self._head = layers, head

        return undo

    def require_finite(self) -> Callable[[], None]:
        """Layers raise NotFiniteError where they give what is not finite, until the result is called."""
        layers = self.layers
        self.layers = [cast(Layer, FiniteLayer(layer)) for layer in layers]

        def undo() -> None:
            self.layers = layers

        return undo

    def attach(self, experts: Sequence[Experts]) -> None:
        """Gives each MoE layer its experts."""
        for block, its in zip(self._moe_blocks(), experts, strict=True):
            block.experts = its

    def new_cache(self, slabs: int, context: int, step: int) -> KVCache:
        """A cache for `slabs` sequences of up to `context` tokens, of which `step` run at once."""
        return KVCache(self.shapes, slabs, context, step, self._dtype, self._kv_bits)

    @torch.no_grad()
    def step(self, batch: Batch, cache: KVCache, every: bool = False) -> Tensor:
        """Runs a batch: writes its tokens' keys, values and states into `cache` and returns the logits
        (rows, vocabulary) of each row's last token, or of every token (T, vocabulary)."""
        parts = batch.parts(FEW_TOKENS if batch.apart and self.verifies else 0)
        for row in batch.rows:
            cache.writes(row.slab, row.end)
        steps = [Step(part, cache, *self._rotaries) for part in parts]
        xs = [self._embedded(part) for part in parts]
        for index, layer in enumerate(self.layers):
            xs = [layer(xs[0], index, steps[0])] if len(xs) == 1 else layer.apart(xs, index, steps)
        for row in batch.rows:
            cache.wrote(row.slab, row.end)
        logits = [self._logits(x, part, every) for x, part in zip(xs, parts, strict=True)]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _embedded(self, batch: Batch) -> Tensor:
        x = self._embedding(torch.tensor(batch.tokens))
        return x if self._embedding_scale == 1 else x * self._embedding_scale

    def _logits(self, x: Tensor, batch: Batch, every: bool) -> Tensor:
        """Of what the last layer gives, (T, H)."""
        if not every and len(batch.rows) < len(x):
            x = x[batch.last]
        logits = self._head(self._norm(x))
        if self._softcap is not None:
            return torch.tanh(logits / self._softcap) * self._softcap
        return logits if self._logits_divisor == 1 else logits / self._logits_divisor

    def _moe_blocks(self) -> list[MoeBlock]:
        return [block for layer in self.layers if (block := layer.feed_forward.moe) is not None]
