"""Hyper-connections (arXiv:2409.19606): a part of a layer reads a mix of several residual streams and adds to all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.model.architecture import FamilyWeights
from tiermoe.model.attention import Attention, AttentionSizes
from tiermoe.model.feed_forward import DenseBlock, MoeBlock, feed_forward
from tiermoe.model.linear import Linear
from tiermoe.model.linear_attention import LinearSizes
from tiermoe.model.ngram_features import NgramFeatures
from tiermoe.model.norms import Norm
from tiermoe.model.step import Step


def streams_of(config: Any) -> int:
    """Residual streams of a model; 1 where it has no hyper-connections."""
    return int(getattr(config, "hc_count", 1))


def in_streams(embedding: Callable[[Tensor], Tensor], streams: int) -> Callable[[Tensor], Tensor]:
    """The embedding with the same values in each stream: int64 (T) → (T, streams, H)."""
    return lambda tokens: embedding(tokens)[:, None].repeat(1, streams, 1)


@dataclass(frozen=True, slots=True)
class StreamMixer:
    """The mean of the normed streams, each column weighed by a sigmoid of what all streams hold."""

    norm: Norm  # over each stream
    narrow: Linear  # streams * hidden → the rank of the weights
    widen: Linear  # → streams * hidden

    @classmethod
    def of(cls, weights: FamilyWeights, path: str) -> StreamMixer:
        """The mixer at a path."""
        norm = weights.norm(f"{path}.hc_norm", groups=streams_of(weights.config))
        return cls(norm, *(weights.linear(f"{path}.input_mix_weight_{name}") for name in ("down", "up")))

    def __call__(self, x: Tensor) -> Tensor:
        """(T, streams, H) → (T, H)."""
        return self.mixed(self.norm(x))

    def mixed(self, normed: Tensor) -> Tensor:
        """(T, streams, H), normed → (T, H)."""
        narrow = F.silu(self.narrow(normed.flatten(1)) / normed.shape[1])
        return (torch.sigmoid(self.widen(narrow)).view(normed.shape) * normed).mean(dim=1)


@dataclass(frozen=True, slots=True)
class Connection:
    """What a part of a layer reads of the streams, and how much of its output each stream takes."""

    mixer: StreamMixer
    inject: Linear  # streams * hidden → streams

    @classmethod
    def of(cls, weights: FamilyWeights, path: str) -> Connection:
        """The connection at a path."""
        return cls(StreamMixer.of(weights, path), weights.linear(f"{path}.block_inject_weight"))

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Streams (T, streams, H) → a part's input (T, H) and the streams' shares of its output (T, streams)."""
        normed = self.mixer.norm(x)
        return self.mixer.mixed(normed), 2 * torch.sigmoid(self.inject(normed.flatten(1)) / x.shape[1])


def injected(x: Tensor, output: Tensor, shares: Tensor) -> Tensor:
    """Streams x (T, streams, H) with shares (T, streams) of a part's output (T, H) added."""
    return x + output[:, None] * shares[..., None]


@dataclass(frozen=True, slots=True)
class StreamLayer:
    """A layer of residual streams: n-gram features, attention and a feed-forward part, each added to all streams."""

    before_attention: Connection
    attention: Attention
    before_feed_forward: Connection
    feed_forward: MoeBlock | DenseBlock
    indexer: Callable[[Tensor, int, Step], None] | None = None  # chooses before what tokens attend to
    ngrams: NgramFeatures | None = None

    batch_invariant = False

    @property
    def moe(self) -> MoeBlock | None:
        return self.feed_forward.moe

    @classmethod
    def of(cls, weights: FamilyWeights, path: str, sizes: AttentionSizes, activation: str) -> StreamLayer:
        """The layer at a path. activation: of dense blocks."""
        ngrams = sizes.ngrams if isinstance(sizes, LinearSizes) else None
        return cls(
            Connection.of(weights, f"{path}.attn_hyper_connection"),
            sizes.block(weights, path),
            Connection.of(weights, f"{path}.mlp_hyper_connection"),
            feed_forward(weights, path, activation),
            sizes.indexer_block(weights, path),
            None if ngrams is None else ngrams.block(weights, path),
        )

    def __call__(self, x: Tensor, index: int, step: Step) -> Tensor:
        """x (T, streams, H) → (T, streams, H)."""
        x, mixed, shares = self._attended(x, index, step)
        return injected(x, self.feed_forward(mixed), shares)

    def forward_ragged(self, xs: Sequence[Tensor], index: int, steps: Sequence[Step]) -> list[Tensor]:
        """A call with each x and its step, bit for bit; each expert is read once for all of them."""
        attended = [self._attended(x, index, step) for x, step in zip(xs, steps, strict=True)]
        outputs = self.feed_forward.forward_ragged([mixed for _, mixed, _ in attended])
        return [injected(x, output, shares) for (x, _, shares), output in zip(attended, outputs, strict=True)]

    def _attended(self, x: Tensor, index: int, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Streams (T, streams, H) with attention's output, and what the feed-forward part's connection makes of it."""
        if self.ngrams is not None:
            x = x + self.ngrams(x, index, step)
        mixed, shares = self.before_attention(x)
        if self.indexer is not None:
            self.indexer(mixed, index, step)
        x = injected(x, self.attention(mixed, index, step), shares)
        return x, *self.before_feed_forward(x)

    def watched(self, wrap: Callable[[Any], Any]) -> StreamLayer:
        """The layer with wrap(part) in the place of its dense parts."""
        return replace(
            self,
            before_attention=wrap(self.before_attention),
            attention=wrap(self.attention),
            before_feed_forward=wrap(self.before_feed_forward),
            feed_forward=self.feed_forward.watched(wrap),
            indexer=None if self.indexer is None else wrap(self.indexer),
            ngrams=None if self.ngrams is None else wrap(self.ngrams),
        )
