"""gpt-oss: grouped attention with sinks, a window in every other layer, a router that weighs the chosen experts alone,
experts with biases and a clamped gate."""

from __future__ import annotations

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.kernels.gates import Gate, gate_named
from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.families.family import Family
from tiermoe.model.families.gguf import LATE_NORM, SINKS, Config, Gguf, block_names, grouped_fields
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import NormKind, Scope

_ALPHA = 1.702  # GptOssExperts


class GptOss(Family):
    name, model_type = "gpt-oss", "gpt_oss"
    gguf = Gguf(("gpt-oss",), block_names(router="router") | LATE_NORM | SINKS)
    normalised = on_gpu = True
    norms = NormKind(late=True, by_kernel=False)  # a prompt keeps the bits of torch's operations

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        rule = RouterRule(config.num_experts_per_tok, scores="chosen")
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, window=window_at(config, index), sinks=True),
            w.norm("post_attention_layernorm"),
            moe(w.at("mlp"), rule, config.num_local_experts, config.intermediate_size, router="router", biased=True),
        )

    def gate(self, config: ModelConfig) -> Gate:
        return gate_named("clamped in halves", config.swiglu_limit, _ALPHA)

    def config(self, file: GgufFile) -> Config:
        config = grouped_fields(file)
        if config["rope_parameters"]["rope_type"] == "yarn":
            config["rope_parameters"]["truncate"] = False  # as OpenAI's configs say
        layers = range(config["num_hidden_layers"])
        return {
            **config,
            "num_local_experts": file.experts,
            "intermediate_size": file.expert_columns,
            "sliding_window": file.count("attention.sliding_window"),
            "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in layers],
        }
