"""GLM-5 Next as GGUF, by the rules of llama.cpp's converter (`Glm5NextModel`). The gguf package does not have it."""

from __future__ import annotations

from typing import Any

import gguf

from gguf_latent import latent_metadata
from gguf_linear import kimi_metadata
from gguf_names import CONNECTIONS, name_in_file

ARCHITECTURE = "glm5-next"
_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.KIMI_LINEAR, 8)
"""Of a model with the same tensors but for those of `_OWN`."""
_OWN = {
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "self_attn.indexer.index_kpool_compress_gate": "indexer_compressor_gate.weight",
    "self_attn.indexer.index_kpool_compress_ape": "indexer_compressor_ape.weight",
    **CONNECTIONS,
}


def name_of(path: str) -> str:
    """The name in the file of a parameter of transformers' model."""
    return name_in_file(path, _OWN, _NAMES)


def of_text(state: dict[str, Any]) -> dict[str, Any]:
    """Parameters of the text part, by the names of a text model."""
    return {
        path.replace("model.language_model.", "model."): value
        for path, value in state.items()
        if not path.startswith("model.visual.")
    }


def glm5_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`Glm5NextModel.set_gguf_parameters`."""
    latent_metadata(writer, "glm5_next_text", config)
    kimi_metadata(writer, config)
    writer.add_layer_norm_eps(1e-6)
    bound, kinds = config["linear_lower_bound"], config["indexer_types"]
    if bound is not None:
        writer.add_float32(f"{ARCHITECTURE}.kda.gate_lower_bound", bound)
    writer.add_indexer_head_count(config["index_n_heads"])
    writer.add_indexer_key_length(config["index_head_dim"])
    writer.add_indexer_top_k(config["index_topk"])
    writer.add_uint32(f"{ARCHITECTURE}.attention.indexer.kpool", config["index_kpool"])
    writer.add_bool(f"{ARCHITECTURE}.attention.indexer.kpool_select_tail", config["index_kpool_always_select_tail"])
    writer.add_array(f"{ARCHITECTURE}.attention.indexer.types", [kind == "full" for kind in kinds])
    writer.add_uint32(f"{ARCHITECTURE}.hyper_connection.count", config["hc_mult"])
    writer.add_uint32(f"{ARCHITECTURE}.hyper_connection.sinkhorn_iterations", config["hc_sinkhorn_iters"])
    writer.add_float32(f"{ARCHITECTURE}.hyper_connection.epsilon", config["hc_eps"])
    limits = [config["swiglu_limit"]] * config["num_hidden_layers"]
    writer.add_swiglu_clamp_exp(limits)
    writer.add_swiglu_clamp_shexp(limits)
