"""Linear attention by the gated delta rule (Qwen3-Next, Qwen3.5): a state of fixed size in the place of keys and
values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.kernels.native.delta import DeltaKernel, DeltaSizes
from tiermoe.model import delta_rule
from tiermoe.model.kv_cache import LayerShape
from tiermoe.model.linear import Linear
from tiermoe.model.norms import RootMeanSquare
from tiermoe.model.recurrent_states import RecurrentStates, StateShape
from tiermoe.model.step import Step
from tiermoe.types import Workload

_UNIT_EPSILON = 1e-6  # of queries' and keys' lengths, whatever the config says (transformers' code)
_CONVOLVED = 5  # a prompt's inputs of the convolution that live at once, in the model's dtype
_WIDE = 3  # and in float32

Projected = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of T tokens: queries, keys and values (T, channels), gates (T, values), betas (T, heads), decays (T, heads)."""


@dataclass(frozen=True, slots=True)
class LinearSizes:
    """What a `GatedDelta` asks memory for, known from a config."""

    heads: DeltaSizes

    @property
    def shape(self) -> LayerShape:
        its = self.heads
        return LayerShape(
            0, 0, 0, state=StateShape(its.kept, its.channels, its.heads, its.key_columns, its.value_columns)
        )

    @property
    def token_columns(self) -> int:
        """Half the columns of what a token is projected to: it is there twice, queries of attention are four times."""
        return (self.heads.channels + self.heads.values) // 2

    @property
    def rotary_columns(self) -> int:
        """Nothing is turned."""
        return 0

    @property
    def taps_bytes(self) -> int:
        """Of the convolution's weights in the form that the native kernel takes."""
        return 2 * (self.heads.kept + 1) * self.heads.channels

    def prompt_bytes(self, load: Workload, dtype: torch.dtype) -> int:
        """Of one sequence, beside what it is projected to: the kernel's workspace; without the kernel inputs of the
        convolution and float32 copies of them, and a chunk's workspace."""
        its = self.heads
        if its.suit(dtype):
            return its.workspace
        tokens = min(load.chunk, load.context)
        copies = tokens * (its.channels + its.values) * (_CONVOLVED * load.itemsize + 4 * _WIDE)
        return copies + delta_rule.workspace_bytes(its.heads, its.key_columns, its.value_columns)

    def few_tokens_bytes(self, tokens: int, positions: int, threads: int, hidden: int) -> int:
        """Nothing: the native kernel's workspace is that of prompts."""
        return 0


@dataclass(frozen=True, slots=True)
class JoinedProjection:
    """Two matrices, whose rows are grouped by key heads (Qwen3-Next). wide: hidden → of each key head a query, a key,
    values and gates; narrow: hidden → betas and decays. order, narrow_order: of their columns, to those of
    `Projected`."""

    wide: Linear
    narrow: Linear
    order: Tensor
    narrow_order: Tensor
    sizes: DeltaSizes

    def __call__(self, x: Tensor) -> Projected:
        """x (T, H) → `Projected`."""
        wide, narrow = self.wide(x)[:, self.order], self.narrow(x)[:, self.narrow_order]
        channels, heads = self.sizes.channels, self.sizes.heads
        return wide[:, :channels], wide[:, channels:], narrow[:, :heads], narrow[:, heads:]

    @classmethod
    def of(cls, wide: Linear, narrow: Linear, sizes: DeltaSizes) -> JoinedProjection:
        """With the orders that follow from the sizes."""
        shared = sizes.heads // sizes.key_heads
        key, values = sizes.key_columns, shared * sizes.value_columns
        return cls(
            wide,
            narrow,
            _by_parts(sizes.key_heads, (key, key, values, values)),
            _by_parts(sizes.key_heads, (shared, shared)),
            sizes,
        )


@dataclass(frozen=True, slots=True)
class SplitProjection:
    """A matrix for each part of `Projected` (Qwen3.5)."""

    mixed: Linear
    gates: Linear
    betas: Linear
    decays: Linear

    def __call__(self, x: Tensor) -> Projected:
        """x (T, H) → `Projected`."""
        return self.mixed(x), self.gates(x), self.betas(x), self.decays(x)


@lru_cache(maxsize=4)
def _by_parts(groups: int, parts: tuple[int, ...]) -> Tensor:
    """Of columns that are grouped, each group with all `parts`, the order in which each part has all groups; all layers
    share it."""
    columns = torch.arange(groups * sum(parts)).view(groups, -1)
    return torch.cat([part.flatten() for part in torch.split(columns, list(parts), dim=1)])


class GatedDelta:
    """Projections, a convolution over a token's last inputs, the gated delta rule, a norm with a gate, output
    projection.

    convolution (channels, 1, taps). decay_rates (heads): logarithms of the rates by which a head forgets (transformers'
    `A_log`); decay_biases (heads). activation: of the convolution, `silu` where the native kernel is to compute it."""

    def __init__(
        self,
        projection: JoinedProjection | SplitProjection,
        output: Linear,
        sizes: DeltaSizes,
        convolution: Tensor,
        decay_rates: Tensor,
        decay_biases: Tensor,
        norm: RootMeanSquare,
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        self.shape = LinearSizes(sizes).shape
        self._projection, self._output, self._sizes = projection, output, sizes
        self._convolution, self._norm, self._activation = convolution, norm, activation
        self._rates = decay_rates.float().exp()
        self._biases = decay_biases.float()
        self._kernel: DeltaKernel | None = None
        if sizes.suit(convolution.dtype) and activation is F.silu:
            taps = convolution[:, 0].t().contiguous()
            self._kernel = DeltaKernel(sizes, taps, self._rates, self._biases, norm.weight, norm.epsilon)

    def __call__(self, x: Tensor, layer: int, step: Step) -> Tensor:
        """x (T, H), normed → (T, H). Leaves each sequence's state after its tokens in the step's cache."""
        kept, projected = step.cache.recurrent, self._projection(x)
        assert kept is not None
        if self._kernel is not None:
            return self._output(self._kernel(projected, step.pieces, kept.inputs[layer], kept.states[layer]))
        attended = torch.empty_like(projected[1])
        for span, places in zip(step.spans, step.states, strict=True):
            some = slice(span.begin, span.end)
            mixed, gates, betas, decays = (each[some] for each in projected)
            found = self._attended(self._mixed(mixed, kept, layer, places), betas, decays, kept, layer, places)
            attended[some] = self._gated(found.to(x.dtype), gates)
        return self._output(attended)

    def _mixed(self, mixed: Tensor, kept: RecurrentStates, layer: int, places: tuple[int, int]) -> Tensor:
        """A row's inputs (T, channels) after the convolution; keeps the last of them."""
        inputs = kept.inputs[layer].flatten(0, 1)
        whole = torch.cat((inputs[places[0]], mixed))
        inputs[places[1]] = whole[len(mixed) :]
        convolved = F.conv1d(whole.t()[None], self._convolution, groups=self._sizes.channels)
        return self._activation(convolved[0]).t()

    def _attended(
        self,
        mixed: Tensor,
        betas: Tensor,
        decays: Tensor,
        kept: RecurrentStates,
        layer: int,
        places: tuple[int, int],
    ) -> Tensor:
        """What a row's tokens read from its state, float32 (T, heads, value columns); leaves the state after them."""
        its = self._sizes
        keys = its.key_heads * its.key_columns
        query, key, value = torch.split(mixed.float(), [keys, keys, its.values], dim=1)
        query, key = (
            _unit(each.view(-1, its.key_heads, its.key_columns)).repeat_interleave(its.heads // its.key_heads, dim=1)
            for each in (query, key)
        )
        decay = -self._rates * F.softplus(decays.float() + self._biases)
        states = kept.states[layer].flatten(0, 1)
        state = states[places[1]]
        state.copy_(states[places[0]])
        value = value.reshape(-1, its.heads, its.value_columns)
        return delta_rule.delta_rule(query * its.key_columns**-0.5, key, value, decay, betas.sigmoid().float(), state)

    def _gated(self, attended: Tensor, gates: Tensor) -> Tensor:
        """(T, heads, value columns), normed and multiplied with silu of gates (T, values) → (T, values)."""
        normed = self._norm(attended.contiguous()).flatten(1)
        return (normed * F.silu(gates.float())).to(normed.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _UNIT_EPSILON)
