"""Decoder built from blocks: tokens in, logits out, for prompts and generated tokens alike.

A step is `Decoder.step`; each `Layer` is attention and a feed-forward part with their norms and residuals.
`decoder_for` builds the decoder of a config from the entry that its family has in `families/table.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tiermoe.batch import Batch
from tiermoe.model.architecture import Architecture, FamilyWeights
from tiermoe.model.attention.base import AttentionSizes, NoAttention
from tiermoe.model.attention.compressed import CompressedSizes
from tiermoe.model.attention.grouped import GroupedSizes, head_columns
from tiermoe.model.attention.kimi_delta import KimiDeltaSizes
from tiermoe.model.attention.latent import LatentSizes
from tiermoe.model.attention.linear import LinearSizes, is_linear
from tiermoe.model.attention.mamba_1 import mamba_sizes_of
from tiermoe.model.attention.short_convolution import ConvolutionSizes, is_convolution
from tiermoe.model.cache.kv import KVCache, LayerShape
from tiermoe.model.families.gemma4 import SideBySide
from tiermoe.model.families.table import ARCHITECTURES, activation_of, decodes
from tiermoe.model.layer import AttentionLayer, DecoderLayer, FeedForwardLayer, Layer
from tiermoe.model.linear import Linear
from tiermoe.model.model_config import reads_mtp_head
from tiermoe.model.moe import Experts, MoeBlock, feed_forward
from tiermoe.model.mtp_head import MtpHead
from tiermoe.model.rotary import Rotary, is_rotated, layer_kinds, parameters_of, rotary_of, unrotated
from tiermoe.model.routers import Router
from tiermoe.model.step import Step
from tiermoe.model.streams import CONNECTIONS, StreamLayer, in_streams, streams_of
from tiermoe.model.weights import Weights, text_part
from tiermoe.types import FEW_TOKENS


class NotFiniteError(Exception):
    """A layer's output is not finite. The text is the layer's name."""


def require_finite(name: str, *values: Tensor) -> None:
    """NotFiniteError where some of the values are not finite."""
    if not all(bool(torch.isfinite(each).all()) for each in values):
        raise NotFiniteError(name)


class FiniteLayer:
    """A decoder's layer that requires its outputs to be finite."""

    def __init__(self, layer: DecoderLayer) -> None:
        self._layer = layer

    def __call__(self, x: Tensor, index: int, step: Step) -> Tensor:
        output = self._layer(x, index, step)
        require_finite(f"layer {index}", output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def forward_ragged(self, xs: Sequence[Tensor], index: int, steps: Sequence[Step]) -> list[Tensor]:
        outputs = self._layer.forward_ragged(xs, index, steps)
        require_finite(f"layer {index}", *outputs)
        return outputs


@dataclass(slots=True)
class Passing:
    """A batch on its way through a decoder's layers."""

    batch: Batch
    cache: KVCache
    parts: list[Batch]  # each computed by itself
    steps: list[Step]  # of each part
    xs: list[Tensor]  # hidden states (T, H) of each part, or its streams (T, streams, H)
    layer: int = 0  # the next one


class Decoder:
    """A model's `layers` with the embedding before and the output layer behind them.

    shapes: of each layer's cache, an MTP head's behind the others'. norm: of the last layer's output; where layers have
    streams it makes one of them first. rotaries: of the steps' angles. dtype: of the hidden states. kv_bits: of keys
    and values in its caches. softcap: logits are softcap * tanh(logits / softcap) (Gemma 4). mtp: a layer behind the
    last one, which drafts (`MtpHead`); None: there is none, or nobody asks for drafts."""

    rows_together = True  # several rows run in one step
    can_rollback = True  # a sequence's last step can be taken back

    def __init__(
        self,
        embedding: Callable[[Tensor], Tensor],
        layers: Sequence[DecoderLayer],
        shapes: Sequence[LayerShape],
        norm: Callable[[Tensor], Tensor],
        head: Linear,
        rotaries: Sequence[Rotary],
        dtype: torch.dtype,
        embedding_scale: float = 1.0,
        logits_divisor: float = 1.0,
        kv_bits: int = 16,
        softcap: float | None = None,
        mtp: MtpHead | None = None,
    ) -> None:
        self._embedding = embedding
        self.layers = list(layers)
        self.shapes = list(shapes)
        self._norm = norm
        self._head = head
        self._rotaries = list(rotaries)
        self._dtype = dtype
        self._embedding_scale = embedding_scale
        self._logits_divisor = logits_divisor
        self._kv_bits = kv_bits
        self._softcap = softcap
        self.mtp = mtp

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's logits do not depend on the other tokens of a call of up to FEW_TOKENS."""
        return self._head.batch_invariant and all(layer.batch_invariant for layer in self.layers)

    @property
    def can_verify_draft(self) -> bool:
        """Whether the tokens of a draft, verified in one step, get the bits of decoding one by one: where they cannot
        run together, each runs by itself through a layer, which reads each expert once. A recurrent state is kept
        behind the last of them alone."""
        return self.batch_invariant or not any(shape.state for shape in self.shapes)

    @property
    def routers(self) -> list[Router | None]:
        """Routers of the MoE layers, in the order they run; None where experts follow from the token alone."""
        return [block.router if block.table is None else None for block in self._moe_blocks()]

    @property
    def tables(self) -> dict[int, Tensor]:
        """MoE layer → its table (vocabulary, K), of the layers whose experts follow from the token alone."""
        return {layer: block.table for layer, block in enumerate(self._moe_blocks()) if block.table is not None}

    def watch(self, wrap: Callable[[Any], Any]) -> Callable[[], None]:
        """Puts wrap(part), which is called as the part is, in the place of everything that computes with dense weights:
        attention, dense blocks, shared experts, the output layer. Returns the function that undoes it."""
        layers, head = list(self.layers), self._head
        self._head = wrap(head)
        self.layers = [layer.watched(wrap) for layer in layers]

        def undo() -> None:
            self.layers, self._head = layers, head

        return undo

    def require_finite(self) -> Callable[[], None]:
        """Layers raise NotFiniteError where they give what is not finite, until the result is called."""
        layers = self.layers
        self.layers = [cast(DecoderLayer, FiniteLayer(layer)) for layer in layers]

        def undo() -> None:
            self.layers = layers

        return undo

    def attach(self, experts: Sequence[Experts]) -> None:
        """Gives each MoE layer its experts, an MTP head's behind the others'."""
        head = None if self.mtp is None else self.mtp.layer.moe
        for block, own in zip([*self._moe_blocks(), *filter(None, [head])], experts, strict=True):
            block.experts = own

    def new_cache(self, slabs: int, context: int, step: int) -> KVCache:
        """A cache for `slabs` sequences of up to `context` tokens, of which `step` run at once."""
        return KVCache(self.shapes, slabs, context, step, self._dtype, self._kv_bits)

    @torch.no_grad()
    def step(self, batch: Batch, cache: KVCache, every: bool = False) -> Tensor:
        """Runs a batch: writes its tokens' keys, values and states into `cache` and returns the logits
        (sequences, vocabulary) of each sequence's last token, or of every token (T, vocabulary)."""
        passing = self.begin(batch, cache)
        if len(passing.parts) > 1:
            self.advance(passing, len(self.layers))
        else:
            (x,), (step,) = passing.xs, passing.steps
            for index, layer in enumerate(self.layers):
                x = layer(x, index, step)
            passing.xs = [x]
        return self.finish(passing, every)

    def begin(self, batch: Batch, cache: KVCache) -> Passing:
        """Begins a step: the layers and `finish` follow. Steps of other sequences may run between two `advance`."""
        parts = [batch]
        if batch.ragged or batch.verifies:
            parts = batch.parts(FEW_TOKENS if self.batch_invariant else 0)
        for slab, end in batch.ends.items():
            cache.begin_write(slab, end)
        steps = [Step(part, cache, *self._rotaries) for part in parts]
        return Passing(batch, cache, parts, steps, [self._embedded(step) for step in steps])

    def advance(self, passing: Passing, end: int) -> None:
        """Runs the layers of a ragged batch before layer `end` that have not run."""
        xs = passing.xs
        for index in range(passing.layer, end):
            xs = self.layers[index].forward_ragged(xs, index, passing.steps)
        passing.xs, passing.layer = xs, end

    def finish(self, passing: Passing, every: bool = False) -> Tensor:
        """Ends a step: the logits as `step` returns them. An MTP head reads its tokens."""
        ends = passing.batch.ends
        for slab, end in ends.items():
            passing.cache.end_write(slab, end)
        if self.mtp is not None:
            parts, xs = passing.parts, passing.xs
            if passing.batch.verifies:  # the head reads a row whole, even one whose tokens ran by themselves
                parts, xs = [passing.batch], [torch.cat(xs)]
            for part, x in zip(parts, xs, strict=True):
                self.mtp.read(part, self._norm(x), passing.cache)
        logits = [
            self._logits(x, part, every)
            for x, part in zip(passing.xs, passing.parts, strict=True)
            if every or part.rows[-1].end == ends[part.rows[-1].slab]
        ]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _embedded(self, step: Step) -> Tensor:
        x = self._embedding(step.tokens)
        return x if self._embedding_scale == 1 else x * self._embedding_scale

    def _logits(self, x: Tensor, batch: Batch, every: bool) -> Tensor:
        """Logits of the last layer's output (T, H), or (T, streams, H)."""
        if not every and len(batch.rows) < len(x):
            x = x[batch.last]
        logits = self._head(self._norm(x))
        if self._softcap is not None:
            return torch.tanh(logits / self._softcap) * self._softcap
        return logits if self._logits_divisor == 1 else logits / self._logits_divisor

    def moe_before(self, layer: int) -> int:
        """Number of MoE layers before layer `layer`."""
        return len(self._moe_blocks(layer))

    def _moe_blocks(self, end: int | None = None) -> list[MoeBlock]:
        return [block for layer in self.layers[:end] if (block := layer.moe) is not None]


# building: sizes from a config, blocks from sizes and weights


def attention_sizes(config: Any) -> list[AttentionSizes] | None:
    """The description of each layer's attention in the decoder that a model with this config gets; None where it gets
    none of ours."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None or not decodes(config):
        return None
    return [_sizes_at(architecture, config, index) for index in range(config.num_hidden_layers)]


def _sizes_at(architecture: Architecture, config: Any, index: int) -> AttentionSizes:
    if not architecture.attends(config, index):
        return NoAttention()
    if is_linear(config, index):
        if architecture.mamba:
            return mamba_sizes_of(architecture, config)
        return (KimiDeltaSizes if architecture.kimi_delta else LinearSizes).of(config, index)
    if architecture.latent:
        return LatentSizes.of(architecture, config, index)
    if architecture.compressed:
        return CompressedSizes.of(config, index)
    if is_convolution(config, index):
        return ConvolutionSizes.of(config)
    return GroupedSizes.of(architecture, config, index)


def decoder_for(config: Any, weights: Weights, dtype: torch.dtype, kv_bits: int = 16) -> Decoder | None:
    """The decoder of a model with this transformers config; None where the family has none or no block computes a part
    of the config. kv_bits: of keys and values in its caches; latents have 16 alone."""
    sizes = attention_sizes(config)
    if sizes is None:
        return None
    parts = FamilyWeights(ARCHITECTURES[config.model_type], config, text_part(weights), dtype)
    rotaries = _rotaries(config, dtype)
    layers = [
        _layer(f"model.layers.{index}", each, parts, rotaries[each.rotary].columns) for index, each in enumerate(sizes)
    ]
    last = layers.pop() if reads_mtp_head(config) else None
    table, embedding_scale = _embedding(parts)
    if parts.architecture.streams:
        table = in_streams(table, streams_of(config))
        norm: Callable[[Tensor], Tensor] = CONNECTIONS[parts.architecture.streams].end(parts)
    else:
        norm = parts.norm(f"model.{parts.architecture.named('norm')}")
    head, softcap = parts.linear("lm_head"), getattr(config, "final_logit_softcapping", None)
    return Decoder(
        embedding=table,
        layers=layers,
        shapes=[each.shape for each in sizes],
        norm=norm,
        head=head,
        rotaries=rotaries,
        dtype=dtype,
        embedding_scale=embedding_scale,
        logits_divisor=parts.scale("logits_scaling"),
        kv_bits=kv_bits,
        softcap=None if softcap is None else float(softcap),
        mtp=None if last is None else _mtp_head(parts, len(layers), cast(Layer, last), table, head, rotaries),
    )


def _mtp_head(
    weights: FamilyWeights,
    index: int,
    layer: Layer,
    table: Callable[[Tensor], Tensor],
    output: Linear,
    rotaries: Sequence[Rotary],
) -> MtpHead:
    """The MTP head whose layer lies behind the others', at `index`."""
    path = f"model.layers.{index}"
    embedding_norm, hidden_norm, norm = (
        weights.norm(f"{path}.{name}") for name in ("enorm", "hnorm", "shared_head.norm")
    )
    projection = weights.linear(f"{path}.eh_proj")
    return MtpHead(index, table, embedding_norm, hidden_norm, projection, layer, norm, output, rotaries)


def _layer(path: str, sizes: AttentionSizes, weights: FamilyWeights, rotary_columns: int) -> DecoderLayer:
    of, activation = weights.architecture, activation_of(weights.config)
    if of.one_part:
        norm = weights.norm(f"{path}.{of.named('input_layernorm')}")
        if isinstance(sizes, NoAttention):
            return FeedForwardLayer(norm, feed_forward(weights, path, activation))
        return AttentionLayer(norm, sizes.block(weights, path))
    names = (of.named(name) for name in ("input_layernorm", "post_attention_layernorm"))
    if of.streams:
        return StreamLayer.of(weights, path, sizes, activation)
    attention = sizes.block(weights, path)
    before, after = (None if of.without_first_norms else weights.norm(f"{path}.{name}") for name in names)
    attended = weights.norm(f"{path}.{of.norm_attended}") if of.norm_attended else None
    multiplier, kernel = weights.scale("residual_multiplier"), None
    if before is not None and after is not None and attended is None:
        kernel = attention.decode_kernel(before, after, rotary_columns, multiplier)
    indexer = sizes.indexer_block(weights, path)
    part = SideBySide.of(weights, path, activation) if of.side_by_side else feed_forward(weights, path, activation)
    return Layer(before, attention, after, part, multiplier, kernel, indexer, attended)


def _embedding(weights: FamilyWeights) -> tuple[Callable[[Tensor], Tensor], float]:
    """The input embedding without its scale, which in transformers' model may be its own, and the scale."""
    of = weights.architecture
    scale = 1.0 if of.embedding_scale is None else of.embedding_scale(weights.config)
    if of.scaled_embedding:
        scale = float(torch.tensor(weights.config.hidden_size**0.5).to(weights.dtype))
    return weights.embedding(f"model.{of.named('embed_tokens')}"), scale * weights.scale("embedding_multiplier")


def _rotaries(config: Any, dtype: torch.dtype) -> list[Rotary]:
    """The rotary embeddings of a config that blocks compute, in the order of `layer_kinds`, and that of the layers
    without positions."""
    of = ARCHITECTURES[config.model_type]
    dtype = torch.float32 if of.rope == "complex" else dtype
    found = [rotary_of(config, _rotary_columns(config, kind), dtype, kind) for kind in layer_kinds(config)]
    rotaries = [rotary for rotary in found if rotary is not None]
    if of.unrotated is not None:
        rotaries.append(unrotated(rotaries[0].columns, dtype))
    if of.temperature is not None:
        rotaries[-1].temperature = of.temperature(config)
    return rotaries


def _rotary_columns(config: Any, kind: str | None) -> int:
    """Columns of a head that are rotated, in layers of one of `layer_kinds`."""
    if ARCHITECTURES[config.model_type].latent or ARCHITECTURES[config.model_type].compressed:
        return int(config.qk_rope_head_dim)
    own = config if kind is None else config.of_layer(kind)
    share = parameters_of(config, kind).get("partial_rotary_factor", 1.0) if is_rotated(config) else 1.0
    return int(head_columns(own) * share)
