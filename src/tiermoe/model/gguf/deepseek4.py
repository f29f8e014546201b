"""DeepSeek-V4 in GGUF files (`DeepseekV4Model` of the converter): its config, and what its tensors are called."""

from __future__ import annotations

import math

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile, rounded
from tiermoe.model.gguf.config import Config, common
from tiermoe.model.gguf.shapes import AGAIN, blocks, experts, inner

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

STREAMS = {f"hc_{part}_{name}": f"{part}_hc.{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale")}
"""Of residual streams that are balanced."""

NAMES = {
    **{tensor: f"self_attn.{name}" for tensor, name in _ATTENTION.items()},
    **{f"attn_compressor_{tensor}": f"self_attn.compressor.{name}" for tensor, name in _COMPRESSOR.items()},
    **{f"indexer_compressor_{tensor}": f"self_attn.compressor.indexer.{name}" for tensor, name in _COMPRESSOR.items()},
    **STREAMS,
    "ffn_gate_tid2eid": "mlp.gate.tid2eid",
}
"""Tensors of a block → modules or parameters of a layer, beside the usual ones."""


def deepseek4(file: GgufFile) -> Config:
    config, layers = common(file), range(blocks(file))
    rope = config.pop("rope_parameters")
    columns, ratios = file.count("attention.key_length", least=1), _ratios(file)
    many = sorted({ratio for ratio in ratios if ratio not in (0, _FEW)})
    if len(many) > 1:
        raise ModelError(
            f"{file.path} compresses {' or '.join(map(str, many))} positions into an entry, and DeepSeek-V4 one number "
            f"of them beside {_FEW}; {AGAIN}"
        )
    kinds = {0: "sliding_attention", _FEW: "compressed_sparse_attention"}
    hashed = [f"blk.{layer}.ffn_gate_tid2eid.weight" in file.tensors for layer in layers]
    return {
        **config,
        "model_type": "deepseek_v4",
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
        "index_n_heads": file.count("attention.indexer.head_count", least=1),
        "index_head_dim": file.count("attention.indexer.key_length", least=1),
        "index_topk": file.count("attention.indexer.top_k", least=1),
        "n_routed_experts": experts(file),
        "n_shared_experts": file.count("expert_shared_count"),
        "moe_intermediate_size": inner(file),
        "mlp_layer_types": ["hash_moe" if each else "moe" for each in hashed],
        "scoring_func": _scores(file),
        "routed_scaling_factor": file.decimal("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(file.of_model("expert_weights_norm", True)),
        "swiglu_limit": gate_limit(file),
        "hc_mult": file.count("hyper_connection.count", least=1),
        "hc_sinkhorn_iters": file.count("hyper_connection.sinkhorn_iterations"),
        "hc_eps": file.decimal("hyper_connection.epsilon"),
    }


def _ratios(file: GgufFile) -> list[int]:
    """Positions of an entry in each layer; 0: the layer has a window alone. ModelError where the file does not say."""
    found, count = file.of_model("attention.compress_ratios"), blocks(file)
    if (
        not isinstance(found, list)
        or len(found) < count
        or any(not isinstance(each, int) or each < 0 for each in found)
    ):
        raise ModelError(f"{file.path} does not say how many positions each of {count} layers compresses; {AGAIN}")
    return found[:count]


def _scores(file: GgufFile) -> str:
    kind = file.count("expert_gating_func", 4)
    if kind not in _SCORES:
        raise ModelError(f"{file.path} has routers that score by function {kind}, which no DeepSeek-V4 does; {AGAIN}")
    return _SCORES[kind]


def gate_limit(file: GgufFile) -> float:
    """Of the gate of all experts. ModelError where there is none, or layers differ."""
    found = {
        value
        for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp")
        if isinstance(values := file.of_model(key), list)
        for value in values[: blocks(file)]
    }
    if len(found) != 1 or not all(isinstance(each, float) and 0 < each < math.inf for each in found):
        raise ModelError(f"{file.path} does not limit the gate of all experts by one number above 0; {AGAIN}")
    return rounded(found.pop())
