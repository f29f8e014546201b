"""Kimi Delta Attention (Kimi Linear, GLM-5 Next, Ling 3.0; arXiv:2510.26692): linear attention whose key columns decay
each by itself, at a rate that each token chooses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from tiermoe.kernels.delta import DeltaSizes
from tiermoe.model.attention.linear import GatedDelta, LinearSizes, Projected
from tiermoe.model.linear import Linear
from tiermoe.model.moe import ACTIVATIONS
from tiermoe.model.norms import RootMeanSquare
from tiermoe.model.weights import Scope


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
        """x (T, H) → `Projected`."""
        gates, decays = (reduce(lambda given, matrix: matrix(given), path, x) for path in (self.gates, self.decays))
        return torch.cat([each(x) for each in self.mixed], dim=1), gates, self.betas(x), decays

    @property
    def batch_invariant(self) -> bool:
        return all(each.batch_invariant for each in (*self.mixed, *self.gates, self.betas, *self.decays))
