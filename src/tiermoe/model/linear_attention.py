"""Layers of linear attention from a config and weights: sizes, and the block."""

from __future__ import annotations

from typing import Any

from tiermoe.kernels.native.delta import DeltaSizes
from tiermoe.model.delta import GatedDelta, JoinedProjection, SplitProjection
from tiermoe.model.feed_forward import ACTIVATIONS
from tiermoe.model.norms import RootMeanSquare
from tiermoe.model.weights import Weights


def is_linear(config: Any, index: int) -> bool:
    """Whether layer `index` has linear attention."""
    kinds = getattr(config, "layer_types", None)
    return kinds is not None and kinds[index] == "linear_attention"


def delta_sizes(config: Any) -> DeltaSizes:
    """Of each layer of linear attention."""
    return DeltaSizes(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim - 1,
    )


def gated_delta(config: Any, weights: Weights, part: str) -> GatedDelta:
    """The block whose weights lie under the path `part`: of Qwen3-Next, or of Qwen3.5, which has a matrix for each part
    of the projection."""
    sizes = delta_sizes(config)
    if weights.has(f"{part}.in_proj_qkvz"):
        wide, narrow = (weights.linear(f"{part}.in_proj_{name}") for name in ("qkvz", "ba"))
        projection: JoinedProjection | SplitProjection = JoinedProjection.of(wide, narrow, sizes)
    else:
        projection = SplitProjection(*(weights.linear(f"{part}.in_proj_{name}") for name in ("qkv", "z", "b", "a")))
    return GatedDelta(
        projection,
        weights.linear(f"{part}.out_proj"),
        sizes,
        weights.tensor(f"{part}.conv1d.weight"),
        weights.tensor(f"{part}.A_log"),
        weights.tensor(f"{part}.dt_bias"),
        RootMeanSquare(weights.tensor(f"{part}.norm.weight"), float(config.rms_norm_eps)),
        ACTIVATIONS[config.hidden_act],
    )
