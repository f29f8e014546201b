"""GGUF files of families: what llama.cpp's converter (`conversion/`, a class an architecture) calls the weights, and
the fields of transformers' config that a file describes, in the parts that several families share. Sizes come from the
tensors' shapes if these tell them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import AGAIN, GgufFile, rounded
from tiermoe.formats.safetensors import FileReader

# names of weights

OUTSIDE = {"token_embd": "embed_tokens", "output_norm": "norm"}
"""Tensors outside of blocks → modules of transformers' `model`; the output layer is beside it."""
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
"""Of latent attention: tensors of a block → modules of a layer."""
SINKS = {"attn_sinks": "self_attn.sinks"}
LATE_NORM = {"post_attention_norm": "post_attention_layernorm"}
"""Of files that call the second norm otherwise than most."""


def block_names(
    block: str = "mlp",
    *,
    router: str = "gate",
    correction: str | None = None,
    shared: str | None = None,
    attention: str = "self_attn",
    output: str = "o_proj",
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    head_norms: tuple[str, str] = ("q_norm", "k_norm"),
    dense: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, str]:
    """Tensors of a block → modules of a layer, by what transformers calls the feed-forward part, the router in it, its
    correction, its shared expert, attention, its output layer, the two norms, the norms of heads and the matrices of
    dense blocks."""
    names = {
        "attn_norm": norms[0],
        "attn_q": f"{attention}.q_proj",
        "attn_k": f"{attention}.k_proj",
        "attn_v": f"{attention}.v_proj",
        "attn_output": f"{attention}.{output}",
        "attn_q_norm": f"{attention}.{head_norms[0]}",
        "attn_k_norm": f"{attention}.{head_norms[1]}",
        "ffn_norm": norms[1],
        "ffn_gate_inp": f"{block}.{router}",
    }
    for tensor, name in zip(("gate", "up", "down"), dense, strict=True):
        names[f"ffn_{tensor}"] = f"{block}.{name}"
        if shared:
            names[f"ffn_{tensor}_shexp"] = f"{block}.{shared}.{name}"
    return names | ({"exp_probs_b": f"{block}.{correction}"} if correction else {})


@dataclass(frozen=True, slots=True)
class Gguf:
    """A family in GGUF files."""

    architectures: tuple[str, ...]  # llama.cpp's names
    names: Mapping[str, str]  # tensors of a block → modules or parameters of a layer
    experts: str = "mlp.experts"  # path of a layer's experts in it
    outside: Mapping[str, str] = field(default_factory=lambda: OUTSIDE)
    turned: bool = False  # the halves of each head's queries and keys take turns (`LlamaModel.permute`)
    centred: bool = False  # norms have their weights, and transformers' these less 1
    apart: tuple[str, ...] = ()  # tensors that are no parameter of their own; of blocks by their stems
    within: str = "linear_attn"  # the block that `Family.gguf_parts` are of
    fused: Mapping[str, str] = field(default_factory=dict)
    """End of the names of gate and up → the module that is both in the model, and in the file is not."""
    part_of: str = ""  # model_type of a larger model, if transformers has no class for the text part alone
    states_shapes: bool = True
    """A file's outline follows from the blocks alone (`gguf.outline`); else transformers' code gives it."""


# fields of the config

Config = dict[str, Any]
SOFTMAX, SIGMOID = 1, 2
"""`expert_gating_func`."""
_THETA = 10000.0  # of the rotary embedding where the file says nothing
_BETA_FAST, _BETA_SLOW = 32.0, 1.0  # llama.cpp's of YaRN
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<｜end▁of▁sentence｜>", "[e~[", "<turn|>", "<|tool_response>",
)  # fmt: skip
"""Tokens that end an answer whatever else the file says (`special_eog_ids` of src/llama-vocab.cpp)."""


def common_fields(file: GgufFile) -> Config:
    """The fields that all families have."""
    return {
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": file.count("embedding_length"),
        "num_hidden_layers": file.layers,
        "num_attention_heads": file.uniform_count("attention.head_count"),
        "max_position_embeddings": file.count("context_length"),
        "rms_norm_eps": file.decimal(f"attention.{_epsilon(file)}"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": rope_parameters(file),
        "bos_token_id": file.token_id("bos"),
        "eos_token_id": end_ids(file) or None,
        "pad_token_id": file.token_id("padding"),
    }


def _epsilon(file: GgufFile) -> str:
    """The entry of the norms' epsilon: of a config that has the other name alone the converter writes the second."""
    names = ("layer_norm_rms_epsilon", "layer_norm_epsilon")
    return next((name for name in names if file.of_model(f"attention.{name}", None) is not None), names[0])


def grouped_fields(file: GgufFile) -> Config:
    """A model with grouped-query attention."""
    heads = file.uniform_count("attention.head_count")
    return {
        **common_fields(file),
        "num_key_value_heads": file.uniform_count("attention.head_count_kv", heads),
        "head_dim": file.count("attention.key_length", file.count("embedding_length") // heads, least=1),
    }


def partly_rotated_fields(file: GgufFile) -> Config:
    """A model with partial rotary embedding: some columns of each head are rotated."""
    config = grouped_fields(file)
    share = file.count("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    config["rope_parameters"]["partial_rotary_factor"] = share
    return config


def latent_fields(file: GgufFile) -> Config:
    """A model with latent attention."""
    rotary = file.count("rope.dimension_count")
    key = file.count("attention.key_length_mla", file.count("attention.key_length"))
    return {
        **common_fields(file),
        "num_key_value_heads": file.uniform_count("attention.head_count"),
        "q_lora_rank": file.count("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": file.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": file.count("attention.value_length_mla", file.count("attention.value_length")),
        **routed_fields(file),
    }


def expert_sizes(file: GgufFile) -> Config:
    """Counts and columns of a feed-forward part by the names of DeepSeek's configs."""
    return {
        "n_routed_experts": file.experts,
        "n_shared_experts": file.count("expert_shared_count"),
        "moe_intermediate_size": file.expert_columns,
        "intermediate_size": file.dense_columns,
        "first_k_dense_replace": file.leading_dense,
    }


def routed_fields(file: GgufFile) -> Config:
    """A feed-forward part by the names of DeepSeek-V3's config."""
    return {
        **expert_sizes(file),
        "routed_scaling_factor": file.decimal("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(file.of_model("expert_weights_norm", False)),
        "n_group": file.count("expert_group_count", 1),
        "topk_group": file.count("expert_group_used_count", 1),
    }


def window_layers(file: GgufFile) -> list[str]:
    """`layer_types` of a config by which layers have a window. ModelError where the file does not say."""
    slides = file.of_layers("attention.sliding_window_pattern", "which of its layers have a window")
    return ["sliding_attention" if each else "full_attention" for each in slides]


def mlp_layer_types(file: GgufFile) -> list[str]:
    """`mlp_layer_types` of a config: the first layers are dense."""
    dense = file.leading_dense
    return ["dense"] * dense + ["sparse"] * (file.layers - dense)


def kv_heads(file: GgufFile, kinds: list[str]) -> dict[str, list[Any]]:
    """Kind of layers → the numbers of heads of keys that its layers have, by an entry for each layer or for all; None
    for a layer of which the file says nothing."""
    found = file.of_model("attention.head_count_kv")
    each = found if isinstance(found, list) else [found] * len(kinds)
    counts: dict[str, set[Any]] = {kind: set() for kind in kinds}
    for kind, count in zip_longest(kinds, each[: len(kinds)]):
        counts[kind].add(count)
    return {kind: sorted(own, key=str) for kind, own in counts.items()}


def rope_parameters(file: GgufFile) -> dict[str, Any]:
    """`rope_parameters` of a config. ModelError for a scaling that is not linear or YaRN."""
    theta = file.decimal("rope.freq_base", _THETA)
    kind = file.of_model("rope.scaling.type", "none")
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        found |= {"rope_type": "linear", "factor": file.decimal("rope.scaling.factor")}
    elif kind == "yarn":
        found |= _yarn(file)
    elif kind != "none":
        raise ModelError(f"{file.path} scales its rotary embedding by '{kind}'; linear and yarn are computed")
    return found


def _yarn(file: GgufFile) -> dict[str, Any]:
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor"):
        if (factor := file.decimal(key, 1.0)) != 1.0:
            raise ModelError(f"{file.path} sets {key} to {factor:g}, which tiermoe does not compute")
    found = {
        "rope_type": "yarn",
        "factor": file.decimal("rope.scaling.factor"),
        "original_max_position_embeddings": file.count("rope.scaling.original_context_length"),
        "beta_fast": file.decimal("rope.scaling.yarn_beta_fast", _BETA_FAST),
        "beta_slow": file.decimal("rope.scaling.yarn_beta_slow", _BETA_SLOW),
    }
    if (factor := file.decimal("rope.scaling.yarn_attn_factor", 1.0)) != 1.0:
        found["attention_factor"] = factor
    if multiplier := file.decimal("rope.scaling.yarn_log_multiplier", 0.0):  # DeepSeek's mscale_all_dim, a tenth of it
        scale = rounded(10 * multiplier)
        found |= {"mscale": scale, "mscale_all_dim": scale}
    return found


def end_ids(file: GgufFile) -> list[int]:
    """Ids of the tokens that end an answer, the file's end token first."""
    tokens = file.strings("tokenizer.ggml.tokens")
    found = [file.token_id(name) for name in ("eos", "eot", "eom")]
    there = {token: index for index, token in enumerate(tokens) if token in _ENDS}
    if "<|return|>" in there and "<|call|>" in there:  # gpt-oss: it ends a message, not the answer
        there.pop("<|end|>", None)
    if "<|tool_response>" in there:  # Gemma 4: HTML's tag
        there.pop("</s>", None)
    return list(dict.fromkeys([*(token for token in found if token is not None), *there.values()]))


# tensors by which the frequencies of a rotary embedding are divided

FREQUENCIES = "rope_freqs.weight"
LONG_FACTORS = tuple(f"rope_factors_{reach}.weight" for reach in ("short", "long"))
"""Of models that were made for longer texts than they were first trained for (LongRoPE)."""


def divisors(file: GgufFile, name: str, columns: int) -> Tensor | None:
    """The tensor `name`: float32 (columns / 2), of heads of so many rotated columns; None where the file has none.
    ModelError where it is another type or shape."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.kind.name != "F32" or tensor.shape != (columns // 2,):
        raise ModelError(
            f"{file.path}: {name} is {tensor.kind.name} of shape {tensor.shape}, not F32 of {columns // 2} factors; "
            f"{AGAIN}"
        )
    with closing(FileReader()) as reader:
        return reader.read(tensor.file, tensor.offset, tensor.nbytes, name).view(torch.float32)
