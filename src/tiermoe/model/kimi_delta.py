"""Kimi Delta Attention (Kimi Linear, GLM-5 Next; arXiv:2510.26692): linear attention whose key columns decay each by
itself, at a rate that each token chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiermoe.kernels.delta import DeltaSizes
from tiermoe.model.architecture import FamilyWeights
from tiermoe.model.feed_forward import ACTIVATIONS
from tiermoe.model.linear import Linear
from tiermoe.model.linear_attention import GatedDelta, LinearSizes, Projected
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
        query, key, value, betas, gates, gates_up = (
            weights.linear(f"{part}.{name}_proj") for name in ("q", "k", "v", "b", "g_a", "g_b")
        )
        decays, decays_up = (weights.linear(f"{forget}.f_{name}_proj") for name in "ab")
        return GatedDelta(
            self,
            KimiProjection((query, key, value), (gates, gates_up), betas, (decays, decays_up)),
            weights.linear(f"{part}.o_proj"),
            weights.tensor(f"{part}.conv1d.weight").to(weights.dtype),  # transformers widens that of GLM-5 Next
            weights.tensor(f"{forget}.A_log").flatten(),
            weights.tensor(f"{forget}.dt_bias"),
            RootMeanSquare(weights.tensor(f"{part}.o_norm.weight"), weights.epsilon),
            ACTIVATIONS[weights.config.hidden_act],
            torch.sigmoid,
            rounded_once=True,
            least_decay=getattr(weights.config, "linear_lower_bound", None),
        )


@dataclass(frozen=True, slots=True)
class KimiProjection:
    """Projection of hidden states to `Projected`."""

    mixed: tuple[Linear, Linear, Linear]  # hidden → queries, keys, values
    gates: tuple[Linear, Linear]  # hidden → narrow → gates
    betas: Linear
    decays: tuple[Linear, Linear]  # hidden → narrow → decays

    def __call__(self, x: Tensor) -> Projected:
        """x (T, H) → `Projected`."""
        gates, decays = (wide(narrow(x)) for narrow, wide in (self.gates, self.decays))
        return torch.cat([each(x) for each in self.mixed], dim=1), gates, self.betas(x), decays
