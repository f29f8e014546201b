"""Mamba in the place of attention: Mamba-2 (Granite 4, Nemotron-H; arXiv:2405.21060), a state of fixed size that decays
at a rate which each token chooses, and Mamba-1 (Jamba; arXiv:2312.00752), whose channels have states of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.batch import Kind
from tiermoe.kernels.convolution import takes_convolution
from tiermoe.kernels.linear import plain
from tiermoe.kernels.scan import ChannelScanKernel, ScanKernel, scan_bytes, takes_channel_scan, takes_scan
from tiermoe.model.attention.base import Attention, AttentionSizes
from tiermoe.model.attention.convolution import CausalConvolution, causal_convolution
from tiermoe.model.cache.kv import LayerShape
from tiermoe.model.cache.recurrent import StateRow, StateRows, StateShape
from tiermoe.model.parts import Linear, Norm, RootMeanSquare
from tiermoe.model.step import Step
from tiermoe.model.weights import Scope
from tiermoe.types import Workload

_WIDE = 4  # a prompt's inputs of the convolution that live at once in float32, if torch computes
_STATES = 4  # a sequence's states that live at once then


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
        """Of the convolution's weights in float32; the kernel's take half."""
        return 4 * (self.kept + 1) * self.channels

    def suit(self, dtype: torch.dtype) -> bool:
        """Whether the kernels take these sizes."""
        return takes_scan(dtype, self.columns) and takes_convolution(dtype, self.channels, self.kept)

    def prompt_bytes(self, load: Workload, dtype: torch.dtype) -> int:
        """The kernel's workspace, which decoding uses too; without it float32 copies of a chunk's inputs of the
        convolution and its outputs, every head's keys and queries, and some states."""
        if self.suit(dtype):
            return scan_bytes(self.heads, self.columns, self.groups, self.state)
        columns = _WIDE * (self.channels + self.values) + 2 * self.heads * self.state
        return 4 * (min(load.chunk, load.context) * columns + _STATES * self.state * self.values)


def mamba(w: Scope, sizes: MambaSizes, least_step: float = 0.0) -> Mamba:
    """The block with the weights of `w`. least_step: of time, in prompts (`Mamba`)."""
    return Mamba(
        sizes,
        w.linear("in_proj", sizes.projected, w.hidden),
        w.linear("out_proj", w.hidden, sizes.values),
        causal_convolution(w.at("conv1d"), sizes.channels, sizes.kept + 1, silu=True),
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
        self._rates, self._biases, self._skips = rates.float().exp(), time_biases.float(), skips.float()
        self._norm = RootMeanSquare(norm.view(sizes.groups, -1), epsilon, by_kernel=False)
        self._least_step = least_step
        self._kernel: ScanKernel | None = None
        if sizes.suit(convolution.dtype) and plain(norm) and not norm.is_meta:
            self._kernel = ScanKernel(
                self._rates, self._biases, self._skips, norm, epsilon, sizes.groups, sizes.state, least_step
            )

    def __call__(self, x: Tensor, layer: int, step: Step) -> Tensor:
        sizes, rows = self._sizes, step.states
        assert rows is not None
        gates, mixed, times = torch.split(self._input(x), [sizes.values, sizes.channels, sizes.heads], dim=1)
        rows.recurrent.keep(layer, rows, self._replay, mixed, times)
        return self._output(self._scanned(mixed, times, gates, layer, rows))

    @property
    def batch_invariant(self) -> bool:
        return self._kernel is not None and self._input.batch_invariant and self._output.batch_invariant

    @property
    def chunk_invariant(self) -> bool:
        return self._kernel is not None

    def _replay(self, kept: Tensor, layer: int, rows: StateRows) -> None:
        """`cache.recurrent.Replay`. The tokens' gates are not kept: only their outputs depend on them."""
        mixed, times = torch.split(kept, [self._sizes.channels, self._sizes.heads], dim=1)
        self._scanned(mixed, times, mixed[:, : self._sizes.values], layer, rows)

    def _scanned(self, mixed: Tensor, times: Tensor, gates: Tensor, layer: int, rows: StateRows) -> Tensor:
        """mixed (T, channels) before the convolution, times (T, heads), gates (T, values) → (T, values). Leaves each
        sequence's state after its tokens."""
        mixed, states = self._convolution(mixed, layer, rows), rows.recurrent.states[layer]
        if self._kernel is not None:
            return self._kernel(mixed, times, gates, rows.pieces, states)
        scanned = torch.empty_like(gates)
        for row in rows.rows:
            own = slice(row.begin, row.end)
            scanned[own] = self._gated(self._row(mixed[own], times[own], states.flatten(0, 1), row), gates[own])
        return scanned

    def _row(self, mixed: Tensor, times: Tensor, states: Tensor, row: StateRow) -> Tensor:
        """A row's outputs, float32 (T, values)."""
        sizes, shared = self._sizes, self._sizes.groups * self._sizes.state
        value, key, query = torch.split(mixed.float(), [sizes.values, shared, shared], dim=1)
        value, key, query = (
            torch.unflatten(each, 1, (count, -1)).repeat_interleave(sizes.heads // count, dim=1)
            for each, count in ((value, sizes.heads), (key, sizes.groups), (query, sizes.groups))
        )
        times = F.softplus(times.float() + self._biases)[..., None]
        if row.row.kind is Kind.PROMPT:
            times = times.clamp_min(self._least_step)
        rates, before, after = -self._rates[:, None, None], states[row.before], states[row.after]
        found = scan(query, key, value * times, times[..., None], rates, before, after)
        return found.addcmul_(value, self._skips[:, None]).flatten(1)

    def _gated(self, scanned: Tensor, gates: Tensor) -> Tensor:
        """(T, values), multiplied with silu of gates (T, values) and normed → (T, values), in the gates' dtype."""
        gated = scanned * F.silu(gates.float())
        return self._norm(gated.view(len(gated), self._sizes.groups, -1)).flatten(1).to(gates.dtype)


def scan(
    query: Tensor, key: Tensor, value: Tensor, times: Tensor, rates: Tensor, before: Tensor, after: Tensor
) -> Tensor:
    """The recurrence S' = exp(times * rates) S + key (x) value, S'^T query of native/scan.h by torch's operations, a
    token after the other.

    query, key (T, .., state); value (T, .., columns); times * rates (T, .., state or 1, columns or 1); before, after
    (.., state, columns): the states before and after the tokens, which may be the same memory; all float32 →
    (T, .., columns)."""
    result, state = torch.empty_like(value), before
    for at in range(len(value)):
        state = (times[at] * rates).exp() * state + key[at, ..., None] * value[at, ..., None, :]
        result[at] = (query[at, ..., None, :] @ state).squeeze(-2)
    after.copy_(state)
    return result


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
        """Of the convolution's weights in float32; the kernel's take half."""
        return 4 * (self.kept + 1) * self.channels

    def prompt_bytes(self, load: Workload, dtype: torch.dtype) -> int:
        """Nothing if the kernels compute; else float32 copies of a chunk's inputs of the convolution, and some
        states."""
        if self.suit(dtype):
            return 0
        return 4 * self.channels * (min(load.chunk, load.context) * _WIDE + _STATES * self.state)

    def suit(self, dtype: torch.dtype) -> bool:
        """Whether the kernels take these sizes."""
        scans = takes_channel_scan(dtype, self.channels, self.state)
        return scans and takes_convolution(dtype, self.channels, self.kept)


def mamba_1(w: Scope, sizes: Mamba1Sizes) -> Mamba1:
    """The block with the weights of `w`."""
    norms = (("dt", sizes.rank), ("b", sizes.state), ("c", sizes.state))
    time_norm, key_norm, query_norm = (w.norm(f"{name}_layernorm", columns) for name, columns in norms)
    return Mamba1(
        sizes,
        w.linear("in_proj", 2 * sizes.channels, w.hidden),
        causal_convolution(w.at("conv1d"), sizes.channels, sizes.kept + 1, silu=True),
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
        self._rates, self._skips = rates.float().exp().t().contiguous(), skips.float()
        self._kernel: ChannelScanKernel | None = None
        if sizes.suit(convolution.dtype) and not skips.is_meta:
            self._kernel = ChannelScanKernel(self._rates, self._skips)

    def __call__(self, x: Tensor, layer: int, step: Step) -> Tensor:
        sizes, rows = self._sizes, step.states
        assert rows is not None
        inputs, gates = self._input(x).chunk(2, dim=1)
        values = self._convolution(inputs, layer, rows)
        selected = torch.split(self._selection(values), [sizes.rank, sizes.state, sizes.state], dim=1)
        times, key, query = (norm(each.contiguous()) for norm, each in zip(self._norms, selected, strict=True))
        times = self._times(times)
        rows.recurrent.keep(layer, rows, self._replay, inputs, times, key)
        return self._output(self._scanned(query, key, values, times, gates, layer, rows))

    @property
    def batch_invariant(self) -> bool:
        matrices = (self._input, self._selection, self._times, self._output)
        return self._kernel is not None and all(matrix.batch_invariant for matrix in matrices)

    @property
    def chunk_invariant(self) -> bool:
        return self._kernel is not None

    def _replay(self, kept: Tensor, layer: int, rows: StateRows) -> None:
        """`cache.recurrent.Replay`. Queries and gates are not kept: only outputs depend on them."""
        sizes = self._sizes
        inputs, times, key = torch.split(kept, [sizes.channels, sizes.channels, sizes.state], dim=1)
        values = self._convolution(inputs, layer, rows)
        self._scanned(key, key, values, times, values, layer, rows)

    def _scanned(
        self, query: Tensor, key: Tensor, values: Tensor, times: Tensor, gates: Tensor, layer: int, rows: StateRows
    ) -> Tensor:
        """query, key (T, state), values, time steps and gates (T, channels) → (T, channels). Leaves each sequence's
        state after its tokens."""
        states = rows.recurrent.states[layer].flatten(1, 2)
        if self._kernel is not None:
            return self._kernel(values, times, gates, key, query, rows.pieces, states)
        scanned = torch.empty_like(values)
        for row in rows.rows:
            own = slice(row.begin, row.end)
            taken = [each[own].float() for each in (query, key, values, times, gates)]
            scanned[own] = self._row(taken, states.flatten(0, 1), row)
        return scanned

    def _row(self, taken: Sequence[Tensor], states: Tensor, row: StateRow) -> Tensor:
        """`_scanned` of a row."""
        query, key, value, times, gates = taken
        times = F.softplus(times)
        before, after = states[row.before], states[row.after]
        found = scan(query, key, value * times, times[:, None], -self._rates, before, after)
        return found.addcmul_(value, self._skips).mul_(F.silu(gates))
