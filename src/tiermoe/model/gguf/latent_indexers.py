"""Indexers of latent attention in GGUF files, and the configs of GLM-5 and DeepSeek-V3.2 (`GlmMoeDsaModel` and
`DeepseekV32Model` of the converter)."""

from __future__ import annotations

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.gguf.config import SIGMOID, Config, latent
from tiermoe.model.gguf.shapes import AGAIN, blocks, shape

INDEXER = {
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.k_norm": "self_attn.indexer.k_norm",
}
"""Tensors of a layer's indexer → modules, beside the usual ones."""
_SHARING = 1 << 20
"""Positions of GLM-5.2's context. By them llama.cpp tells its files that do not say which layers have an indexer from
those of GLM-5 and 5.1, in which all have one (`glm-dsa.cpp`)."""


def deepseek32(file: GgufFile) -> Config:
    """ModelError where a layer lacks a tensor of its indexer."""
    return {**_indexed(file, [True] * blocks(file)), "model_type": "deepseek_v32"}


def glm_dsa(file: GgufFile) -> Config:
    """ModelError where a layer that has an indexer lacks a tensor of it."""
    full = _of_glm(file)
    return {**_indexed(file, full), "model_type": "glm_moe_dsa", "indexer_types": indexer_types(full)}


def shared_indexers(file: GgufFile) -> frozenset[str]:
    """Tensors of indexers in layers of GLM-5 that take the choice of a layer before them: published files of GLM-5.2
    have copies there, which nothing reads."""
    return frozenset(
        f"blk.{layer}.{name}.{suffix}"
        for layer, full in enumerate(_of_glm(file))
        if not full
        for name in INDEXER
        for suffix in ("weight", "bias")
    )


def _indexed(file: GgufFile, full: list[bool]) -> Config:
    """The fields of both. full: which layers have an indexer."""
    for layer in (layer for layer, each in enumerate(full) if each):
        for name in INDEXER:
            shape(file, f"blk.{layer}.{name}.weight", 1 if name.endswith("norm") else 2)
        shape(file, f"blk.{layer}.indexer.k_norm.bias", 1)
    if (score := file.count("expert_gating_func", SIGMOID)) != SIGMOID:
        raise ModelError(f"{file.path} has routers that score by function {score}, not by sigmoid ({SIGMOID}); {AGAIN}")
    return {**latent(file), "q_lora_rank": file.count("attention.q_lora_rank", least=1), **indexer_sizes(file)}


def _of_glm(file: GgufFile) -> list[bool]:
    """`full_layers` of GLM-5."""
    all_have = file.count("context_length") < _SHARING
    return full_layers(file, [all_have or layer < 2 or layer % 4 == 2 for layer in range(blocks(file))])


def indexer_sizes(file: GgufFile) -> Config:
    """The fields of an indexer."""
    return {
        "index_n_heads": file.count("attention.indexer.head_count", least=1),
        "index_head_dim": file.count("attention.indexer.key_length", least=1),
        "index_topk": file.count("attention.indexer.top_k", least=1),
    }


def full_layers(file: GgufFile, otherwise: list[bool] | None = None) -> list[bool]:
    """Which layers have an indexer. otherwise: those of a file that does not say it. ModelError where it says it of
    fewer layers, or not and there is no `otherwise`."""
    kinds, count = file.of_model("attention.indexer.types", otherwise), blocks(file)
    if not isinstance(kinds, list) or len(kinds) < count:
        raise ModelError(f"{file.path} does not say which of its {count} layers have an indexer; {AGAIN}")
    return [bool(each) for each in kinds[:count]]


def indexer_types(full: list[bool]) -> list[str]:
    """transformers' names of layers that have an indexer, and of those that take the choice of the layer before."""
    return ["full" if each else "shared" for each in full]
