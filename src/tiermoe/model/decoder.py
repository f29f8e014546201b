"""Decoder built from blocks: tokens in, logits out, for prompts and generated tokens alike.

A step is `Decoder.step`; each `Layer` is attention and a feed-forward part with their norms and residuals.
`decoder_for` builds the decoder of a config by the file of its family in `families/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from tiermoe.batch import Batch
from tiermoe.kernels.gpu import takes_graphs
from tiermoe.kernels.graphs import Graphs, using
from tiermoe.model.cache.kv import KVCache, LayerShape
from tiermoe.model.families import decoder_family
from tiermoe.model.layer import DecoderLayer, Layer
from tiermoe.model.model_config import reads_mtp_head
from tiermoe.model.moe import Experts, MoeBlock
from tiermoe.model.mtp_head import MtpHead, mtp_head
from tiermoe.model.parts import Linear
from tiermoe.model.rotary import Rotary
from tiermoe.model.routers import Router
from tiermoe.model.step import Step
from tiermoe.model.streams import StreamLayer, in_streams, streams_of
from tiermoe.model.weights import Scope, ShapesOnly, Weights, text_part
from tiermoe.native import computes_on

MOST_BY_GRAPHS = 8
"""Sequences at the most that decode together by graphs, each by its own."""
_CACHES = 4  # to which graphs attend: those of more are dropped, so that a program's many caches leave none behind


class NotFiniteError(Exception):
    """A layer's output is not finite. The text is the layer's name."""


def require_finite(name: str, *values: Tensor) -> None:
    """NotFiniteError if some of the values are not finite."""
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
    """A model's `layers` with the embedding before and the output layer after them.

    shapes: of each layer's cache, an MTP head's after the others'. norm: of the last layer's output; where layers have
    streams it makes one of them first. rotaries: of the steps' angles. dtype: of the hidden states. kv_bits: of keys
    and values in its caches. softcap: logits are softcap * tanh(logits / softcap) (Gemma 4). mtp: a layer after the
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
        self._head, self._device = head, head.packed.device
        self._rotaries = list(rotaries)
        self._dtype = dtype
        self._embedding_scale = embedding_scale
        self._logits_divisor = logits_divisor
        self._kv_bits = kv_bits
        self._softcap = softcap
        self._caches = set[int]()  # addresses of those that graphs know
        self._graphs = Graphs(self._device) if takes_graphs(self._device.type) else None
        self.mtp = mtp

    @property
    def chunk_invariant(self) -> bool:
        """Whether a token's logits depend on its sequence alone: on how its prompt is cut neither."""
        return self.batch_invariant and all(layer.chunk_invariant for layer in self.layers)

    @cached_property
    def batch_invariant(self) -> bool:
        """Whether a token's logits do not depend on other sequences, nor on tokens that are verified with it."""
        return self._head.batch_invariant and all(layer.batch_invariant for layer in self.layers)

    @property
    def can_verify_draft(self) -> bool:
        """Whether the tokens of a draft, verified in one step, get the bits of decoding one by one: where they cannot
        run together, each runs by itself through a layer, which reads each expert once. A recurrent state is kept
        after the last of them alone."""
        return self.batch_invariant or not any(shape.state for shape in self.shapes)

    @property
    def routers(self) -> list[Router | None]:
        """Routers of the MoE layers, in the order they run; None if experts follow from the token alone."""
        return [block.router if block.table is None else None for block in self._moe_blocks()]

    @property
    def tables(self) -> dict[int, Tensor]:
        """MoE layer → its table (vocabulary, K), of the layers whose experts follow from the token alone."""
        return {layer: block.table for layer, block in enumerate(self._moe_blocks()) if block.table is not None}

    def watch(self, wrap: Callable[[Any], Any]) -> Callable[[], None]:
        """Puts wrap(part), which is called as the part is, in the place of everything that computes with dense weights:
        attention, dense blocks, shared experts, the output layer. Returns the function that undoes it."""
        layers, head, graphs = list(self.layers), self._head, self._graphs
        self._head, self._graphs = wrap(head), None  # no graph is launched in the place of what is called
        self.layers = [layer.watched(wrap) for layer in layers]

        def undo() -> None:
            self.layers, self._head, self._graphs = layers, head, graphs

        return undo

    def require_finite(self) -> Callable[[], None]:
        """Layers raise NotFiniteError if they give what is not finite, until the result is called."""
        layers = self.layers
        self.layers = [cast(DecoderLayer, FiniteLayer(layer)) for layer in layers]

        def undo() -> None:
            self.layers = layers

        return undo

    def attach(self, experts: Sequence[Experts]) -> None:
        """Gives each MoE layer its experts, an MTP head's after the others'."""
        head = None if self.mtp is None else self.mtp.layer.moe
        for block, own in zip([*self._moe_blocks(), *filter(None, [head])], experts, strict=True):
            block.experts = own
        self.__dict__.pop("batch_invariant", None)

    def new_cache(self, slabs: int, context: int, step: int) -> KVCache:
        """A cache, beside the weights, for `slabs` sequences of up to `context` tokens, of which `step` run at once."""
        return KVCache(self.shapes, slabs, context, step, self._dtype, self._kv_bits, self._device)

    @torch.no_grad()
    def step(self, batch: Batch, cache: KVCache, every: bool = False) -> Tensor:
        """Runs a batch: writes its tokens' keys, values and states into `cache` and returns the logits
        (sequences, vocabulary) of each sequence's last token, or of every token (T, vocabulary)."""
        graphs = None
        if self._graphs is not None and len(batch.tokens) == len(batch.rows) <= MOST_BY_GRAPHS:
            graphs = self._graphs_for(cache, self._graphs)
        passing = self._begin(batch, cache, graphs)
        with nullcontext() if graphs is None else using(graphs):
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
        return self._begin(batch, cache, None)

    def _begin(self, batch: Batch, cache: KVCache, graphs: Graphs | None) -> Passing:
        one = len(batch.rows) == 1 and not batch.verifies
        parts = [batch] if one else batch.parts(self.batch_invariant)
        for slab, end in batch.ends.items():
            cache.begin_write(slab, end)
        steps = [Step(part, cache, *self._rotaries, graphs=graphs, number=at) for at, part in enumerate(parts)]
        return Passing(batch, cache, parts, steps, [self._embedded(step) for step in steps])

    def advance(self, passing: Passing, end: int) -> None:
        """Runs the layers before layer `end` that have not run."""
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

    def _graphs_for(self, cache: KVCache, graphs: Graphs) -> Graphs:
        """The graphs for a step with this cache: they know where it lies."""
        lies_at = max(each.data_ptr() for each in cache.keys)
        if lies_at not in self._caches:
            if len(self._caches) == _CACHES:
                graphs.clear()
                self._caches.clear()
            self._caches.add(lies_at)
        return graphs

    def _embedded(self, step: Step) -> Tensor:
        x = self._embedding(step.tokens)
        return x if self._embedding_scale == 1 else x * self._embedding_scale

    def _logits(self, x: Tensor, batch: Batch, every: bool) -> Tensor:
        """Logits of the last layer's output (T, H), or (T, streams, H)."""
        if not every and len(batch.rows) < len(x):
            x = x[-1:] if len(batch.rows) == 1 else x[batch.last]
        logits = self._head(self._norm(x))
        if self._softcap is not None:
            return torch.tanh(logits / self._softcap) * self._softcap
        return logits if self._logits_divisor == 1 else logits / self._logits_divisor

    def moe_before(self, layer: int) -> int:
        """Number of MoE layers before layer `layer`."""
        return len(self._moe_blocks(layer))

    def _moe_blocks(self, end: int | None = None) -> list[MoeBlock]:
        return [block for layer in self.layers[:end] if (block := layer.moe) is not None]


# building


def plan_layers(config: Any, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> list[DecoderLayer] | None:
    """The layers of the decoder that a model with this config gets, of weights without values: what a plan counts.
    shapes: of the weights, by path. None if it gets no decoder of ours."""
    family = decoder_family(config)
    if family is None:
        return None
    w = Scope(text_part(ShapesOnly(shapes, dtype)), config, dtype, family.norms)
    return [family.layer(w.at(f"model.layers.{at}"), config, at) for at in range(config.num_hidden_layers)]


def decoder_for(config: Any, weights: Weights, dtype: torch.dtype, kv_bits: int = 16) -> Decoder | None:
    """The decoder of a model with this transformers config; None if the family has none or no block computes a part
    of the config. kv_bits: of keys and values in its caches; latents have 16 alone."""
    family = decoder_family(config)
    if family is None:
        return None
    w = Scope(text_part(weights), config, dtype, family.norms)
    rotaries, layers = family.rotaries(config, dtype), list[DecoderLayer]()
    head = w.linear("lm_head", config.vocab_size, w.hidden)
    fuses = computes_on(head.packed.device)
    for index in range(config.num_hidden_layers):
        layer = family.layer(w.at(f"model.layers.{index}"), config, index)
        columns = rotaries[layer.sizes.rotary].columns
        layers.append(layer.with_kernel(columns) if fuses and isinstance(layer, Layer | StreamLayer) else layer)
    shapes = [layer.sizes.shape for layer in layers]
    last = layers.pop() if reads_mtp_head(config) else None
    table = w.embedding(family.embedding)
    if family.in_streams:
        table = in_streams(table, streams_of(config))
    softcap = getattr(config, "final_logit_softcapping", None)
    mtp = None
    if last is not None:
        mtp = mtp_head(w.at(f"model.layers.{len(layers)}"), len(layers), cast(Layer, last), table, head, rotaries)
    return Decoder(
        embedding=table,
        layers=layers,
        shapes=shapes,
        norm=family.end(w, config),
        head=head,
        rotaries=rotaries,
        dtype=dtype,
        embedding_scale=family.embedding_scale(config, dtype),
        logits_divisor=family.logits_divisor(config),
        kv_bits=kv_bits,
        softcap=None if softcap is None else float(softcap),
        mtp=mtp,
    )
