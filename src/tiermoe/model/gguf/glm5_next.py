"""GLM-5 Next (GLM-5.3-Flash) in GGUF files (`Glm5NextModel` of the converter): its config, and what the tensors of its
indexers and residual streams are called."""

from __future__ import annotations

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.gguf.config import SIGMOID, Config, latent
from tiermoe.model.gguf.deepseek4 import CONNECTIONS, gate_limit
from tiermoe.model.gguf.ling import least_decay
from tiermoe.model.gguf.shapes import AGAIN, linear_layers, shape

_INDEXER = {
    "indexer.attn_q_b": "wq_b",
    "indexer.attn_k": "wk",
    "indexer.k_norm": "k_norm",
    "indexer.proj": "weights_proj",
    "indexer_compressor_gate": "index_kpool_compress_gate",
    "indexer_compressor_ape": "index_kpool_compress_ape",
}

NAMES = CONNECTIONS | {tensor: f"self_attn.indexer.{name}" for tensor, name in _INDEXER.items()}
"""Tensors of a block → modules or parameters of a layer, beside the usual ones and those of Kimi's linear
attention."""


def glm5_next(file: GgufFile) -> Config:
    config, linear = latent(file), linear_layers(file)
    del config["rope_parameters"]  # no layer has positions
    if True not in linear or all(linear):
        kind = "latent" if all(linear) else "linear"
        raise ModelError(f"{file.path} has no layer of {kind} attention, which every GLM-5 Next has; {AGAIN}")
    if file.count("expert_gating_func", SIGMOID) != SIGMOID:
        raise ModelError(f"{file.path} has no sigmoid router, which every GLM-5 Next has; {AGAIN}")
    dense = config.pop("first_k_dense_replace")
    return {
        **config,
        "model_type": "glm5_next_text",
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (len(linear) - dense),
        "layer_types": ["linear_attention" if each else "indexed_attention" for each in linear],
        "linear_head_dim": file.count("kda.head_dim", least=1),
        "linear_num_heads": shape(file, f"blk.{linear.index(True)}.ssm_beta.weight", 2)[0],
        "linear_conv_kernel_dim": file.count("ssm.conv_kernel", least=1),
        "linear_lower_bound": None if file.of_model("kda.gate_lower_bound") is None else least_decay(file),
        "index_n_heads": file.count("attention.indexer.head_count", least=1),
        "index_head_dim": file.count("attention.indexer.key_length", least=1),
        "index_topk": file.count("attention.indexer.top_k", least=1),
        "index_kpool": file.count("attention.indexer.kpool", least=1),
        "index_kpool_always_select_tail": bool(file.of_model("attention.indexer.kpool_select_tail", True)),
        "indexer_types": _indexers(file, len(linear)),
        "swiglu_limit": gate_limit(file),
        "hc_mult": file.count("hyper_connection.count", least=1),
        "hc_sinkhorn_iters": file.count("hyper_connection.sinkhorn_iterations"),
        "hc_eps": file.decimal("hyper_connection.epsilon"),
    }


def _indexers(file: GgufFile, layers: int) -> list[str]:
    """Which layers have an indexer, and which take the choice of the layer before them. Where the file does not say,
    all have one. ModelError where it says it of fewer layers."""
    full = file.of_model("attention.indexer.types", [True] * layers)
    if not isinstance(full, list) or len(full) < layers:
        raise ModelError(f"{file.path} does not say which of its {layers} layers have an indexer; {AGAIN}")
    return ["full" if each else "shared" for each in full[:layers]]
