"""Mamba in the place of attention: Mamba-2 (Granite 4, Nemotron-H; arXiv:2405.21060), a state of fixed size that decays
at a rate which each token chooses, and Mamba-1 (Jamba; arXiv:2312.00752), whose channels have states of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.batch import Kind
from tiermoe.model.attention.base import Attention, AttentionSizes
from tiermoe.model.attention.convolution import CausalConvolution, causal_convolution
from tiermoe.model.cache.kv import LayerShape
from tiermoe.model.cache.recurrent import StateRows, StateShape
from tiermoe.model.parts import Linear, Norm, RootMeanSquare
from tiermoe.model.step import Step
from tiermoe.model.weights import Scope
from tiermoe.types import Workload

CHUNK = 64
"""Tokens of `selective_scan` that are computed at once."""
_WIDE = 4  # a prompt's inputs of the convolution that live at once in float32
_CHUNK_PAIRS = 5  # a chunk's pairs of tokens that live at once, in float32
_CHUNK_VALUES = 5  # its values


def mamba_lacks(config: Any) -> str:
    """The parts of a config with layers of Mamba that neither `Mamba` nor `Mamba1` computes; empty: none."""
    activation = getattr(config, "mamba_hidden_act", None) or config.hidden_act
    if activation != "silu":
        return f"{activation} in layers of Mamba"
    limits = tuple(getattr(config, "time_step_limit", None) or (0.0, math.inf))
    return "" if limits == (0.0, math.inf) else f"time steps within {limits[0]:g} and {limits[1]:g}"


@dataclass(frozen=True, slots=True)
class MambaSizes(AttentionSizes):
    """The description of a `Mamba`."""

    heads: int
    columns: int  # of a head's values
    groups: int  # of heads that share a key and a query
    state: int  # columns of a key
    kept: int  # inputs of the convolution before a token's own

    @property
    def values(self) -> int:
        """Columns of all heads' values."""
        return self.heads * self.columns

    @property
    def channels(self) -> int:
        """Channels of the convolution: values of all heads, keys and queries of all groups."""
        return self.values + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Columns that a token is projected to: gates, channels, and a time step of each head."""
        return self.values + self.channels + self.heads

    @property
    def shape(self) -> LayerShape:
        verified = self.channels + self.heads
        state = StateShape(self.kept, self.channels, self.heads, self.state, self.columns, verified=verified)
        return LayerShape(0, 0, 0, state=state)

    @property
    def token_columns(self) -> int:
        """Half the columns that a token is projected to: they are there twice, queries of attention four times."""
        return self.projected // 2

    @property
    def taps_bytes(self) -> int:
        """Of the convolution's weights in float32."""
        return 4 * (self.kept + 1) * self.channels

    def prompt_bytes(self, load: Workload, dtype: torch.dtype) -> int:
        """float32 copies of a chunk's inputs of the convolution and its outputs, and the workspace of a scan."""
        tokens = min(load.chunk, load.context)
        copies = 4 * tokens * _WIDE * (self.channels + self.values)
        pairs = _CHUNK_PAIRS * CHUNK * CHUNK + _CHUNK_VALUES * CHUNK * (self.columns + self.state)
        return copies + 4 * self.heads * (pairs + 2 * self.state * self.columns)


def mamba(w: Scope, sizes: MambaSizes, least_step: float = 0.0) -> Mamba:
    """The block with the weights of `w`. least_step: of time, in prompts (`Mamba`)."""
    return Mamba(
        sizes,
        w.linear("in_proj", sizes.projected, w.hidden),
        w.linear("out_proj", w.hidden, sizes.values),
        causal_convolution(w.at("conv1d"), sizes.channels, sizes.kept + 1),
        w.tensor("A_log", sizes.heads),
        w.tensor("dt_bias", sizes.heads),
        w.tensor("D", sizes.heads),
        w.tensor("norm.weight", sizes.values),
        w.epsilon,
        least_step,
    )


class Mamba(Attention):
    """Projection, a convolution over a token's last inputs, a scan, a gate and a norm over each group of heads, output
    projection.

    input: hidden → gates, values, keys, queries and time steps (T, projected). rates (heads): logarithms of the rates
    by which a head forgets (transformers' `A_log`); time_biases (heads); skips (heads): of a token's own values
    (transformers' `D`); norm (values). least_step: of time, in prompts: transformers bounds no generated token's."""

    def __init__(
        self,
        sizes: MambaSizes,
        input_: Linear,
        output: Linear,
        convolution: CausalConvolution,
        rates: Tensor,
        time_biases: Tensor,
        skips: Tensor,
        norm: Tensor,
        epsilon: float,
        least_step: float = 0.0,
    ) -> None:
        self.sizes, self._sizes = sizes, sizes
        self._input, self._output, self._convolution = input_, output, convolution
        self._rates, self._biases, self._skips = rates.float().exp(), time_biases.float(), skips.float()[:, None]
        self._norm = RootMeanSquare(norm.view(sizes.groups, -1), epsilon, by_kernel=False)
        self._least_step = least_step

    def __call__(self, x: Tensor, layer: int, step: Step) -> Tensor:
        sizes, rows = self._sizes, step.states
        assert rows is not None
        projected = self._input(x)
        gates, mixed, times = torch.split(projected, [sizes.values, sizes.channels, sizes.heads], dim=1)
        rows.recurrent.keep(layer, rows, self._replay, mixed, times)
        scanned = x.new_empty((len(x), sizes.values))
        for own, found in self._scans(mixed, times, layer, rows):
            scanned[own] = self._gated(found, gates[own])
        return self._output(scanned)

    @property
    def batch_invariant(self) -> bool:
        return self._input.batch_invariant and self._output.batch_invariant

    def _replay(self, kept: Tensor, layer: int, rows: StateRows) -> None:
        mixed, times = torch.split(kept, [self._sizes.channels, self._sizes.heads], dim=1)
        for _ in self._scans(mixed, times, layer, rows):
            pass

    def _scans(self, mixed: Tensor, times: Tensor, layer: int, rows: StateRows) -> Iterator[tuple[slice, Tensor]]:
        """mixed (T, channels) before the convolution, times (T, heads) → of each row its tokens and their outputs,
        float32 (.., heads, columns). Leaves each sequence's state after its tokens."""
        mixed = self._convolution(mixed, layer, rows)
        states = rows.recurrent.states[layer].flatten(0, 1)
        for row in rows.apart:
            own = slice(row.begin, row.end)
            least_step = self._least_step if row.row.kind is Kind.PROMPT else 0.0
            yield own, self._scanned(mixed[own], times[own], least_step, states[row.before], states[row.after])

    def _scanned(self, mixed: Tensor, times: Tensor, least_step: float, before: Tensor, after: Tensor) -> Tensor:
        """A row's outputs, float32 (T, heads, columns); the state after them is left in `after`."""
        sizes, shared = self._sizes, self._sizes.groups * self._sizes.state
        value, key, query = torch.split(F.silu(mixed).float(), [sizes.values, shared, shared], dim=1)
        value = value.view(-1, sizes.heads, sizes.columns)
        key, query = (each.reshape(-1, sizes.groups, sizes.state) for each in (key, query))
        times = F.softplus(times.float() + self._biases).clamp_min_(least_step)
        found = selective_scan(query, key, value * times[..., None], times * -self._rates, before, after)
        return found.addcmul_(value, self._skips)

    def _gated(self, scanned: Tensor, gates: Tensor) -> Tensor:
        """(T, heads, columns), multiplied with silu of gates (T, values) and normed → (T, values), in the gates'
        dtype."""
        gated = scanned.flatten(1) * F.silu(gates.float())
        return self._norm(gated.view(len(gated), self._sizes.groups, -1)).flatten(1).to(gates.dtype)


def selective_scan(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """The recurrence S' = decay S + key (x) value, S'^T query of each head, `CHUNK` tokens at a time: within a chunk
    all tokens are computed at once (arXiv:2405.21060, section 6), so that the state is read and written once a chunk.

    query, key (T, groups, key columns), each for heads / groups heads; value (T, heads, value columns); decay
    (T, heads), its logarithm; before, after (heads, key columns, value columns): the states before and after the
    tokens, which may be the same memory; all float32 → (T, heads, value columns)."""
    groups = key.shape[1]
    result = torch.empty_like(value)
    grouped = [torch.unflatten(each, 1, (groups, -1)) for each in (query, key, value, decay, result)]
    before, after = (torch.unflatten(each, 0, (groups, -1)) for each in (before, after))
    for begin in range(0, len(value), CHUNK):
        *chunk, out = (each[begin : begin + CHUNK].movedim(0, 2) for each in grouped)
        out.copy_(_chunk(chunk, before, after))
        before = after
    return result


def _chunk(chunk: Sequence[Tensor], before: Tensor, after: Tensor) -> Tensor:
    """`selective_scan` of a chunk's query and key (groups, 1, T, key columns), value (groups, heads of each, T, value
    columns) and decay (groups, heads of each, T). Sums of decays are float64: what is computed of them is their
    differences, of which float32 leaves few digits where a token has made a head forget."""
    query, key, value, decay = chunk
    if decay.shape[2] == 1:
        torch.mul(before, decay.exp()[..., None], out=after)
        return query @ after.addcmul_(key.transpose(2, 3), value)
    gone = decay.double().cumsum(2)  # logarithm of what has decayed since the chunk began
    tokens = decay.shape[2]
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    pairs = (gone[..., None] - gone[..., None, :]).float().masked_fill_(later, -math.inf).exp_()
    since = gone.float().exp()[..., None]
    result = (query @ key.transpose(2, 3) * pairs) @ value + query @ before * since
    left = (gone[..., -1:] - gone).float().exp()[..., None]
    torch.mul(before, since[..., -1:, :], out=after)
    after += key.transpose(2, 3) @ (value * left)
    return result


CHANNELWISE_CHUNK = 16
"""Tokens of `channelwise_scan` whose states are in memory at once."""
_CHANNELWISE_VALUES = 6  # a chunk's values that live at once, in float32


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
        """Channels and gates, channels after the convolution, time steps and outputs: queries of attention are there
        four times."""
        return 5 * self.channels // 4

    @property
    def taps_bytes(self) -> int:
        """Of the convolution's weights in float32."""
        return 4 * (self.kept + 1) * self.channels

    def prompt_bytes(self, load: Workload, dtype: torch.dtype) -> int:
        """float32 copies of a chunk's inputs of the convolution, and the workspace of a scan."""
        copies = 4 * min(load.chunk, load.context) * _WIDE * self.channels
        return copies + 4 * CHANNELWISE_CHUNK * self.channels * (2 * self.state + _CHANNELWISE_VALUES)


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
        """`cache.recurrent.Replay`. Queries and gates are not kept: only outputs depend on them."""
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
        for begin in range(0, len(result), CHANNELWISE_CHUNK):
            query, key, value, times, gates = (each[begin : begin + CHANNELWISE_CHUNK].float() for each in row)
            times = F.softplus(times)
            found = channelwise_scan(query, key, value * times, times, self._rates, before, after)
            result[begin : begin + CHANNELWISE_CHUNK] = found.addcmul_(value, self._skips).mul_(F.silu(gates))
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
