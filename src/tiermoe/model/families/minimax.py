"""MiniMax-M2 and M3: grouped attention, in M3 to blocks of positions that an indexer chooses for each group of heads,
and a sigmoid router with a correction."""

from __future__ import annotations

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.kernels.gates import Gate, gate_named
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.attention.indexers import group_indexer
from tiermoe.model.families.deepseek_v3 import CORRECTION, SHARED_NAMES
from tiermoe.model.families.family import Family
from tiermoe.model.families.gguf import SIGMOID, Config, Gguf, block_names, partly_rotated_fields
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import DenseBlock, MoeBlock, dense, moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import NormKind, Scope

INDEXER = {f"indexer.{name}": f"self_attn.indexer.{name}" for name in ("q_proj", "k_proj", "q_norm", "k_norm")}
"""Tensors of a layer's indexer → modules, beside the usual ones."""
_ALPHA, _LIMIT = 1.702, 7.0  # LLM_FFN_SWIGLU_OAI_MOE of llama-graph.cpp: no entry has them
_NORMS = ("q_norm", "k_norm")
_FUSED = {"": "mlp.gate_up_proj", "_shexp": "mlp.shared_experts.gate_up_proj"}


class MiniMaxM2(Family):
    name, model_type = "MiniMax-M2", "minimax_m2"
    on_gpu = True
    gguf = Gguf(("minimax-m2",), block_names(correction="e_score_correction_bias"))
    normalised = True
    wide = ()

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        rule = RouterRule(config.num_experts_per_tok, scores="sigmoid", normalise=True, rounded=False)
        experts, correction = config.num_local_experts, "e_score_correction_bias"
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, norms=_NORMS, norm_all_heads=True),
            w.norm("post_attention_layernorm"),
            moe(w.at("mlp"), rule, experts, config.intermediate_size, correction=correction),
        )

    def config(self, file: GgufFile) -> Config:
        return {
            **partly_rotated_fields(file),
            "num_local_experts": file.experts,
            "intermediate_size": file.expert_columns,
        }


class MiniMaxM3(Family):
    """Gate and up of dense blocks and of shared experts are one matrix."""

    name, model_type = "MiniMax-M3", "minimax_m3_vl_text"
    gguf = Gguf(("minimax-m3",), SHARED_NAMES | INDEXER, fused=_FUSED, centred=True)
    normalised = True
    norms = NormKind(centred=True)
    wide = ()

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        part, indexer = w.at("self_attn"), None
        if config.layer_types[index] == "minimax_m3_sparse":
            indexer = group_indexer(part.at("indexer"), config)
        return Layer(
            w.norm("input_layernorm"),
            grouped(part, config, index, norms=_NORMS, indexer=indexer),
            w.norm("post_attention_layernorm"),
            self.part(w.at("mlp"), config),
            indexer=indexer,
        )

    def part(self, w: Scope, config: ModelConfig) -> MoeBlock | DenseBlock:
        """The feed-forward part: dense in the layers that have no router."""
        gate, first = self.gate(config), ("gate_up_proj",)
        if not w.has("gate.weight"):
            return dense(w, config.dense_intermediate_size, gate, first=first, fused=True)
        shared = None
        if w.has("shared_experts"):
            own = w.at("shared_experts")
            shared = dense(own, config.shared_intermediate_size, gate, first=first, fused=True)
        rule = RouterRule(
            config.num_experts_per_tok,
            scores="sigmoid",
            normalise=True,
            rounded=False,
            scale=float(config.routed_scaling_factor),
        )
        return moe(w, rule, config.num_local_experts, config.intermediate_size, correction=CORRECTION, shared=shared)

    def lacks(self, config: ModelConfig) -> str:
        sparse = "minimax_m3_sparse" in config.layer_types
        apart = sparse and config.index_n_heads != config.num_key_value_heads
        return "an indexer of other groups of heads than share keys and values" if apart else ""

    def gate(self, config: ModelConfig) -> Gate:
        return gate_named("clamped in halves", config.swiglu_limit, config.swiglu_alpha)

    def config(self, file: GgufFile) -> Config:
        """All layers with experts have an indexer (models/minimax-m3.cpp). ModelError for one that lacks a tensor of
        it."""
        dense = file.leading_dense
        sparse = range(dense, file.layers)
        for layer in sparse:
            for name in INDEXER:
                file.shape(f"blk.{layer}.{name}.weight", 1 if name.endswith("norm") else 2)
        if file.count("expert_gating_func") != SIGMOID or file.of_model("expert_weights_norm") is not True:
            raise file.refusal("has no sigmoid router whose weights sum to 1, which every MiniMax-M3 has")
        return {
            **partly_rotated_fields(file),
            "num_local_experts": file.experts,
            "intermediate_size": file.expert_columns,
            "dense_intermediate_size": file.dense_columns,
            "shared_intermediate_size": file.shape_beside_experts("ffn_gate_shexp.weight")[0],
            "routed_scaling_factor": file.decimal("expert_weights_scale"),
            "swiglu_alpha": _ALPHA,
            "swiglu_limit": _LIMIT,
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * len(sparse),
            "layer_types": ["full_attention"] * dense + ["minimax_m3_sparse"] * len(sparse),
            "index_n_heads": file.count("attention.indexer.head_count", least=1),
            "index_head_dim": file.count("attention.indexer.key_length", least=1),
            "index_block_size": file.count("attention.indexer.block_size", least=1),
            "index_topk_blocks": file.count("attention.indexer.top_k", least=1),
            "index_local_blocks": file.count("attention.indexer.local_blocks"),
        }
