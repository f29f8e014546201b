"""Hyper-connections (arXiv:2409.19606): a part of a layer reads a mix of several residual streams and adds to all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.kernels import router as native
from tiermoe.kernels.attention import FusedAttention
from tiermoe.model.attention.base import Attention, AttentionSizes, PositionIndexer
from tiermoe.model.attention.ngrams import NgramFeatures
from tiermoe.model.moe import DenseBlock, MoeBlock
from tiermoe.model.parts import Linear, Norm
from tiermoe.model.step import Step
from tiermoe.model.weights import Scope


def streams_of(config: Any) -> int:
    """Residual streams of a model; 1 if it has no hyper-connections."""
    return next((int(getattr(config, name)) for name in ("hc_count", "hc_mult") if hasattr(config, name)), 1)


def in_streams(embedding: Callable[[Tensor], Tensor], streams: int) -> Callable[[Tensor], Tensor]:
    """The embedding with the same values in each stream: int64 (T) → (T, streams, H)."""
    return lambda tokens: embedding(tokens)[:, None].repeat(1, streams, 1)


_VECTORS = 32  # numbers that torch computes at once, at the most: two vectors
_ROWS = 512  # of so many numbers, which torch gives to one thread

Connected = tuple[Tensor, Tensor, Tensor]
"""A part's input (T, H), the streams' shares of its output (T, streams), and the streams (T, streams, H) that take
it."""


@dataclass(frozen=True, slots=True)
class StreamMixer:
    """The mean of the normed streams, each column weighed by a sigmoid of what all streams hold."""

    norm: Norm  # over each stream
    narrow: Linear  # streams * hidden → the rank of the weights
    widen: Linear  # → streams * hidden

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

    def __call__(self, x: Tensor) -> Connected:
        """Streams (T, streams, H) → a part's input, the streams' shares of its output, and the streams themselves."""
        normed = self.mixer.norm(x)
        return self.mixer.mixed(normed), 2 * torch.sigmoid(self.inject(normed.flatten(1)) / x.shape[1]), x

    @property
    def batch_invariant(self) -> bool:
        return all(each.batch_invariant for each in (self.mixer.narrow, self.mixer.widen, self.inject))


class StreamProducts:
    """Products of all streams, normed together, with a matrix. weight (rows, streams * H); epsilon: of the norm,
    which has no weight. batch_invariant: they are the native kernels'."""

    def __init__(self, weight: Tensor, epsilon: float, dtype: torch.dtype) -> None:
        parts = weight if weight.dtype == dtype else native.in_parts(weight)
        self.batch_invariant = dtype == torch.bfloat16 and native.takes(parts)
        self._weight, self._epsilon = parts if self.batch_invariant else weight, epsilon

    def __call__(self, x: Tensor) -> Tensor:
        """Streams (T, streams, H) → float32 (T, rows)."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1).mean(-1, keepdim=True) + self._epsilon)
        if self.batch_invariant:
            return native.products_of(self._weight, x.contiguous().flatten(1)) * scale
        return F.linear(wide.flatten(1) * scale, self._weight.float())


@dataclass(frozen=True, slots=True)
class BalancedMixer:
    """The sum of the streams, each weighed by a sigmoid of what all of them hold, normed."""

    products: StreamProducts  # of `streams` rows
    bias: Tensor  # (streams)
    scale: Tensor  # (1), of the products
    floor: float  # of the weights
    norm: Norm  # of the sum

    def __call__(self, x: Tensor) -> Tensor:
        """(T, streams, H) → (T, H), so that no token's depends on another."""
        if self.products.batch_invariant:
            return self._mixed(x)
        return torch.cat([self._mixed(each) for each in torch.split(x, 1)])

    def _mixed(self, x: Tensor) -> Tensor:
        return self.norm(_summed(x, self.products(x) * self.scale + self.bias, self.floor))


@dataclass(frozen=True, slots=True)
class MeanMixer:
    """The mean of the streams (GLM-5 Next)."""

    norm: Norm  # of the mean

    def __call__(self, x: Tensor) -> Tensor:
        """(T, streams, H) → (T, H)."""
        return self.norm(x.mean(dim=1))


@dataclass(frozen=True, slots=True)
class BalancedConnection:
    """Manifold-constrained hyper-connections (DeepSeek-V4, section 2.2): a part reads a weighed sum of the streams, and
    its output is added to mixtures of them, by a matrix whose rows and columns sum to 1 (Sinkhorn and Knopp's
    iterations). Independent ones have no mixtures: the output is added to the streams as they are, in float32 (Hunyuan
    4). All weights follow from what the streams hold."""

    products: StreamProducts  # of (2 + streams) * streams rows: of the sum, the shares, the mixtures, if any
    bias: Tensor  # ((2 + streams) * streams)
    scales: Tensor  # (3), of each one's products; (2): there are no mixtures
    floor: float  # of the sum's weights and of the mixtures'
    iterations: int  # that make the mixtures
    magnitude: float  # of the shares
    norm: Norm  # of the sum

    @property
    def batch_invariant(self) -> bool:
        return self.products.batch_invariant

    def __call__(self, x: Tensor) -> Connected:
        """Streams (T, streams, H) → a part's input, the streams' shares of its output, and their mixtures."""
        streams = x.shape[1]
        sizes = [streams, streams, streams * streams][: len(self.scales)]
        products = torch.split(self.products(x), sizes, dim=-1)
        read, write, *mix = (
            product * scale + bias
            for product, scale, bias in zip(products, self.scales, torch.split(self.bias, sizes), strict=True)
        )
        taken, shares = self.norm(_summed(x, read, self.floor)), self.magnitude * _sigmoid(write)
        if not mix:
            return taken, shares + self.floor, x
        mixture = self._balanced(mix[0].view(-1, streams, streams)).to(x.dtype).float()
        # one after the other, since a matrix product rounds by the number of tokens
        parts = (mixture[:, each, :, None] * x[:, each : each + 1] for each in range(streams))
        return taken, shares.to(x.dtype), functools.reduce(torch.Tensor.add_, parts).to(x.dtype)

    def _balanced(self, logits: Tensor) -> Tensor:
        """Matrices (T, streams, streams) whose columns sum to 1, and whose rows all but do."""
        matrix = torch.softmax(logits, dim=-1) + self.floor
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + self.floor)
        for _ in range(self.iterations - 1):
            matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + self.floor)
            matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + self.floor)
        return matrix


def _sigmoid(logits: Tensor) -> Tensor:
    """Of float32 (T, n), each row as it is alone: torch computes the last numbers of a tensor, or of a thread's part of
    it, otherwise than whole vectors."""
    rows = F.pad(logits, (0, -logits.shape[1] % _VECTORS))
    return torch.cat([torch.sigmoid(each) for each in torch.split(rows, _ROWS)])[:, : logits.shape[1]]


def _summed(x: Tensor, logits: Tensor, floor: float) -> Tensor:
    """The sum (T, H) of streams x (T, streams, H), weighed by the sigmoid of logits (T, streams) and a floor."""
    return ((_sigmoid(logits) + floor)[..., None] * x).sum(dim=1).to(x.dtype)


def stream_mixer(w: Scope, config: Any) -> StreamMixer:
    """The mixer with the weights of `w`."""
    streams = streams_of(config)
    wide, rank = streams * w.hidden, config.hc_lowrank
    return StreamMixer(
        w.norm("hc_norm", groups=streams),
        w.linear("input_mix_weight_down", rank, wide),
        w.linear("input_mix_weight_up", wide, rank),
    )


def connection(w: Scope, config: Any) -> Connection:
    """The connection with the weights of `w`."""
    streams = streams_of(config)
    return Connection(stream_mixer(w, config), w.linear("block_inject_weight", streams, streams * w.hidden))


def balanced_mixer(w: Scope, config: Any, norm: Norm) -> BalancedMixer:
    """The mixer with the weights of `w` ('model.hc_head'). norm: of the sum."""
    streams = streams_of(config)
    products = StreamProducts(w.tensor("hc_fn", streams, streams * w.hidden), w.epsilon, w.dtype)
    return BalancedMixer(products, w.tensor("hc_base", streams), w.tensor("hc_scale", 1), float(config.hc_eps), norm)


def balanced(w: Scope, config: Any, norm: Norm) -> BalancedConnection:
    """The connection with the weights of `w`; norm: of the part's input. Configs without iterations have no
    mixtures."""
    streams, mixes = streams_of(config), hasattr(config, "hc_sinkhorn_iters")
    rows = (2 + streams * mixes) * streams
    return BalancedConnection(
        StreamProducts(w.tensor("fn", rows, streams * w.hidden), w.epsilon, w.dtype),
        w.tensor("base", rows),
        w.tensor("scale", 2 + mixes),
        float(config.hc_eps),
        config.hc_sinkhorn_iters if mixes else 0,
        float(getattr(config, "hc_magnitude", 2)),
        norm,
    )


def injected(x: Tensor, output: Tensor, shares: Tensor) -> Tensor:
    """Streams x (T, streams, H) with shares (T, streams) of a part's output (T, H) added, in the shares' dtype."""
    return (x + output[:, None] * shares[..., None]).to(x.dtype)


def _connected(connection: Connection | BalancedConnection, x: Tensor, step: Step) -> Connected:
    """What a connection makes of streams (T, streams, H), so that no token's depends on other rows, or on others that
    are verified with it."""
    if connection.batch_invariant or len(step.apart) == 1:
        return connection(x)
    taken, shares, mixed = zip(*(connection(x[span.begin : span.end]) for span in step.apart), strict=True)
    return torch.cat(taken), torch.cat(shares), torch.cat(mixed)


@dataclass(frozen=True, slots=True)
class StreamLayer:
    """A layer of residual streams: n-gram features, attention and a feed-forward part, each added to all streams."""

    before_attention: Connection | BalancedConnection
    attention: Attention
    before_feed_forward: Connection | BalancedConnection
    feed_forward: MoeBlock | DenseBlock
    indexer: PositionIndexer | None = None  # chooses before what tokens attend to
    ngrams: NgramFeatures | None = None
    fused_attention: FusedAttention | None = None  # attention in one native call

    by_kernel: ClassVar[bool] = True

    def with_kernel(self, rotary_columns: int) -> StreamLayer:
        """The layer with the native call, if there is one for its weights. rotary_columns: as of a `Layer`."""
        return replace(self, fused_attention=self.attention.fused(None, None, rotary_columns, 1.0))

    @property
    def sizes(self) -> AttentionSizes:
        return self.attention.sizes

    @property
    def batch_invariant(self) -> bool:
        attends = self.fused_attention is not None or self.attention.batch_invariant
        parts = (self.feed_forward, self.indexer, self.ngrams)
        return attends and all(part is None or part.batch_invariant for part in parts)

    @property
    def chunk_invariant(self) -> bool:
        connected = self.before_attention.batch_invariant and self.before_feed_forward.batch_invariant
        return connected and (self.fused_attention is not None or self.attention.chunk_invariant)

    @property
    def moe(self) -> MoeBlock | None:
        return self.feed_forward.moe

    def __call__(self, x: Tensor, index: int, step: Step) -> Tensor:
        """x (T, streams, H) → (T, streams, H)."""
        mixed, shares, x = self._attended(x, index, step)
        return injected(x, self.feed_forward(mixed, step.tokens), shares)

    def forward_ragged(self, xs: Sequence[Tensor], index: int, steps: Sequence[Step]) -> list[Tensor]:
        """A call with each x and its step, bit for bit; each expert is read once for all of them."""
        attended = [self._attended(x, index, step) for x, step in zip(xs, steps, strict=True)]
        outputs = self.feed_forward.forward_ragged([mixed for mixed, _, _ in attended], [each.tokens for each in steps])
        return [injected(x, output, shares) for (_, shares, x), output in zip(attended, outputs, strict=True)]

    def _attended(self, x: Tensor, index: int, step: Step) -> Connected:
        """What the feed-forward part's connection makes of streams (T, streams, H) with attention's output."""
        if self.ngrams is not None:
            x = x + self.ngrams(x, index, step)
        mixed, shares, x = _connected(self.before_attention, x, step)
        if self.indexer is not None:
            self.indexer(mixed, index, step)
        if self.fused_attention is not None and step.native:
            native = step.native[self.attention.sizes.rotary]
            attended, _ = self.fused_attention(mixed.contiguous(), native, step.cache.native[index])
        else:
            attended = self.attention(mixed, index, step)
        x = injected(x, attended, shares)
        return _connected(self.before_feed_forward, x, step)

    def watched(self, wrap: Callable[[Any], Any]) -> StreamLayer:
        """The layer with wrap(part) in the place of its dense parts."""
        return replace(
            self,
            before_attention=wrap(self.before_attention),
            attention=wrap(self.attention),
            fused_attention=None if self.fused_attention is None else wrap(self.fused_attention),
            before_feed_forward=wrap(self.before_feed_forward),
            feed_forward=self.feed_forward.watched(wrap),
            indexer=None if self.indexer is None else wrap(self.indexer),
            ngrams=None if self.ngrams is None else wrap(self.ngrams),
        )
