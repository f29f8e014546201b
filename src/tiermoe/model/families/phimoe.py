"""Phi-MoE: grouped attention, layer norms, and a router that chooses two experts by sparse mixing."""

from __future__ import annotations

from typing import Any

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.families.family import Family
from tiermoe.model.families.gguf import LONG_FACTORS, Config, Gguf, block_names, divisors, grouped_fields
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import NormKind, Scope

_SCALE = 1.243163121016122
"""Of the rotary embedding (`short_mscale` and `long_mscale` of Phi-3.5-MoE). No entry of the file has it:
`rope.scaling.attn_factor` is what the paper suggests, 1.19."""
_USED = 2  # experts of a token that Phi's router chooses


class PhiMoe(Family):
    name, model_type = "Phi-MoE", "phimoe"
    gguf = Gguf(("phimoe",), block_names(router="router"), apart=LONG_FACTORS)
    normalised = False
    on_gpu = True
    norms = NormKind(layer=True)

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        rule = RouterRule(_USED, scores="sparsemixer", jitter=float(config.router_jitter_noise))
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, window=config.sliding_window),
            w.norm("post_attention_layernorm"),
            moe(w.at("mlp"), rule, config.num_local_experts, config.intermediate_size, router="router"),
        )

    def config(self, file: GgufFile) -> Config:
        config = grouped_fields(file)
        if config["num_experts_per_tok"] != _USED:
            raise file.refusal(
                f"says that a token uses {config['num_experts_per_tok']} experts, and Phi-MoE's routers choose {_USED}"
            )
        return {
            **config,
            "num_local_experts": file.experts,
            "intermediate_size": file.expert_columns,
            "sliding_window": file.count("attention.sliding_window", 0) or None,
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
            "lm_head_bias": "output.bias" in file.tensors,
            "rope_parameters": _scaled(file, config["rope_parameters"], config["head_dim"]),
        }


def _scaled(file: GgufFile, rope: dict[str, Any], columns: int) -> dict[str, Any]:
    """`rope` with the scaling that the file's factors are. ModelError where one of two is missing."""
    short, long = (divisors(file, name, columns) for name in LONG_FACTORS)
    if short is None and long is None:
        return rope
    if short is None or long is None:
        raise file.refusal(f"has one of {' and '.join(LONG_FACTORS)}, and Phi-MoE both or none")
    return {
        **rope,
        "rope_type": "longrope",
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "original_max_position_embeddings": file.count("rope.scaling.original_context_length", least=1),
        "short_mscale": _SCALE,
        "long_mscale": _SCALE,
    }
