"""Mamba-1 in the place of attention (Jamba; arXiv:2312.00752): each channel has a state of its own, whose columns decay
at rates of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.model.architecture import Architecture, FamilyWeights
from tiermoe.model.attention.base import Attention, AttentionSizes
from tiermoe.model.attention.convolution import CausalConvolution
from tiermoe.model.attention.mamba import MambaSizes
from tiermoe.model.cache.kv import LayerShape
from tiermoe.model.cache.recurrent import StateRows, StateShape
from tiermoe.model.linear import Linear
from tiermoe.model.norms import Norm
from tiermoe.model.step import Step
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

    @classmethod
    def of(cls, config: Any, names: Sequence[str]) -> Mamba1Sizes:
        """names: the config's, in the order of the fields; the first one is by how much channels are more than hidden
        columns, the third one of the convolution's taps."""
        wider, state, taps, rank = (int(getattr(config, name)) for name in names)
        return cls(wider * config.hidden_size, state, taps - 1, rank)

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

    def weight_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Path in a block → shape of the weights."""
        return {
            "in_proj.weight": (2 * self.channels, hidden),
            "conv1d.weight": (self.channels, 1, self.kept + 1),
            "conv1d.bias": (self.channels,),
            "x_proj.weight": (self.selected, self.channels),
            "dt_layernorm.weight": (self.rank,),
            "b_layernorm.weight": (self.state,),
            "c_layernorm.weight": (self.state,),
            "dt_proj.weight": (self.channels, self.rank),
            "dt_proj.bias": (self.channels,),
            "A_log": (self.channels, self.state),
            "D": (self.channels,),
            "out_proj.weight": (hidden, self.channels),
        }

    def block(self, weights: FamilyWeights, layer: str) -> Mamba1:
        part = f"{layer}.{weights.architecture.named('mamba')}"
        input_, selection, times, output = (weights.linear(f"{part}.{name}_proj") for name in ("in", "x", "dt", "out"))
        time_norm, key_norm, query_norm = (weights.norm(f"{part}.{name}_layernorm") for name in ("dt", "b", "c"))
        return Mamba1(
            self,
            input_,
            CausalConvolution(weights.tensor(f"{part}.conv1d.weight"), weights.optional_tensor(f"{part}.conv1d.bias")),
            selection,
            (time_norm, key_norm, query_norm),
            times,
            weights.tensor(f"{part}.A_log"),
            weights.tensor(f"{part}.D"),
            output,
        )


def mamba_sizes_of(architecture: Architecture, config: Any) -> MambaSizes | Mamba1Sizes:
    """The description of a config's layers of Mamba, of the kind that the family has."""
    return (Mamba1Sizes if architecture.mamba_1 else MambaSizes).of(config, architecture.mamba)


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
