"""Sparse attention's indexer (DeepSeek-V3.2): which positions a token attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.model.linear import Linear
from tiermoe.model.norms import Norm
from tiermoe.model.rotary import Turn
from tiermoe.model.step import Span, Step, held, put
from tiermoe.types import Workload

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class IndexerSizes:
    """What an `Indexer` asks memory for, known from a config. most: positions that a token attends to."""

    heads: int
    columns: int
    most: int

    def nbytes(self, load: Workload) -> int:
        """Of one sequence: keys and scores as float32, what a search for the largest takes, and what it finds for all
        tokens of a step."""
        found = load.tokens * self.most * _FLOAT_BYTES
        tokens = load.tokens * self.heads * (self.columns * (3 * load.itemsize + _FLOAT_BYTES) + _FLOAT_BYTES)
        return load.context * (_FLOAT_BYTES * (self.columns + 2 * self.heads + 1) + 16) + found + tokens


@dataclass(frozen=True, slots=True)
class Indexer:
    """Each token keeps a key: `key` of its hidden state, normed. Its score of a position is the sum over heads of
    weight * relu(query · key), with a query for each head, made of `narrow`'s normed output, and a weight for each,
    made of the hidden state by `weigh`. A token attends to the `most` positions of the largest scores, of those up to
    its own. The first columns of queries and keys are turned.

    Scores are float32, as in transformers, and each token's are computed by themselves over its own positions alone:
    what a token attends to depends neither on the other tokens of a step nor on how a prompt was cut. Few heads give
    many equal scores: a position that no head finds has 0. Of equal scores the one is chosen that `torch.topk` finds
    among the token's positions, as where transformers decodes one by one. Which one that is depends on the length of
    the row. In a prompt transformers' rows have all positions of the prompt, so it may choose another of the equals,
    and its logits of the prompt differ from those of its own decoding: of random weights with two heads by any amount.
    """

    narrow: Linear
    narrow_norm: Norm
    query: Linear
    key: Linear
    key_norm: Norm
    weigh: Linear
    heads: int
    columns: int
    most: int
    turn: Turn
    weigh_in: torch.dtype

    @property
    def by_row(self) -> bool:
        """Whether a token's scores do not depend on the others of a call of few tokens."""
        return all(each.by_row for each in (self.narrow, self.query, self.key, self.weigh))

    def __call__(self, x: Tensor, layer: int, step: Step) -> None:
        """x (T, H), normed: writes the tokens' keys into the step's cache, and tells the step what they attend to from
        this layer on."""
        kept, keys = step.cache.index_keys[layer], self._turned(self.key_norm(self.key(x))[:, None], step)
        for span in step.spans:
            put(kept, span.row, keys[span.begin : span.end])
        step.choose(self._chosen(x, kept, step) if step.longest > self.most else None)

    def _chosen(self, x: Tensor, kept: Tensor, step: Step) -> Tensor:
        """int32 (T, most)."""
        queries = self.query(self.narrow_norm(self.narrow(x))).view(len(x), self.heads, self.columns)
        queries = self._turned(queries, step).float()
        weights = self.weigh(x.to(self.weigh_in)).float() * self.heads**-0.5
        chosen = torch.arange(self.most, dtype=torch.int32).repeat(len(x), 1)
        for span in step.spans:
            if span.row.end > self.most:
                self._search(queries, weights, held(kept, span.row, None)[0].float(), span, chosen)
        return chosen

    def _search(self, queries: Tensor, weights: Tensor, keys: Tensor, span: Span, chosen: Tensor) -> None:
        """Fills in what the tokens of a sequence attend to, ascending: of keys (n, columns), its positions'."""
        for token in range(span.begin, span.end):
            positions = span.row.first + token - span.begin + 1
            if positions <= self.most:
                continue
            scores = torch.matmul(queries[token], keys[:positions].T).mul_(self.columns**-0.5).relu_()
            ranked = torch.matmul(weights[token], scores)
            chosen[token] = ranked.topk(self.most).indices.sort().values

    def _turned(self, x: Tensor, step: Step) -> Tensor:
        """x (T, heads, columns) of which the first are turned."""
        turned = step.cos.shape[-1]
        return torch.cat((self.turn(x[..., :turned], step.cos, step.sin), x[..., turned:]), dim=-1)
