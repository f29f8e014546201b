"""GLM-5 and GLM-5 Next: DeepSeek-V3's layers with latent attention to positions that an indexer chooses. GLM-5 Next has
Kimi Delta Attention in most layers, residual streams, and a limited gate."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.base import Attention
from tiermoe.model.attention.compressed import PoolIndexerSizes, pool_indexer
from tiermoe.model.attention.indexers import IndexerSizes, indexer
from tiermoe.model.attention.latent import has_indexer, latent
from tiermoe.model.attention.linear import is_linear, kimi_delta
from tiermoe.model.families.deepseek_v3 import (
    INDEXER,
    V3_NAMES,
    full_layers,
    indexed_fields,
    indexer_lacks,
    indexer_sizes,
    indexer_types,
    v3_part,
)
from tiermoe.model.families.deepseek_v4 import CONNECTIONS, HEAD, gate_limit, limited_silu, mixed_or_mean
from tiermoe.model.families.family import HeadFormat, LatentFamily
from tiermoe.model.families.gguf import OUTSIDE, SIGMOID, Config, Gguf, latent_fields, mlp_layer_types
from tiermoe.model.families.kimi_linear import KIMI_NAMES, least_decay
from tiermoe.model.families.rows import negative_rates
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.rotary import rope_pairs
from tiermoe.model.streams import StreamLayer, balanced
from tiermoe.model.weights import Scope

_POOLS = {f"indexer_compressor_{name}": f"self_attn.indexer.index_kpool_compress_{name}" for name in ("gate", "ape")}
NAMES = CONNECTIONS | INDEXER | _POOLS
"""Tensors of a block → modules or parameters of a layer, beside the usual ones and those of Kimi's linear
attention."""
_SHARING = 1 << 20
"""Positions of GLM-5.2's context. By them llama.cpp tells its files that do not say which layers have an indexer from
those of GLM-5 and 5.1, in which all have one (`glm-dsa.cpp`)."""


class Glm5(LatentFamily):
    name, model_type = "GLM-MoE-DSA (GLM-5)", "glm_moe_dsa"
    gguf = Gguf(("glm-dsa",), V3_NAMES | INDEXER)
    mtp_head = HeadFormat(kinds={"indexer_types": "full"})

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        own, part = has_indexer(config, index), w.at("self_attn")
        return Layer(
            w.norm("input_layernorm"),
            latent(part, config, indexer=IndexerSizes.of(config), keeps_index=own),
            w.norm("post_attention_layernorm"),
            v3_part(w.at("mlp"), config),
            indexer=indexer(part, config, rope=rope_pairs) if own else None,
        )

    def lacks(self, config: ModelConfig) -> str:
        return indexer_lacks(config)

    def config(self, file: GgufFile) -> Config:
        """ModelError where a layer that has an indexer lacks a tensor of it."""
        full = _of_glm(file)
        return {**indexed_fields(file, full), "indexer_types": indexer_types(full)}

    def gguf_unread(self, file: GgufFile) -> frozenset[str]:
        """Tensors of indexers in layers of GLM-5 that take the choice of a layer before them: published files of
        GLM-5.2 have copies there, which nothing reads."""
        return frozenset(
            f"blk.{layer}.{name}.{suffix}"
            for layer, full in enumerate(_of_glm(file))
            if not full
            for name in INDEXER
            for suffix in ("weight", "bias")
        )


class Glm5Next(LatentFamily):
    name, model_type = "GLM-5 Next (GLM-5.3-Flash)", "glm5_next_text"
    gguf = Gguf(
        ("glm5-next",),
        V3_NAMES | KIMI_NAMES | NAMES,
        outside=OUTSIDE | HEAD,
        within="self_attn",
        part_of="glm5_next",
        states_shapes=False,
    )
    gguf_parts = staticmethod(negative_rates)
    in_streams = True

    def layer(self, w: Scope, config: ModelConfig, index: int) -> StreamLayer:
        part, chooses = w.at("self_attn"), None
        attention: Attention
        if is_linear(config, index):
            attention = kimi_delta(part, config)
        else:
            own = has_indexer(config, index)
            sizes = PoolIndexerSizes.of(config)
            attention = latent(part, config, narrow_epsilon=None, indexer=sizes, keeps_index=own)
            chooses = pool_indexer(part, config, narrow_epsilon=None) if own else None
        return StreamLayer(
            balanced(w.at("attn_hc"), config, w.norm("input_layernorm")),
            attention,
            balanced(w.at("ffn_hc"), config, w.norm("post_attention_layernorm")),
            v3_part(w.at("mlp"), config, activation=limited_silu(config)),
            chooses,
        )

    def lacks(self, config: ModelConfig) -> str:
        return indexer_lacks(config)

    def end(self, w: Scope, config: ModelConfig) -> Callable[[Tensor], Tensor]:
        return mixed_or_mean(w, config)

    def config(self, file: GgufFile) -> Config:
        config, linear = latent_fields(file), file.linear_layers
        del config["rope_parameters"]  # no layer has positions
        if True not in linear or all(linear):
            kind = "latent" if all(linear) else "linear"
            raise file.refusal(f"has no layer of {kind} attention, which every GLM-5 Next has")
        if file.count("expert_gating_func", SIGMOID) != SIGMOID:
            raise file.refusal("has no sigmoid router, which every GLM-5 Next has")
        del config["first_k_dense_replace"]
        return {
            **config,
            "mlp_layer_types": mlp_layer_types(file),
            "layer_types": ["linear_attention" if each else "indexed_attention" for each in linear],
            "linear_head_dim": file.count("kda.head_dim", least=1),
            "linear_num_heads": file.shape(f"blk.{linear.index(True)}.ssm_beta.weight")[0],
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


def _of_glm(file: GgufFile) -> list[bool]:
    """`full_layers` of GLM-5."""
    all_have = file.count("context_length") < _SHARING
    return full_layers(file, [all_have or layer < 2 or layer % 4 == 2 for layer in range(file.layers)])
