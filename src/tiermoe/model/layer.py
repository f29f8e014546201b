"""Layers of a decoder: attention and a feed-forward part with their norms and residuals, or one of both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from torch import Tensor

from tiermoe.kernels.attention import FusedAttention
from tiermoe.model.attention.base import Attention, AttentionSizes, NoAttention, PositionIndexer
from tiermoe.model.moe import DenseBlock, FeedForward, MoeBlock
from tiermoe.model.parts import Norm
from tiermoe.model.step import Step


class DecoderLayer(Protocol):
    """What a decoder asks of its layers. moe: the MoE block, None if there is none. sizes: of attention. by_kernel:
    a native call computes it up to the second norm, if the weights are such. batch_invariant: whether a token's values
    do not depend on other sequences, nor on tokens that are verified with it. chunk_invariant: nor on chunks."""

    @property
    def moe(self) -> MoeBlock | None: ...

    @property
    def sizes(self) -> AttentionSizes: ...

    @property
    def by_kernel(self) -> bool: ...

    @property
    def batch_invariant(self) -> bool: ...

    @property
    def chunk_invariant(self) -> bool: ...

    def __call__(self, x: Tensor, index: int, step: Step) -> Tensor:
        """x, the hidden states or streams of a step's tokens, after layer `index`."""
        ...

    def forward_ragged(self, xs: Sequence[Tensor], index: int, steps: Sequence[Step]) -> list[Tensor]:
        """A call with each x and its step, bit for bit; each expert is read once for all of them."""
        ...

    def watched(self, wrap: Callable[[Any], Any]) -> DecoderLayer:
        """The layer with wrap(part) in the place of its dense parts."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """Norm, attention, residual, norm, feed-forward part, residual."""

    norm_before: Norm | None  # None: attention takes what comes in (FlexOlmo)
    attention: Attention
    norm_after: Norm | None
    feed_forward: FeedForward
    multiplier: float = 1.0  # of what is added to the residual (Granite)
    fused_attention: FusedAttention | None = None  # up to the second norm in one native call
    indexer: PositionIndexer | None = None  # chooses before what tokens attend to
    norm_attended: Norm | None = None  # of attention's output before it is added

    def __call__(self, x: Tensor, index: int, step: Step) -> Tensor:
        attend = self.attended if step.graphs is None else self._attended_by_graph
        return self.feed_forward.add(*attend(x, index, step), self.multiplier)

    def forward_ragged(self, xs: Sequence[Tensor], index: int, steps: Sequence[Step]) -> list[Tensor]:
        attend = self.attended if steps[0].graphs is None else self._attended_by_graph
        attended = [attend(x, index, step) for x, step in zip(xs, steps, strict=True)]
        return self.feed_forward.add_ragged(attended, self.multiplier)

    def attended(self, x: Tensor, index: int, step: Step) -> tuple[Tensor, Tensor]:
        """The second norm of x with attention's output added, and that sum itself, (T, H) each."""
        if self.indexer is not None:
            self.indexer(_normed(self.norm_before, x), index, step)
        if self.fused_attention is not None and step.native:
            native = step.native[self.attention.sizes.rotary]
            x, normed = self.fused_attention(x, native, step.cache.native[index])
            return normed, x
        attended = self.attention(_normed(self.norm_before, x), index, step)
        attended = attended if self.norm_attended is None else self.norm_attended(attended)
        x = x + (attended if self.multiplier == 1 else attended * self.multiplier)
        return _normed(self.norm_after, x), x

    def _attended_by_graph(self, x: Tensor, index: int, step: Step) -> tuple[Tensor, Tensor]:
        """`attended`, where its launches do not depend on the position."""
        if step.graphs is None or step.place is None or not self.attention.by_place or self.indexer is not None:
            return self.attended(x, index, step)
        attend = functools.partial(self.attended, index=index, step=step)
        return step.graphs.run((id(self), step.number, step.cache.keys[index].data_ptr()), attend, x)

    @property
    def sizes(self) -> AttentionSizes:
        return self.attention.sizes

    @property
    def by_kernel(self) -> bool:
        return self.norm_before is not None and self.norm_after is not None and self.norm_attended is None

    def with_kernel(self, rotary_columns: int) -> Layer:
        """The layer with the native call, if there is one for its weights. rotary_columns: of the angles
        by which queries and keys are rotated."""
        if not self.by_kernel:
            return self
        kernel = self.attention.fused(self.norm_before, self.norm_after, rotary_columns, self.multiplier)
        return replace(self, fused_attention=kernel)

    def watched(self, wrap: Callable[[Any], Any]) -> Layer:
        return replace(
            self,
            attention=wrap(self.attention),
            feed_forward=self.feed_forward.watched(wrap),
            fused_attention=None if self.fused_attention is None else wrap(self.fused_attention),
            indexer=None if self.indexer is None else wrap(self.indexer),
        )

    @property
    def moe(self) -> MoeBlock | None:
        return self.feed_forward.moe

    @property
    def batch_invariant(self) -> bool:
        attends = self.fused_attention is not None or self.attention.batch_invariant
        indexes = self.indexer is None or self.indexer.batch_invariant
        return attends and self.feed_forward.batch_invariant and indexes

    @property
    def chunk_invariant(self) -> bool:
        return self.fused_attention is not None or self.attention.chunk_invariant


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Norm, attention, residual (Nemotron-H)."""

    norm: Norm
    attention: Attention

    moe: ClassVar[None] = None
    by_kernel: ClassVar[bool] = False

    @property
    def sizes(self) -> AttentionSizes:
        return self.attention.sizes

    @property
    def batch_invariant(self) -> bool:
        return self.attention.batch_invariant

    @property
    def chunk_invariant(self) -> bool:
        return self.attention.chunk_invariant

    def __call__(self, x: Tensor, index: int, step: Step) -> Tensor:
        return x + self.attention(self.norm(x), index, step)

    def forward_ragged(self, xs: Sequence[Tensor], index: int, steps: Sequence[Step]) -> list[Tensor]:
        return [self(x, index, step) for x, step in zip(xs, steps, strict=True)]

    def watched(self, wrap: Callable[[Any], Any]) -> AttentionLayer:
        return replace(self, attention=wrap(self.attention))


@dataclass(frozen=True, slots=True)
class FeedForwardLayer:
    """Norm, feed-forward part, residual (Nemotron-H)."""

    norm: Norm
    feed_forward: MoeBlock | DenseBlock

    sizes: ClassVar[AttentionSizes] = NoAttention()
    by_kernel: ClassVar[bool] = False
    chunk_invariant: ClassVar[bool] = True

    def __call__(self, x: Tensor, index: int, step: Step) -> Tensor:
        return self.feed_forward.add(self.norm(x), x, 1.0)

    def forward_ragged(self, xs: Sequence[Tensor], index: int, steps: Sequence[Step]) -> list[Tensor]:
        return self.feed_forward.add_ragged([(self.norm(x), x) for x in xs], 1.0)

    def watched(self, wrap: Callable[[Any], Any]) -> FeedForwardLayer:
        return replace(self, feed_forward=self.feed_forward.watched(wrap))

    @property
    def moe(self) -> MoeBlock | None:
        return self.feed_forward.moe

    @property
    def batch_invariant(self) -> bool:
        return self.feed_forward.batch_invariant


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
