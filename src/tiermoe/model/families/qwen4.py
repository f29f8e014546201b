"""Qwen3.8: Qwen3-Next's layers in residual streams, with sparse attention to blocks of positions and features of
n-grams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_checkpoint import Joined, Numbers, Parameter, Rows
from tiermoe.formats.gguf_file import AGAIN, NGRAM_TABLE, GgufFile
from tiermoe.model.attention.base import Attention
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.attention.indexers import block_indexer
from tiermoe.model.attention.linear import gated_delta, is_linear
from tiermoe.model.attention.ngrams import ngrams
from tiermoe.model.families.family import Family
from tiermoe.model.families.gguf import OUTSIDE, Config, Gguf, end_ids, partly_rotated_fields
from tiermoe.model.families.qwen2_moe import QWEN_NAMES, part_with_gated_expert
from tiermoe.model.families.rows import linear_config, linear_rows
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.streams import StreamLayer, connection, stream_mixer
from tiermoe.model.weights import NormKind, Scope

MIXER = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up"}
"""What the tensors of residual streams are called → the parameters of a mixer."""
NAMES = {
    **{
        f"hc_{tensor}_{matrix}": f"{part}_hyper_connection.{name}"
        for tensor, part in (("attn", "attn"), ("ffn", "mlp"))
        for matrix, name in {**MIXER, "inject": "block_inject_weight"}.items()
    },
    **{f"indexer.{part}_norm": f"self_attn.indexer.{part}_layernorm" for part in "qk"},
    **{f"ple_{part}": f"ple.{part}_proj" for part in ("key", "value")},
    **{f"ple_{part}": f"ple.{part}" for part in ("norm_key", "norm_query", "norm_conv", "conv1d")},
}
"""Tensors of a block → modules of a layer, beside the usual ones."""
APART = (NGRAM_TABLE, "indexer.q_proj", "indexer.k_proj")
"""Tensors that `Qwen4.gguf_made` takes."""
_MOST = (1 << 63) - 1
MIXERS = {f"output_hc_{tensor}": f"hyper_connection_mixer.{name}" for tensor, name in MIXER.items()}
"""Tensors outside of blocks → modules of the mixer after the last layer."""


class Qwen4(Family):
    name, model_type = "Qwen3.8", "qwen4_exp_text"
    gguf = Gguf(
        ("qwen4exp",), QWEN_NAMES | NAMES, outside=OUTSIDE | MIXERS, apart=APART, centred=True, states_shapes=False
    )
    gguf_parts = staticmethod(linear_rows)
    plain_router = in_streams = True
    norms = NormKind(centred=True)

    def layer(self, w: Scope, config: ModelConfig, index: int) -> StreamLayer:
        features = ngrams(w.at("ple"), config) if index + 1 in (config.ple_layer_ids or ()) else None
        indexed = config.layer_types[index] == "indexed_attention"
        indexer = block_indexer(w.at("self_attn.indexer"), config) if indexed else None
        attention: Attention
        if is_linear(config, index):
            attention = gated_delta(w.at("linear_attn"), config, None if features is None else features.sizes)
        else:
            norms = ("q_norm", "k_norm")
            attention = grouped(w.at("self_attn"), config, index, norms=norms, gated=True, indexer=indexer)
        return StreamLayer(
            connection(w.at("attn_hyper_connection"), config),
            attention,
            connection(w.at("mlp_hyper_connection"), config),
            part_with_gated_expert(w.at("mlp"), config, normalise=bool(config.norm_topk_prob)),
            indexer,
            features,
        )

    def end(self, w: Scope, config: ModelConfig) -> Callable[[Tensor], Tensor]:
        return stream_mixer(w.at("model.hyper_connection_mixer"), config)

    def config(self, file: GgufFile) -> Config:
        """ModelError where the file does not say what its indexers choose, or contradicts itself about n-grams."""
        return {
            **partly_rotated_fields(file),
            **linear_config(file),
            "num_experts": file.experts,
            "moe_intermediate_size": file.expert_columns,
            "shared_expert_intermediate_size": file.shape_beside_experts("ffn_gate_shexp.weight")[0],
            "norm_topk_prob": True,  # models/qwen4exp.cpp, as the next
            "output_gate_type": "sigmoid",
            "hc_count": file.count("hyper_connection.count", least=2),
            "hc_lowrank": file.count("hyper_connection.low_rank", least=1),
            "layer_types": ["linear_attention" if each else "indexed_attention" for each in file.linear_layers],
            "indexer_n_heads": file.count("attention.indexer.head_count", least=1),
            "indexer_kv_heads": 1,
            "indexer_head_dim": file.count("attention.indexer.key_length", least=1),
            "indexer_budget": file.count("attention.indexer.top_k", least=1),
            "indexer_compress_ratio": _block(file),
            **_ngram_config(file),
        }

    def gguf_made(self, file: GgufFile) -> dict[str, Parameter]:
        """The n-grams' table and hashes, and the indexers' projections. ModelError where an indexer lacks one of its
        two."""
        ngrams, found = _ngrams(file), dict[str, Parameter]()
        if ngrams is not None:
            prefix = f"model.layers.{ngrams.layer}.ple.ple_embedding"
            found[f"{prefix}.ngram_embedding.weight"] = Rows(file.tensors[NGRAM_TABLE], ngrams.table)
            found[f"{prefix}.layer_multipliers"] = Numbers(ngrams.multipliers)
            found[f"{prefix}.ngram_heads_vocab_sizes"] = Numbers(ngrams.rows)
            found[f"{prefix}.ngram_heads_offsets"] = Numbers(ngrams.begins)
        for layer, linear in enumerate(file.linear_layers):
            if linear:
                continue
            names = [f"blk.{layer}.indexer.{part}_proj.weight" for part in "qk"]
            columns = {file.shape(name)[1] for name in names}
            if len(columns) > 1:
                raise ModelError(f"{file.path}: {' and '.join(names)} have {columns} columns; {AGAIN}")
            both = Joined(tuple(file.tensors[name] for name in names))
            found[f"model.layers.{layer}.self_attn.indexer.index_qk_proj.weight"] = both
        return found


def _block(file: GgufFile) -> int:
    """Positions of a block that an indexer chooses. ModelError where the file does not say, or layers differ."""
    found, linear = file.of_model("attention.compress_ratios"), file.linear_layers
    known = found if isinstance(found, list) and len(found) >= len(linear) else []
    sizes = {size for size, each in zip(known, linear, strict=False) if not each}
    size = sizes.pop() if len(sizes) == 1 else None
    if not isinstance(size, int) or size < 1:
        raise file.refusal(
            f"does not say by one number above 0 how many positions a block has that its indexers choose "
            f"(attention.compress_ratios: {str(found)[:80]}; the converter writes 0 where its transformers has the "
            f"model)",
            "take the model's safetensors, or a file that says it",
        )
    return size


@dataclass(frozen=True, slots=True)
class _Ngrams:
    """Where the n-grams of a layer lie in its table: fields as of `ngram_features.NgramHashes`."""

    layer: int
    multipliers: tuple[int, ...]
    rows: tuple[int, ...]
    begins: tuple[int, ...]
    table: tuple[int, ...]  # its shape


def _ngrams(file: GgufFile) -> _Ngrams | None:
    """None where no layer has n-gram features. ModelError where several have, or the table lacks rows."""
    layers = file.of_model("ple.layers", [])
    if layers == []:
        return None
    if not isinstance(layers, list) or len(layers) != 1 or layers[0] not in range(file.layers):
        raise file.refusal(
            f"has n-gram features in the layers {str(layers)[:80]}, and llama.cpp's converter writes those of one of "
            f"{file.layers} layers",
            "take the model's safetensors",
        )
    longest = file.count("ple.ngram_size", least=2)
    heads = (longest - 1) * file.count("ple.heads_per_ngram", least=1)
    found = _Ngrams(
        layers[0],
        _numbers(file, "ple.layer_multipliers", longest, 0),
        _numbers(file, "ple.head_vocab_sizes", heads, 1),
        _numbers(file, "ple.head_offsets", heads, 0),
        file.shape(NGRAM_TABLE),
    )
    needed = max(begin + rows for begin, rows in zip(found.begins, found.rows, strict=True))
    if needed > found.table[0]:
        raise ModelError(
            f"{file.path}: {NGRAM_TABLE} has {found.table[0]:,} rows, by the file's entries n-grams have {needed:,}; "
            f"{AGAIN}"
        )
    return found


def _numbers(file: GgufFile, key: str, count: int, least: int) -> tuple[int, ...]:
    """An entry of so many whole numbers from `least` on. ModelError where it is none, or is missing."""
    found = file.require(f"{file.architecture}.{key}")
    fits = isinstance(found, list) and len(found) == count
    if not fits or any(not isinstance(each, int) or not least <= each <= _MOST for each in found):
        raise file.refusal(
            f"says that {key} is {str(found)[:80]}, which are not {count} whole numbers of at least {least}"
        )
    return tuple(found)


def _ngram_config(file: GgufFile) -> Config:
    ngrams = _ngrams(file)
    if ngrams is None:
        return {"ple_layer_ids": []}
    end = file.count("ple.eos_token_id")
    return {
        "ple_layer_ids": [ngrams.layer + 1],
        "ple_embed_dim": ngrams.table[1] * len(ngrams.rows),
        "ple_conv_kernel_size": file.count("ple.conv_kernel", least=1),
        "ngram_size": len(ngrams.multipliers),
        "heads_per_ngram": len(ngrams.rows) // (len(ngrams.multipliers) - 1),
        # with these transformers' table has the file's rows: the first head has the least prime from the base on
        "ngram_vocab_size_base": ngrams.rows[0],
        "make_ngram_vocab_size_divisible_by": ngrams.table[0],
        "eos_token_id": [end, *(each for each in end_ids(file) if each != end)],  # n-grams end with the first
    }
