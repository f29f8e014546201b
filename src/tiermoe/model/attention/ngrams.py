"""Features of the n-grams that end with a token (Qwen3.8's per-layer embedding): rows of a hashed table of tens of GB,
gated by the residual streams and mixed with those of earlier tokens. The table may stay on the drive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.model.attention.convolution import convolved
from tiermoe.model.cache.recurrent import StateRows
from tiermoe.model.parts import Linear, Norm
from tiermoe.model.step import Step
from tiermoe.model.weights import Scope
from tiermoe.types import Workload

_WIDE = 4  # tensors of all streams that live at once as float32
_NARROW = 7  # and in the model's dtype
_SMALLEST_GATE = 1e-6  # transformers' code


@dataclass(frozen=True, slots=True)
class NgramSizes:
    """The description of an `NgramFeatures`."""

    longest: int  # tokens of the longest n-gram; the shortest has two
    heads: int  # rows of the table that a token takes, as many of each length
    columns: int  # of all of a token's rows
    streams: int
    hidden: int
    kept: int  # inputs of the convolution before a token's own

    @classmethod
    def of(cls, config: Any) -> NgramSizes:
        """Of all layers that have n-gram features."""
        longest = config.ngram_size
        return cls(
            longest,
            (longest - 1) * config.heads_per_ngram,
            config.ple_embed_dim,
            config.hc_count,
            config.hidden_size,
            (config.ple_conv_kernel_size - 1) * longest,
        )

    def nbytes(self, load: Workload) -> int:
        """Workspace: a token's rows twice, its streams as keys, queries and values, and while they are mixed."""
        streams = self.streams * self.hidden * (_NARROW * load.itemsize + 4 * _WIDE)
        return (load.tokens + self.kept) * (streams + 2 * self.columns * load.itemsize + 8 * 4 * self.heads)


def ngrams(w: Scope, config: Any) -> NgramFeatures:
    """The features with the weights of `w` ('ple')."""
    sizes, table, end = NgramSizes.of(config), w.at("ple_embedding"), config.eos_token_id
    wide = sizes.streams * w.hidden
    rows, begins = (table.tensor(f"ngram_heads_{name}", sizes.heads) for name in ("vocab_sizes", "offsets"))
    return NgramFeatures(
        sizes=sizes,
        hashes=NgramHashes(
            table.tensor("layer_multipliers", sizes.longest), rows, begins, end[0] if isinstance(end, list) else end
        ),
        table=table.embedding("ngram_embedding"),
        key=w.linear("key_proj", wide, sizes.columns),
        value=w.linear("value_proj", w.hidden, sizes.columns),
        norm_key=w.norm("norm_key", groups=sizes.streams),
        norm_stream=w.norm("norm_query", groups=sizes.streams),
        norm_value=w.norm("norm_conv", groups=sizes.streams),
        convolution=w.tensor("conv1d.weight", wide, 1, config.ple_conv_kernel_size),
    )


@dataclass(frozen=True, slots=True)
class NgramHashes:
    """Where n-grams lie in a table: each head has a range of its rows, and a hash of an n-gram's tokens chooses one.

    multipliers: int64 (longest), of a token by how far back it is. rows, begins: int64 (heads), of each head's range.
    end: the token that ends a text; an n-gram does not reach beyond it."""

    multipliers: Tensor
    rows: Tensor
    begins: Tensor
    end: int

    def __call__(self, history: Tensor) -> Tensor:
        """int64 (longest - 1 + T), tokens and those before them, -1 if there are none → (T, heads)."""
        kept = len(self.multipliers) - 1
        before = tokens = history[kept:]
        mixed, hashes = tokens * self.multipliers[0], []
        for back in range(1, kept + 1):
            earlier = history[kept - back : len(history) - back]
            ended = (earlier < 0) if back == 1 else (earlier < 0) | (before == self.end)
            before = earlier.masked_fill(ended, self.end)
            mixed = mixed ^ (before * self.multipliers[back])
            hashes.append(mixed)
        each = torch.stack(hashes, dim=1).repeat_interleave(len(self.rows) // kept, dim=1)
        return each.remainder(self.rows) + self.begins


@dataclass(frozen=True, slots=True)
class NgramFeatures:
    """A token's rows of the table are projected to a key for each stream and one value. The streams gate the value, and
    a convolution adds the values of earlier tokens, each as far from the next as the longest n-gram is long."""

    sizes: NgramSizes
    hashes: NgramHashes
    table: Callable[[Tensor], Tensor]  # int64 (T, heads) → (T, heads, columns)
    key: Linear  # columns of all rows → streams * hidden
    value: Linear  # columns of all rows → hidden
    norm_key: Norm  # over each stream, as the next two
    norm_stream: Norm
    norm_value: Norm  # of the convolution's inputs
    convolution: Tensor  # (streams * hidden, 1, taps)

    def __call__(self, x: Tensor, layer: int, step: Step) -> Tensor:
        """What is added to the streams x (T, streams, H). Leaves each sequence's last tokens and last inputs of the
        convolution in the step's cache."""
        rows = self.table(self._places(layer, step)).flatten(1)
        key = self.norm_key(self.key(rows).view(x.shape))
        gate = (key * self.norm_stream(x)).sum(dim=-1, keepdim=True) / x.shape[-1] ** 0.5
        gate = gate.abs().clamp_min(_SMALLEST_GATE).sqrt() * gate.sign()
        values = torch.sigmoid(gate) * self.value(rows)[:, None]
        return values + self._mixed(self.norm_value(values).flatten(1), layer, step).view(x.shape)

    @property
    def batch_invariant(self) -> bool:
        return self.key.batch_invariant and self.value.batch_invariant

    def _places(self, layer: int, step: Step) -> Tensor:
        """The rows of the table that the step's tokens take, int64 (T, heads)."""
        assert step.states is not None
        kept, found = step.states.recurrent.tokens[layer].flatten(0, 1), []
        for row in step.states.rows:
            history = row.append(kept, step.tokens[row.begin : row.end] + 1) - 1
            found.append(self.hashes(history))
        return torch.cat(found)

    def _mixed(self, values: Tensor, layer: int, step: Step) -> Tensor:
        """(T, streams * H) → (T, streams * H)."""
        assert step.states is not None
        step.states.recurrent.keep(layer, step.states, self._replay, values, ngrams=True)
        kept, taps = step.states.recurrent.ngram_inputs[layer].flatten(0, 1), list(self.convolution[:, 0].t())
        found = torch.empty_like(values)
        for row in step.states.rows:
            whole = row.append(kept, values[row.begin : row.end])
            mixed = convolved(whole.float(), taps, self.sizes.longest)
            found[row.begin : row.end] = F.silu(mixed.to(values.dtype))
        return found

    def _replay(self, kept: Tensor, layer: int, rows: StateRows) -> None:
        recurrent = rows.recurrent
        for row in rows.rows:
            row.append(recurrent.ngram_inputs[layer].flatten(0, 1), kept)
            row.append(recurrent.tokens[layer].flatten(0, 1), torch.tensor(row.row.tokens) + 1)
