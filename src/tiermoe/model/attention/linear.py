"""Linear attention: the gated delta rule (Qwen3-Next, Qwen3.5; arXiv:2412.06464), and Kimi Delta Attention, whose key
columns decay each by itself (Kimi Linear, GLM-5 Next, Ling 3.0; arXiv:2510.26692). A state of fixed size stands for
keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.kernels.delta import DeltaGate, DeltaKernel, DeltaSizes
from tiermoe.model.attention.base import Attention, AttentionSizes
from tiermoe.model.attention.ngrams import NgramSizes
from tiermoe.model.cache.kv import LayerShape
from tiermoe.model.cache.recurrent import RecurrentStates, StateRow, StateRows, StateShape
from tiermoe.model.moe import ACTIVATIONS
from tiermoe.model.parts import Linear, RootMeanSquare
from tiermoe.model.step import Step
from tiermoe.model.weights import Scope
from tiermoe.types import Workload

_UNIT_EPSILON = 1e-6  # of queries' and keys' lengths, whatever the config says (transformers' code)
_CONVOLVED = 5  # a prompt's inputs of the convolution that live at once, in the model's dtype
_WIDE = 3  # and in float32
CHUNK = 64
"""Tokens of `delta_rule` that are computed at once."""
CHANNEL_CHUNK = 16
"""The same where each key column decays by itself: a pair of tokens has as many numbers."""
_CHUNK_TENSORS = 12  # of a chunk's keys or values that live at once, at the most
_CHUNK_PAIRS = 8  # of its pairs of tokens, of which differences of decays are float64

Projected = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of T tokens: queries, keys and values (T, channels), gates (T, values), betas (T, heads), decays (T, heads * decay
columns)."""


def is_linear(config: Any, index: int) -> bool:
    """Whether layer `index` has linear attention."""
    kinds = getattr(config, "layer_types", None)
    return kinds is not None and kinds[index] == "linear_attention"


def delta_sizes(config: Any) -> DeltaSizes:
    """Heads of a config's layers of linear attention."""
    return DeltaSizes(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim - 1,
    )


@dataclass(frozen=True, slots=True)
class LinearSizes(AttentionSizes):
    """The description of a `GatedDelta`."""

    heads: DeltaSizes
    ngrams: NgramSizes | None = None  # of the layer's n-gram features

    @property
    def shape(self) -> LayerShape:
        sizes, ngrams = self.heads, self.ngrams
        state = StateShape(
            sizes.kept, sizes.channels, sizes.heads, sizes.key_columns, sizes.value_columns,
            verified=sizes.channels + sizes.heads * (1 + sizes.decay_columns),
        )  # fmt: skip
        if ngrams is not None:
            state = replace(
                state,
                ngram_inputs=ngrams.kept,
                ngram_channels=ngrams.streams * ngrams.hidden,
                tokens=ngrams.longest - 1,
            )
        return LayerShape(0, 0, 0, state=state)

    @property
    def token_columns(self) -> int:
        """Half the columns that a token is projected to: they are there twice, queries of attention four times."""
        return (self.heads.channels + self.heads.values) // 2

    @property
    def taps_bytes(self) -> int:
        """Of the convolution's weights in the form that the native kernel takes."""
        return 2 * (self.heads.kept + 1) * self.heads.channels

    def prompt_bytes(self, load: Workload, dtype: torch.dtype) -> int:
        """The kernel's workspace, which decoding uses too; without the kernel inputs of the convolution and float32
        copies of them, and a chunk's workspace. With n-grams their features too."""
        sizes, ngrams = self.heads, 0 if self.ngrams is None else self.ngrams.nbytes(load)
        if sizes.suit(dtype):
            return ngrams + sizes.workspace
        tokens = min(load.chunk, load.context)
        copies = tokens * (sizes.channels + sizes.values) * (_CONVOLVED * load.itemsize + 4 * _WIDE)
        return ngrams + copies + delta_rule_bytes(sizes)


def gated_delta(w: Scope, config: Any, ngrams: NgramSizes | None = None) -> GatedDelta:
    """The linear attention with the weights of `w` ('linear_attn'), of Qwen3-Next, or of Qwen3.5, which has a matrix
    for each part of the projection. ngrams: of the layer's n-gram features."""
    sizes = delta_sizes(config)
    if w.has("in_proj_qkvz"):
        wide = w.linear("in_proj_qkvz", sizes.channels + sizes.values, w.hidden)
        projection: Projection = JoinedProjection.of(wide, w.linear("in_proj_ba", 2 * sizes.heads, w.hidden), sizes)
    else:
        projection = SplitProjection(
            w.linear("in_proj_qkv", sizes.channels, w.hidden),
            w.linear("in_proj_z", sizes.values, w.hidden),
            w.linear("in_proj_b", sizes.heads, w.hidden),
            w.linear("in_proj_a", sizes.heads, w.hidden),
        )
    return GatedDelta(
        LinearSizes(sizes, ngrams),
        projection,
        w.linear("out_proj", w.hidden, sizes.values),
        w.tensor("conv1d.weight", sizes.channels, 1, sizes.kept + 1),
        w.tensor("A_log", sizes.heads),
        w.tensor("dt_bias", sizes.heads),
        RootMeanSquare(w.tensor("norm.weight", sizes.value_columns), float(config.rms_norm_eps)),
        ACTIVATIONS[config.hidden_act],
        torch.sigmoid if getattr(config, "output_gate_type", None) == "sigmoid" else F.silu,
    )


class Projection(Protocol):
    """x (T, H) → `Projected`. batch_invariant: as of `Linear`."""

    @property
    def batch_invariant(self) -> bool: ...

    def __call__(self, x: Tensor) -> Projected: ...


@dataclass(frozen=True, slots=True)
class JoinedProjection:
    """Projection by two matrices whose rows are grouped by key heads (Qwen3-Next)."""

    wide: Linear  # hidden → of each key head a query, a key, values and gates
    narrow: Linear  # hidden → of each key head betas and decays
    order: Tensor  # columns of `wide` in the order of `Projected`
    narrow_order: Tensor  # the same of `narrow`
    sizes: DeltaSizes

    def __call__(self, x: Tensor) -> Projected:
        wide, narrow = self.wide(x)[:, self.order], self.narrow(x)[:, self.narrow_order]
        channels, heads = self.sizes.channels, self.sizes.heads
        return wide[:, :channels], wide[:, channels:], narrow[:, :heads], narrow[:, heads:]

    @property
    def batch_invariant(self) -> bool:
        return self.wide.batch_invariant and self.narrow.batch_invariant

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
    """Projection by a matrix for each part of `Projected` (Qwen3.5)."""

    mixed: Linear
    gates: Linear
    betas: Linear
    decays: Linear

    def __call__(self, x: Tensor) -> Projected:
        return self.mixed(x), self.gates(x), self.betas(x), self.decays(x)

    @property
    def batch_invariant(self) -> bool:
        return all(each.batch_invariant for each in (self.mixed, self.gates, self.betas, self.decays))


@lru_cache(maxsize=4)
def _by_parts(groups: int, parts: tuple[int, ...]) -> Tensor:
    """The order of grouped columns, each group with all `parts`, in which each part has all groups; all layers share
    the tensor."""
    columns = torch.arange(groups * sum(parts)).view(groups, -1)
    return torch.cat([part.flatten() for part in torch.split(columns, list(parts), dim=1)])


class GatedDelta(Attention):
    """Projections, a convolution over a token's last inputs, the gated delta rule, a norm with a gate, output
    projection.

    convolution (channels, 1, taps). decay_rates (heads): logarithms of the rates by which a head forgets (transformers'
    `A_log`); decay_biases (heads * decay columns). activation: of the convolution, gate_activation: of the norm's gate;
    both `silu` if the native kernel is to compute them, or the gate's `sigmoid` with `rounded_once`. rounded_once:
    the gated norm is float32 up to its end (Kimi). least_decay: the least logarithm of a decay, which is a sigmoid's
    share of it (GLM-5 Next); None: it has no bound, and is a softplus's."""

    def __init__(
        self,
        sizes: LinearSizes,
        projection: Projection,
        output: Linear,
        convolution: Tensor,
        decay_rates: Tensor,
        decay_biases: Tensor,
        norm: RootMeanSquare,
        activation: Callable[[Tensor], Tensor],
        gate_activation: Callable[[Tensor], Tensor] = F.silu,
        rounded_once: bool = False,
        least_decay: float | None = None,
    ) -> None:
        self.sizes, self._rounded_once, self._least_decay = sizes, rounded_once, least_decay
        self._gate_activation = gate_activation
        self._projection, self._output, self._heads = projection, output, sizes.heads
        self._convolution, self._norm, self._activation = convolution, norm, activation
        self._rates = decay_rates.float().exp()
        self._biases = decay_biases.float()
        self._kernel: DeltaKernel | None = None
        gate = _GATES.get((gate_activation, rounded_once))
        values = not convolution.is_meta  # a plan has shapes alone
        if values and self._heads.suit(convolution.dtype) and activation is F.silu and gate is not None:
            taps = convolution[:, 0].t().contiguous()
            self._kernel = DeltaKernel(
                self._heads, taps, self._rates, self._biases, norm.weight, norm.epsilon, gate, least_decay
            )

    def __call__(self, x: Tensor, layer: int, step: Step) -> Tensor:
        rows, projected = step.states, self._projection(x)
        assert rows is not None
        if self._kernel is not None:
            mixed, _, betas, decays = projected
            rows.recurrent.keep(layer, rows, self._replay, mixed, betas, decays)
            return self._output(self._by_kernel(projected, layer, rows))
        attended = torch.empty_like(projected[1])
        for row in rows.rows:
            tokens = slice(row.begin, row.end)
            mixed, gates, betas, decays = (each[tokens] for each in projected)
            mixed = self._mixed(mixed, rows.recurrent, layer, row)
            attended_row = self._attended(mixed, betas, decays, rows.recurrent, layer, row)
            attended[tokens] = self._gated(attended_row.to(x.dtype), gates)
        return self._output(attended)

    @property
    def batch_invariant(self) -> bool:
        parts = (self._projection, self._output)
        return self._kernel is not None and all(part.batch_invariant for part in parts)

    @property
    def chunk_invariant(self) -> bool:
        return self._kernel is not None

    def _by_kernel(self, projected: Projected, layer: int, rows: StateRows) -> Tensor:
        assert self._kernel is not None
        return self._kernel(projected, rows.pieces, rows.recurrent.inputs[layer], rows.recurrent.states[layer])

    def _replay(self, kept: Tensor, layer: int, rows: StateRows) -> None:
        """`cache.recurrent.Replay`. The tokens' gates are not kept: only their outputs depend on them."""
        sizes = self._heads
        columns = [sizes.channels, sizes.heads, sizes.heads * sizes.decay_columns]
        mixed, betas, decays = torch.split(kept, columns, dim=1)
        self._by_kernel((mixed, mixed[:, : sizes.values], betas, decays), layer, rows)

    def _mixed(self, mixed: Tensor, recurrent: RecurrentStates, layer: int, row: StateRow) -> Tensor:
        """A row's inputs (T, channels) after the convolution; the last inputs are kept as the new state's."""
        whole = row.append(recurrent.inputs[layer].flatten(0, 1), mixed)
        convolved = F.conv1d(whole.t()[None], self._convolution, groups=self._heads.channels)
        return self._activation(convolved[0]).t()

    def _attended(
        self,
        mixed: Tensor,
        betas: Tensor,
        decays: Tensor,
        recurrent: RecurrentStates,
        layer: int,
        row: StateRow,
    ) -> Tensor:
        """The outputs of a row's tokens, float32 (T, heads, value columns); the state after them is left in its
        place."""
        sizes = self._heads
        keys = sizes.key_heads * sizes.key_columns
        query, key, value = torch.split(mixed.float(), [keys, keys, sizes.values], dim=1)
        query, key = (
            _unit(each.view(-1, sizes.key_heads, sizes.key_columns)).repeat_interleave(
                sizes.heads // sizes.key_heads, dim=1
            )
            for each in (query, key)
        )
        rates, steps = self._rates[:, None], (decays.float() + self._biases).view(len(mixed), sizes.heads, -1)
        bound = self._least_decay
        decay = -rates * F.softplus(steps) if bound is None else bound * torch.sigmoid(rates * steps)
        states = recurrent.states[layer].flatten(0, 1)
        state = states[row.after]
        state.copy_(states[row.before])
        value = value.reshape(-1, sizes.heads, sizes.value_columns)
        return delta_rule(query * sizes.key_columns**-0.5, key, value, decay, betas.sigmoid().float(), state)

    def _gated(self, attended: Tensor, gates: Tensor) -> Tensor:
        """(T, heads, value columns), normed and multiplied with the activation of gates (T, values) → (T, values)."""
        normed = self._norm(attended.float() if self._rounded_once else attended.contiguous()).flatten(1)
        return (normed * self._gate_activation(gates.float())).to(gates.dtype)


_GATES = {(F.silu, False): DeltaGate.SILU, (torch.sigmoid, True): DeltaGate.SIGMOID}
"""Gate's activation, whether it is rounded once → the native kernel's."""


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _UNIT_EPSILON)


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The gated delta rule by torch's operations (the recurrence of native/delta.h), a chunk of tokens at a time.
    Within a chunk all tokens are computed at once: what each adds to the state follows from those before it by a
    triangular system (arXiv:2412.06464, section 3.3; arXiv:2510.26692, section 3.1), so that the state is read and
    written once a chunk.

    query, key (T, heads, key columns), of length one but for query's scale; value (T, heads, value columns); decay
    (T, heads, 1 or key columns), its logarithm; beta (T, heads); state (heads, key columns, value columns), which is
    replaced by the one after the tokens; all float32 → (T, heads, value columns)."""
    result = torch.empty_like(value)
    size = CHUNK if decay.shape[-1] == 1 else CHANNEL_CHUNK
    for begin in range(0, len(value), size):
        some = slice(begin, begin + size)
        chunk = [each[some].transpose(0, 1) for each in (query, key, value, decay, beta)]
        result[some] = _chunk(chunk, state).transpose(0, 1)
    return result


def delta_rule_bytes(sizes: DeltaSizes) -> int:
    """The most bytes that `delta_rule` takes beside its arguments and its result."""
    tokens = CHANNEL_CHUNK if sizes.by_channel else CHUNK
    columns, state = sizes.key_columns + sizes.value_columns, sizes.key_columns * sizes.value_columns
    pairs = _CHUNK_PAIRS * tokens * sizes.decay_columns
    return 4 * sizes.heads * (tokens * (_CHUNK_TENSORS * columns + pairs) + 2 * state)


def _chunk(chunk: list[Tensor], state: Tensor) -> Tensor:
    """`delta_rule` of a chunk's query, key, value, decay and beta, (heads, T, ..) each. Sums of decays are float64:
    what is computed of them is their differences, of which float32 leaves few digits where a token has made a head
    forget."""
    query, key, value, decay, beta = chunk
    gone = decay.double().cumsum(1)  # logarithm of what has decayed since the chunk began
    weighed = key * beta[..., None]
    system, scores = _decayed_products(weighed, query, key, gone)
    since = gone.float().exp()
    known = torch.cat((value * beta[..., None], weighed * since), dim=-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    added, read = solved[..., : value.shape[-1]], solved[..., value.shape[-1] :]
    added = added - read @ state
    result: Tensor = (query * since) @ state + scores @ added
    left = (gone[:, -1:] - gone).float().exp()
    state.mul_(since[:, -1:].transpose(1, 2)).add_((key * left).transpose(1, 2) @ added)
    return result


def _decayed_products(weighed: Tensor, query: Tensor, key: Tensor, gone: Tensor) -> tuple[Tensor, Tensor]:
    """Products of `weighed` and of `query` with the keys (heads, T, key columns) of the tokens up to their own, as far
    as these have not decayed since: (heads, T, T) each; gone as in `_chunk`."""
    later = torch.ones(gone.shape[1], gone.shape[1], dtype=torch.bool, device=gone.device).triu(1)
    pairs = (gone[:, :, None] - gone[:, None]).float().masked_fill_(later[..., None], float("-inf")).exp_()
    if pairs.shape[-1] == 1:
        return (weighed @ key.transpose(1, 2)) * pairs[..., 0], (query @ key.transpose(1, 2)) * pairs[..., 0]
    system, scores = (pairs.mul_(key[:, None]) @ torch.stack((weighed, query), dim=-1)).unbind(-1)
    return system, scores


@dataclass(frozen=True, slots=True)
class KimiDeltaSizes(LinearSizes):
    """The description of a `GatedDelta` by Kimi's projections. Heads share no keys, and narrow matrices lead to gates
    and decays: of as many columns as a head has."""

    @classmethod
    def of(cls, config: Any) -> KimiDeltaSizes:
        """Of each layer of linear attention."""
        heads, columns = config.linear_num_heads, config.linear_head_dim
        return cls(DeltaSizes(heads, heads, columns, columns, config.linear_conv_kernel_dim - 1, by_channel=True))

    @property
    def token_columns(self) -> int:
        """Half the columns that a token is projected to, decays among them."""
        return (self.heads.channels + 2 * self.heads.values) // 2


def kimi_delta(w: Scope, config: Any) -> GatedDelta:
    """The linear attention with the weights of `w` ('self_attn')."""
    sizes, forget = KimiDeltaSizes.of(config).heads, w.at("forget_gate")
    columns = sizes.key_columns
    query, key, value = (w.linear(f"{name}_proj", sizes.values, w.hidden) for name in "qkv")
    return GatedDelta(
        KimiDeltaSizes(sizes),
        KimiProjection(
            (query, key, value),
            _narrowing(w, "g", sizes.values, columns),
            w.linear("b_proj", sizes.heads, w.hidden),
            _narrowing(forget, "f", sizes.values, columns),
        ),
        w.linear("o_proj", w.hidden, sizes.values),
        # transformers widens that of GLM-5 Next
        w.tensor("conv1d.weight", sizes.channels, 1, sizes.kept + 1).to(w.dtype),
        forget.flat("A_log", sizes.heads),
        forget.tensor("dt_bias", sizes.values),
        RootMeanSquare(w.tensor("o_norm.weight", columns), w.epsilon),
        ACTIVATIONS[config.hidden_act],
        torch.sigmoid,
        rounded_once=True,
        least_decay=_least_decay(config),
    )


def _narrowing(w: Scope, name: str, values: int, columns: int) -> tuple[Linear, ...]:
    """The matrices that lead to gates or decays: a narrow one before a wide one, or one alone (Ling 3.0)."""
    if w.has(f"{name}_proj"):
        return (w.linear(f"{name}_proj", values, w.hidden),)
    return w.linear(f"{name}_a_proj", columns, w.hidden), w.linear(f"{name}_b_proj", values, columns)


def _least_decay(config: Any) -> float | None:
    """Of `GatedDelta`: GLM-5 Next's, or Ling 3.0's, which a switch may take away; Kimi Linear has none."""
    bound = config.kda_lower_bound if getattr(config, "kda_safe_gate", False) else None
    return getattr(config, "linear_lower_bound", bound)


@dataclass(frozen=True, slots=True)
class KimiProjection:
    """Projection of hidden states to `Projected`."""

    mixed: tuple[Linear, Linear, Linear]  # hidden → queries, keys, values
    gates: tuple[Linear, ...]  # hidden → gates, one after the other
    betas: Linear
    decays: tuple[Linear, ...]  # hidden → decays, one after the other

    def __call__(self, x: Tensor) -> Projected:
        gates, decays = (reduce(lambda given, matrix: matrix(given), path, x) for path in (self.gates, self.decays))
        return torch.cat([each(x) for each in self.mixed], dim=1), gates, self.betas(x), decays

    @property
    def batch_invariant(self) -> bool:
        return all(each.batch_invariant for each in (*self.mixed, *self.gates, self.betas, *self.decays))
