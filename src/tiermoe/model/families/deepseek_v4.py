"""DeepSeek-V4: attention over a window and over compressed positions, layers of residual streams, a router whose
experts follow from the token in some layers, a limited gate."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor

from tiermoe.formats.gguf_file import GgufFile, rounded
from tiermoe.kernels.gates import limited_silu as silu_within
from tiermoe.model.attention.compressed import compressed
from tiermoe.model.families.deepseek_v3 import CORRECTION, SHARED_NAMES, indexer_sizes
from tiermoe.model.families.family import LatentFamily
from tiermoe.model.families.gguf import OUTSIDE, Config, Gguf, common_fields
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import dense, moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.streams import MeanMixer, StreamLayer, balanced, balanced_mixer
from tiermoe.model.weights import NormKind, Scope

_SCORES = {2: "sigmoid", 4: "sqrtsoftplus"}
"""`expert_gating_func` → `scoring_func`."""
_FEW = 4
"""Positions of an entry in layers with an indexer; it is by this number that llama.cpp tells them (`deepseek4.cpp`)."""
_ATTENTION = {
    "attn_sinks": "sinks",
    "attn_q_a": "q_a_proj",
    "attn_q_a_norm": "q_a_norm",
    "attn_q_b": "q_b_proj",
    "attn_kv": "kv_proj",
    "attn_kv_a_norm": "kv_norm",
    "attn_output_a": "o_a_proj",
    "attn_output_b": "o_b_proj",
    "indexer.proj": "compressor.indexer.scorer.weights_proj",
    "indexer.attn_q_b": "compressor.indexer.q_b_proj",
}
_COMPRESSOR = {"kv": "kv_proj", "gate": "gate_proj", "ape": "position_bias", "norm": "kv_norm"}
CONNECTIONS = {f"hc_{part}_{name}": f"{part}_hc.{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale")}
"""Tensors of a block → parameters of its hyper-connections."""
NAMES = {
    **{tensor: f"self_attn.{name}" for tensor, name in _ATTENTION.items()},
    **{f"attn_compressor_{tensor}": f"self_attn.compressor.{name}" for tensor, name in _COMPRESSOR.items()},
    **{f"indexer_compressor_{tensor}": f"self_attn.compressor.indexer.{name}" for tensor, name in _COMPRESSOR.items()},
    **CONNECTIONS,
    "ffn_gate_tid2eid": "mlp.gate.tid2eid",
}
"""Tensors of a block → modules or parameters of a layer, beside the usual ones."""
HEAD = {f"output_hc_{name}": f"hc_head.hc_{name}" for name in ("fn", "base", "scale")}
"""Tensors outside of blocks → parameters of the mixer after the last layer."""


class DeepSeekV4(LatentFamily):
    name, model_type = "DeepSeek-V4", "deepseek_v4"
    gguf = Gguf(("deepseek4",), SHARED_NAMES | NAMES, outside=OUTSIDE | HEAD, states_shapes=False)
    latent_kv = False
    hash_table = "tid2eid"
    normalised = True
    in_streams = True
    norms = NormKind(late=True)

    def layer(self, w: Scope, config: ModelConfig, index: int) -> StreamLayer:
        part, inner = w.at("mlp"), config.moe_intermediate_size
        rule = RouterRule(
            config.num_experts_per_tok,
            scores=config.scoring_func,
            normalise=True,
            epsilon=1e-20,
            scale=float(config.routed_scaling_factor),
        )
        shared = dense(part.at("shared_experts"), config.n_shared_experts * inner, limited_silu(config))
        experts, table = config.n_routed_experts, "gate.tid2eid"
        return StreamLayer(
            balanced(w.at("attn_hc"), config, w.norm("input_layernorm")),
            compressed(w.at("self_attn"), config, index),
            balanced(w.at("ffn_hc"), config, w.norm("post_attention_layernorm")),
            moe(part, rule, experts, inner, correction=CORRECTION, shared=shared, table=table),
        )

    def lacks(self, config: ModelConfig) -> str:
        known = config.scoring_func in ("sqrtsoftplus", "sigmoid")
        return "" if known else f"routers that score by '{config.scoring_func}'"

    def end(self, w: Scope, config: ModelConfig) -> Callable[[Tensor], Tensor]:
        return balanced_mixer(w.at("model.hc_head"), config, w.norm("model.norm"))

    def config(self, file: GgufFile) -> Config:
        config = common_fields(file)
        rope = config.pop("rope_parameters")
        columns, ratios = file.count("attention.key_length", least=1), _ratios(file)
        many = sorted({ratio for ratio in ratios if ratio not in (0, _FEW)})
        if len(many) > 1:
            raise file.refusal(
                f"compresses {' or '.join(map(str, many))} positions into an entry, and DeepSeek-V4 one number of them "
                f"beside {_FEW}"
            )
        kinds = {0: "sliding_attention", _FEW: "compressed_sparse_attention"}
        hashed = file.layers_with("ffn_gate_tid2eid.weight")
        return {
            **config,
            "num_key_value_heads": 1,
            "head_dim": columns,
            "partial_rotary_factor": file.count("rope.dimension_count", least=1) / columns,
            "rope_theta": rope.pop("rope_theta"),
            "rope_parameters": rope,  # of layers that compress
            "compress_rope_theta": file.decimal("attention.compress_rope_freq_base"),
            "q_lora_rank": file.count("attention.q_lora_rank", least=1),
            "o_groups": file.count("attention.output_group_count", least=1),
            "o_lora_rank": file.count("attention.output_lora_rank", least=1),
            "sliding_window": file.count("attention.sliding_window", least=1),
            "layer_types": [kinds.get(ratio, "heavily_compressed_attention") for ratio in ratios],
            "compress_rates": {
                "compressed_sparse_attention": _FEW,
                "heavily_compressed_attention": many[0] if many else _FEW,
            },
            **indexer_sizes(file),
            "n_routed_experts": file.experts,
            "n_shared_experts": file.count("expert_shared_count"),
            "moe_intermediate_size": file.expert_columns,
            "mlp_layer_types": ["hash_moe" if each else "moe" for each in hashed],
            "scoring_func": _scores(file),
            "routed_scaling_factor": file.decimal("expert_weights_scale", 1.0),
            "norm_topk_prob": bool(file.of_model("expert_weights_norm", True)),
            "swiglu_limit": gate_limit(file),
            "hc_mult": file.count("hyper_connection.count", least=1),
            "hc_sinkhorn_iters": file.count("hyper_connection.sinkhorn_iterations"),
            "hc_eps": file.decimal("hyper_connection.epsilon"),
        }


def mixed_or_mean(w: Scope, config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """`Family.end` of families whose residual streams are mixed after the last layer, or their mean taken."""
    norm = w.norm("model.norm")
    return balanced_mixer(w.at("model.hc_head"), config, norm) if w.has("model.hc_head.hc_fn") else MeanMixer(norm)


def limited_silu(config: ModelConfig) -> Callable[..., Tensor]:
    """What is between the matrices of dense blocks."""
    return partial(silu_within, limit=float(config.swiglu_limit))


def _ratios(file: GgufFile) -> list[int]:
    """Positions of an entry in each layer; 0: the layer has a window alone. ModelError where the file does not say."""
    what = f"how many positions each of {file.layers} layers compresses"
    found = file.of_layers("attention.compress_ratios", what)
    if any(not isinstance(each, int) or each < 0 for each in found):
        raise file.refusal(f"does not say {what}")
    return found


def _scores(file: GgufFile) -> str:
    kind = file.count("expert_gating_func", 4)
    if kind not in _SCORES:
        raise file.refusal(f"has routers that score by function {kind}, which no DeepSeek-V4 does")
    return _SCORES[kind]


def gate_limit(file: GgufFile) -> float:
    """Of the gate of all experts. ModelError where there is none, or layers differ."""
    found = {
        value
        for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp")
        if isinstance(values := file.of_model(key), list)
        for value in values[: file.layers]
    }
    if len(found) != 1 or not all(isinstance(each, float) and 0 < each < math.inf for each in found):
        raise file.refusal("does not limit the gate of all experts by one number above 0")
    return rounded(found.pop())
