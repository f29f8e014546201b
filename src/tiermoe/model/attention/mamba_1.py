"""Mamba-1 in the place of attention (Jamba; arXiv:2312.00752): each channel has a state of its own, whose columns decay
at rates of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.model.attention.base import Attention, AttentionSizes
from tiermoe.model.attention.convolution import CausalConvolution, causal_convolution
from tiermoe.model.cache.kv import LayerShape
from tiermoe.model.cache.recurrent import StateRows, StateShape
from tiermoe.model.linear import Linear
from tiermoe.model.norms import Norm
from tiermoe.model.step import Step
from tiermoe.model.weights import Scope
from tiermoe.types import Workload

CHUNK = 16
"""Tokens of `channelwise_scan` whose states are in memory at once."""
_WIDE = 4  # a prompt's inputs of the convolution that live at once in float32
_CHUNK_VALUES = 6  # a chunk's values that live at once, in float32


@dataclass(frozen=True, slots=True)
class Mamba1Sizes(AttentionSizes):
    """The description of a `Mamba1`."""

    channels: int
    state: int  # columns of a channel's state, of a key and of a query
    kept: int  # inputs of the convolution before a token's own
    rank: int  # columns that a token's time steps are made of

    @property
    def selected(self) -> int:
        """Columns that a token's channels are projected to: what its time steps are made of, a key and a query."""
        return self.rank + 2 * self.state

    @property
    def shape(self) -> LayerShape:
        verified = 2 * self.channels + self.state
        state = StateShape(self.kept, self.channels, 1, self.state, self.channels, verified=verified)
        return LayerShape(0, 0, 0, state=state)

    @property
    def token_columns(self) -> int:
        """Channels and gates, channels behind the convolution, time steps and outputs: queries of attention are there
        four times."""
        return 5 * self.channels // 4

    @property
    def taps_bytes(self) -> int:
        """Of the convolution's weights in float32."""
        return 4 * (self.kept + 1) * self.channels

    def prompt_bytes(self, load: Workload, dtype: torch.dtype) -> int:
        """float32 copies of a chunk's inputs of the convolution, and the workspace of a scan."""
        copies = 4 * min(load.chunk, load.context) * _WIDE * self.channels
        return copies + 4 * CHUNK * self.channels * (2 * self.state + _CHUNK_VALUES)


def mamba_1(w: Scope, sizes: Mamba1Sizes) -> Mamba1:
    """The block with the weights of `w`."""
    norms = (("dt", sizes.rank), ("b", sizes.state), ("c", sizes.state))
    time_norm, key_norm, query_norm = (w.norm(f"{name}_layernorm", columns) for name, columns in norms)
    return Mamba1(
        sizes,
        w.linear("in_proj", 2 * sizes.channels, w.hidden),
        causal_convolution(w.at("conv1d"), sizes.channels, sizes.kept + 1),
        w.linear("x_proj", sizes.selected, sizes.channels),
        (time_norm, key_norm, query_norm),
        w.linear("dt_proj", sizes.channels, sizes.rank),
        w.tensor("A_log", sizes.channels, sizes.state),
        w.tensor("D", sizes.channels),
        w.linear("out_proj", w.hidden, sizes.channels),
    )


class Mamba1(Attention):
    """Projection, a convolution over a token's last inputs, a projection to time steps, key and query with a norm of
    each, a scan, a gate, output projection.

    input: hidden → values and gates (T, 2 channels). selection: values → (T, selected). norms: of what time steps are
    made of, of keys and of queries. times: (T, rank) → time steps (T, channels). rates (channels, state): logarithms of
    the rates by which a channel forgets (transformers' `A_log`); skips (channels): of a token's own values
    (transformers' `D`)."""

    def __init__(
        self,
        sizes: Mamba1Sizes,
        input_: Linear,
        convolution: CausalConvolution,
        selection: Linear,
        norms: tuple[Norm, Norm, Norm],
        times: Linear,
        rates: Tensor,
        skips: Tensor,
        output: Linear,
    ) -> None:
        self.sizes, self._sizes = sizes, sizes
        self._input, self._convolution, self._selection = input_, convolution, selection
        self._norms, self._times, self._output = norms, times, output
        self._rates, self._skips = -rates.float().exp().t().contiguous(), skips.float()

    def __call__(self, x: Tensor, layer: int, step: Step) -> Tensor:
        """x (T, H), normed → (T, H). Leaves each sequence's state after its tokens in the step's cache."""
        sizes, rows = self._sizes, step.states
        assert rows is not None
        inputs, gates = self._input(x).chunk(2, dim=1)
        values = F.silu(self._convolution(inputs, layer, rows))
        selected = torch.split(self._selection(values), [sizes.rank, sizes.state, sizes.state], dim=1)
        times, key, query = (norm(each.contiguous()) for norm, each in zip(self._norms, selected, strict=True))
        times = self._times(times)
        rows.recurrent.keep(layer, rows, self._replay, inputs, times, key)
        return self._output(self._scans(query, key, values, times, gates, layer, rows))

    @property
    def batch_invariant(self) -> bool:
        matrices = (self._input, self._selection, self._times, self._output)
        return all(matrix.batch_invariant for matrix in matrices)

    def _replay(self, kept: Tensor, layer: int, rows: StateRows) -> None:
        """As `recurrent_states.Replay`. Queries and gates are not kept: only outputs depend on them."""
        sizes = self._sizes
        inputs, times, key = torch.split(kept, [sizes.channels, sizes.channels, sizes.state], dim=1)
        values = F.silu(self._convolution(inputs, layer, rows))
        self._scans(key, key, values, times, values, layer, rows)

    def _scans(
        self, query: Tensor, key: Tensor, values: Tensor, times: Tensor, gates: Tensor, layer: int, rows: StateRows
    ) -> Tensor:
        """The gated outputs (T, channels) of all rows. Leaves each sequence's state after its tokens."""
        states = rows.recurrent.states[layer].flatten(0, 2)
        scanned = torch.empty_like(values)
        for row in rows.apart:
            taken = [each[row.begin : row.end] for each in (query, key, values, times, gates)]
            scanned[row.begin : row.end] = self._scanned(taken, states[row.before], states[row.after])
        return scanned

    def _scanned(self, row: Sequence[Tensor], before: Tensor, after: Tensor) -> Tensor:
        """A row's query and key (T, state), values, time steps and gates (T, channels) → its gated outputs
        (T, channels); the state after them is left in `after`."""
        result = torch.empty_like(row[2])
        for begin in range(0, len(result), CHUNK):
            query, key, value, times, gates = (each[begin : begin + CHUNK].float() for each in row)
            times = F.softplus(times)
            found = channelwise_scan(query, key, value * times, times, self._rates, before, after)
            result[begin : begin + CHUNK] = found.addcmul_(value, self._skips).mul_(F.silu(gates))
            before = after
        return result


def channelwise_scan(
    query: Tensor, key: Tensor, value: Tensor, times: Tensor, rates: Tensor, before: Tensor, after: Tensor
) -> Tensor:
    """The recurrence S' = exp(times * rates) * S + key (x) value, S'^T query. No product of matrices computes several
    tokens of it, as of Mamba-2's: every column of a channel's state decays by itself. So all decays and all that is
    added are computed at once, and the states one after the other.

    query, key (T, state); value, times (T, channels); rates (state, channels), below 0; before, after
    (state, channels): the states before and after the tokens, which may be the same memory; all float32 →
    (T, channels)."""
    decays = (times[:, None] * rates).exp_()
    states = key[..., None] * value[:, None]
    state = before
    for decay, added in zip(decays, states, strict=True):
        state = added.addcmul_(decay, state)
    after.copy_(state)
    return (query[:, None] @ states)[:, 0]
