"""GLM-5 Next (GLM-5.3-Flash) in GGUF files (`Glm5NextModel` of the converter): its config, and what the tensors of its
indexers and residual streams are called."""

from __future__ import annotations

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.gguf.config import SIGMOID, Config, latent
from tiermoe.model.gguf.deepseek4 import CONNECTIONS, gate_limit
from tiermoe.model.gguf.latent_indexers import INDEXER, full_layers, indexer_sizes, indexer_types
from tiermoe.model.gguf.ling import least_decay
from tiermoe.model.gguf.shapes import AGAIN, linear_layers, shape

_POOLS = {f"indexer_compressor_{name}": f"self_attn.indexer.index_kpool_compress_{name}" for name in ("gate", "ape")}

NAMES = CONNECTIONS | INDEXER | _POOLS
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
        **indexer_sizes(file),
        "index_kpool": file.count("attention.indexer.kpool", least=1),
        "index_kpool_always_select_tail": bool(file.of_model("attention.indexer.kpool_select_tail", True)),
        "indexer_types": indexer_types(full_layers(file, [True] * len(linear))),
        "swiglu_limit": gate_limit(file),
        "hc_mult": file.count("hyper_connection.count", least=1),
        "hc_sinkhorn_iters": file.count("hyper_connection.sinkhorn_iterations"),
        "hc_eps": file.decimal("hyper_connection.epsilon"),
    }
