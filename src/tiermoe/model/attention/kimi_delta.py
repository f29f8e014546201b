"""Kimi Delta Attention (Kimi Linear, GLM-5 Next, Ling 3.0; arXiv:2510.26692): linear attention whose key columns decay
each by itself, at a rate that each token chooses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from tiermoe.kernels.delta import DeltaSizes
from tiermoe.model.architecture import FamilyWeights
from tiermoe.model.attention.linear import GatedDelta, LinearSizes, Projected
from tiermoe.model.linear import Linear
from tiermoe.model.moe import ACTIVATIONS
from tiermoe.model.norms import RootMeanSquare


@dataclass(frozen=True, slots=True)
class KimiDeltaSizes(LinearSizes):
    """The description of a `GatedDelta` by Kimi's projections. Heads share no keys, and narrow matrices lead to gates
    and decays: of as many columns as a head has."""

    @classmethod
    def of(cls, config: Any, index: int) -> KimiDeltaSizes:
        """Of each layer of linear attention."""
        heads, columns = config.linear_num_heads, config.linear_head_dim
        return cls(DeltaSizes(heads, heads, columns, columns, config.linear_conv_kernel_dim - 1, by_channel=True))

    @property
    def token_columns(self) -> int:
        """Half the columns that a token is projected to, decays among them."""
        return (self.heads.channels + 2 * self.heads.values) // 2

    def weight_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Path in a layer → shape of the weights."""
        sizes, columns = self.heads, self.heads.key_columns
        return {
            **{f"self_attn.{name}_proj.weight": (sizes.values, hidden) for name in "qkv"},
            "self_attn.conv1d.weight": (sizes.channels, 1, sizes.kept + 1),
            "self_attn.forget_gate.f_a_proj.weight": (columns, hidden),
            "self_attn.forget_gate.f_b_proj.weight": (sizes.values, columns),
            "self_attn.forget_gate.dt_bias": (sizes.values,),
            "self_attn.forget_gate.A_log": (1, 1, sizes.heads, 1),
            "self_attn.b_proj.weight": (sizes.heads, hidden),
            "self_attn.g_a_proj.weight": (columns, hidden),
            "self_attn.g_b_proj.weight": (sizes.values, columns),
            "self_attn.o_norm.weight": (columns,),
            "self_attn.o_proj.weight": (hidden, sizes.values),
        }

    def block(self, weights: FamilyWeights, layer: str) -> GatedDelta:
        part, forget = f"{layer}.self_attn", f"{layer}.self_attn.forget_gate"
        query, key, value, betas = (weights.linear(f"{part}.{name}_proj") for name in "qkvb")
        return GatedDelta(
            self,
            KimiProjection(
                (query, key, value), _narrowing(weights, f"{part}.g"), betas, _narrowing(weights, f"{forget}.f")
            ),
            weights.linear(f"{part}.o_proj"),
            weights.tensor(f"{part}.conv1d.weight").to(weights.dtype),  # transformers widens that of GLM-5 Next
            weights.tensor(f"{forget}.A_log").flatten(),
            weights.tensor(f"{forget}.dt_bias"),
            RootMeanSquare(weights.tensor(f"{part}.o_norm.weight"), weights.epsilon),
            ACTIVATIONS[weights.config.hidden_act],
            torch.sigmoid,
            rounded_once=True,
            least_decay=_least_decay(weights.config),
        )


def _narrowing(weights: FamilyWeights, path: str) -> tuple[Linear, ...]:
    """The matrices that lead to gates or decays: a narrow one before a wide one, or one alone (Ling 3.0)."""
    names = ("_proj",) if weights.has(f"{path}_proj") else ("_a_proj", "_b_proj")
    return tuple(weights.linear(f"{path}{name}") for name in names)


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
