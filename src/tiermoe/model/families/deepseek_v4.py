"""DeepSeek-V4: attention over a window and over compressed positions, layers of residual streams, a router whose
experts follow from the token in some layers, a limited gate."""

from __future__ import annotations

from typing import Any

from collections.abc import Callable

from torch import Tensor

from tiermoe.kernels.gates import LimitedSilu
from tiermoe.model.attention.compressed import compressed
from tiermoe.model.families.deepseek_v3 import CORRECTION
from tiermoe.model.families.family import LatentFamily
from tiermoe.model.moe import dense, moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.streams import StreamLayer, balanced, balanced_mixer
from tiermoe.model.weights import NormKind, Scope


class DeepSeekV4(LatentFamily):
    name, model_type = "DeepSeek-V4", "deepseek_v4"
    latent_kv = False
    hash_table = "tid2eid"
    normalised = True
    in_streams = True
    norms = NormKind(late=True)

    def layer(self, w: Scope, config: Any, index: int) -> StreamLayer:
        part, inner = w.at("mlp"), config.moe_intermediate_size
        rule = RouterRule(
            config.num_experts_per_tok,
            scores=config.scoring_func,
            normalise=True,
            epsilon=1e-20,
            scale=float(config.routed_scaling_factor),
        )
        shared = dense(part.at("shared_experts"), config.n_shared_experts * inner, limited_silu(config))
        return StreamLayer(
            balanced(w.at("attn_hc"), config, w.norm("input_layernorm")),
            compressed(w.at("self_attn"), config, index),
            balanced(w.at("ffn_hc"), config, w.norm("post_attention_layernorm")),
            moe(
                part,
                rule,
                config.n_routed_experts,
                inner,
                correction=CORRECTION,
                shared=shared,
                table="gate.tid2eid",
            ),
        )

    def lacks(self, config: Any) -> str:
        known = config.scoring_func in ("sqrtsoftplus", "sigmoid")
        return "" if known else f"routers that score by '{config.scoring_func}'"

    def end(self, w: Scope, config: Any) -> Callable[[Tensor], Tensor]:
        return balanced_mixer(w.at("model.hc_head"), config, w.norm("model.norm"))


def limited_silu(config: Any) -> Callable[..., Tensor]:
    """What is between the matrices of dense blocks."""
    return LimitedSilu(float(config.swiglu_limit)).of
