"""MTP head (multi-token prediction): a layer after a model's last one, which drafts the next token but one from a
token's hidden state and the token after it (DeepSeek-V3's report, 2024, section 2.2; transformers' `MtpModel`).

Its layer attends over keys and values of its own: entry p, at position p of the sequence's slab, is made of the hidden
state of the token at p, after the model's last norm, and of the token at p + 1. An entry takes no experts: keys and
values need the layer's attention alone. So the head reads every token of prompt and answer as it comes, and its experts
run only where it drafts.

A step that drafts more than one token has the head's own output in the place of the hidden state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tiermoe.batch import Batch, Kind, Row
from tiermoe.model.cache.kv import KVCache, Unread
from tiermoe.model.layer import Layer
from tiermoe.model.parts import Linear, Norm
from tiermoe.model.rotary import Rotary
from tiermoe.model.step import Step
from tiermoe.model.weights import Scope


class Drafted(NamedTuple):
    """A draft of one token, and what the next one is drafted from."""

    logits: Tensor  # (vocabulary,)
    hidden: Tensor  # (1, H): the head's output
    position: int  # of the entry that it was drafted by


class DraftToken(NamedTuple):
    """A token whose successor is to be drafted."""

    slab: int
    end: int  # the sequence has run up to this position
    token: int  # the one there, or the last one that was drafted
    before: Drafted | None = None  # the draft that gave it


@dataclass(frozen=True, slots=True)
class MtpHead:
    """The head as layer `index` of a KV cache. embedding, output, rotaries: the model's own."""

    index: int
    embedding: Callable[[Tensor], Tensor]
    embedding_norm: Norm
    hidden_norm: Norm
    projection: Linear  # (T, 2 H), the token's embedding first → (T, H)
    layer: Layer
    norm: Norm
    output: Linear
    rotaries: Sequence[Rotary]

    def read(self, part: Batch, hidden: Tensor, cache: KVCache) -> None:
        """Reads tokens that have run. hidden (T, H): theirs. Of tokens that are being verified it is not known yet
        which are right: the sequence's next call reads those."""
        rows, states, begin = list[Row](), list[Tensor](), 0
        for row in part.rows:
            end = begin + len(row.tokens)
            before = _before(cache.unread.get(row.slab), row.first, hidden)
            tokens, own = [*before.tokens, *row.tokens], torch.cat((before.hidden, hidden[begin:end]))
            count = (row.first if row.kind is Kind.VERIFY else row.end - 1) - before.first
            if count:
                rows.append(Row(row.slab, before.first, tuple(tokens[1 : count + 1]), row.kind))
                states.append(own[:count])
            cache.unread[row.slab] = Unread(before.first + count, tokens[count:], own[count:].clone())
            begin = end
        if rows:
            self._attended(Batch(tuple(rows)), torch.cat(states), cache)

    def draft(self, cache: KVCache, wanted: Sequence[DraftToken]) -> list[Drafted]:
        """Drafts of what follows tokens of several sequences."""
        rows, states = list[Row](), list[Tensor]()
        like = self.embedding(torch.tensor([wanted[0].token]))
        for slab, end, token, before in wanted:
            if before is not None:
                unread = Unread(before.position + 1, [token], before.hidden)
            else:
                unread = _before(cache.unread.get(slab), end, like)
                if not unread.tokens:
                    unread = _unknown(end, like)
            rows.append(Row(slab, unread.first, (*unread.tokens[1:], token), Kind.VERIFY))
            states.append(unread.hidden)
            cache.begin_write(slab, rows[-1].end)
        batch = Batch(tuple(rows))
        normed, x = self._attended(batch, torch.cat(states), cache)
        hidden = self.norm(self.layer.feed_forward.add(normed[batch.last], x[batch.last], self.layer.multiplier))
        for slab, end, _, before in wanted:
            if before is None:
                cache.unread[slab] = Unread(end, [], like[:0])
        return [
            Drafted(logits, own[None], row.end - 1)
            for logits, own, row in zip(self.output(hidden), hidden, rows, strict=True)
        ]

    def _attended(self, batch: Batch, hidden: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """`Layer.attended` of entries: hidden states (T, H) and the tokens after them."""
        step = Step(batch, cache, *self.rotaries, with_states=False)
        both = self.embedding_norm(self.embedding(step.tokens)), self.hidden_norm(hidden)
        return self.layer.attended(self.projection(torch.cat(both, dim=-1)), self.index, step)


def mtp_head(
    w: Scope,
    index: int,
    layer: Layer,
    table: Callable[[Tensor], Tensor],
    output: Linear,
    rotaries: Sequence[Rotary],
) -> MtpHead:
    """The head with the weights of `w` and the layer after the model's own, at `index`."""
    embedding_norm, hidden_norm, norm = (w.norm(name) for name in ("enorm", "hnorm", "shared_head.norm"))
    projection = w.linear("eh_proj", w.hidden, 2 * w.hidden)
    return MtpHead(index, table, embedding_norm, hidden_norm, projection, layer, norm, output, rotaries)


def _before(unread: Unread | None, first: int, like: Tensor) -> Unread:
    """What of a sequence's tokens before position `first` is not read yet. like: (..., H)."""
    if unread is None or not unread.first <= first <= unread.first + len(unread.tokens):
        return _unknown(first, like)
    count = first - unread.first
    return Unread(unread.first, unread.tokens[:count], unread.hidden[:count])


def _unknown(first: int, like: Tensor) -> Unread:
    """The token before position `first` if its hidden state is not known, as after the prefix of another sequence:
    zeros stand for it, and change drafts alone."""
    count = min(first, 1)
    return Unread(first - count, [0] * count, like.new_zeros((count, like.shape[-1])))
