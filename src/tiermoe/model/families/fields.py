"""Fields of transformers' config that a GGUF file describes, in the parts that several families share. Sizes come from
the tensors' shapes if these tell them."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile, Strings, rounded
from tiermoe.formats.safetensors import FileReader

Config = dict[str, Any]
_SOFTMAX, SIGMOID = 1, 2
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
        "vocab_size": shape_of(file, "token_embd.weight", 2)[0],
        "hidden_size": file.count("embedding_length"),
        "num_hidden_layers": layer_count(file),
        "num_attention_heads": file.uniform_count("attention.head_count"),
        "max_position_embeddings": file.count("context_length"),
        "rms_norm_eps": file.decimal(f"attention.{_epsilon(file)}"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": rope_parameters(file),
        "bos_token_id": token_id(file, "bos"),
        "eos_token_id": end_ids(file) or None,
        "pad_token_id": token_id(file, "padding"),
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
        "n_routed_experts": expert_count(file),
        "n_shared_experts": file.count("expert_shared_count"),
        "moe_intermediate_size": expert_columns(file),
        "intermediate_size": dense_columns(file),
        "first_k_dense_replace": leading_dense(file),
        "routed_scaling_factor": file.decimal("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(file.of_model("expert_weights_norm", False)),
        "n_group": file.count("expert_group_count", 1),
        "topk_group": file.count("expert_group_used_count", 1),
    }


def window_layers(file: GgufFile) -> list[str]:
    """`layer_types` of a config by which layers have a window. ModelError where the file does not say."""
    slides, count = file.of_model("attention.sliding_window_pattern"), layer_count(file)
    if not isinstance(slides, list) or len(slides) < count:
        raise ModelError(f"{file.path} does not say which of its layers have a window; {AGAIN}")
    return ["sliding_attention" if each else "full_attention" for each in slides[:count]]


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
    found = [token_id(file, name) for name in ("eos", "eot", "eom")]
    there = {token: index for index, token in enumerate(tokens) if token in _ENDS}
    if "<|return|>" in there and "<|call|>" in there:  # gpt-oss: it ends a message, not the answer
        there.pop("<|end|>", None)
    if "<|tool_response>" in there:  # Gemma 4: HTML's tag
        there.pop("</s>", None)
    return list(dict.fromkeys([*(token for token in found if token is not None), *there.values()]))


def token_id(file: GgufFile, name: str) -> int | None:
    """The id of a token that the file names ('bos', 'eos', 'padding', …); None where it names none of its own."""
    token = file.entries.get(f"tokenizer.ggml.{name}_token_id")
    tokens = file.entries.get("tokenizer.ggml.tokens")
    return token if isinstance(token, int) and isinstance(tokens, Strings) and 0 <= token < tokens.count else None


# layers, experts and sizes by the names and shapes of tensors

AGAIN = "download it again"
"""What to do about a file that contradicts itself."""


def layer_count(file: GgufFile) -> int:
    """Layers, without those that predict several tokens. ModelError where there are more than tensors, or none."""
    layers = file.count("block_count") - file.count("nextn_predict_layers", 0)
    if not 0 < layers <= len(file.tensors):
        raise ModelError(f"{file.path} says that it has {layers:,} layers, of {len(file.tensors):,} tensors; {AGAIN}")
    return layers


def linear_layers(file: GgufFile) -> list[bool]:
    """Which layers have linear attention."""
    return [f"blk.{layer}.ssm_a" in file.tensors for layer in range(layer_count(file))]


def expert_count(file: GgufFile) -> int:
    """Experts of a layer."""
    return file.count("expert_count")


def dense_layers(file: GgufFile) -> list[int]:
    """Layers without a router."""
    return [layer for layer in range(layer_count(file)) if f"blk.{layer}.ffn_gate_inp.weight" not in file.tensors]


def leading_dense(file: GgufFile) -> int:
    """Dense layers before those with experts. ModelError where one comes after."""
    layers = dense_layers(file)
    if layers != list(range(len(layers))):
        raise ModelError(f"{file.path} has dense layers among those with experts: {', '.join(map(str, layers))}")
    return len(layers)


def expert_columns(file: GgufFile) -> int:
    """Columns between an expert's matrices."""
    return in_first_block(file, "ffn_down_exps.weight", 3)[2]


def dense_columns(file: GgufFile) -> int:
    """Columns between a dense layer's matrices; of no matter where there are none."""
    dense = dense_layers(file)
    return shape_of(file, f"blk.{dense[0]}.ffn_down.weight", 2)[1] if dense else expert_columns(file)


def in_first_block(file: GgufFile, name: str, dimensions: int) -> tuple[int, ...]:
    """The shape of a tensor in the first layer with experts."""
    dense = set(dense_layers(file))
    layer = next((layer for layer in range(layer_count(file)) if layer not in dense), 0)
    return shape_of(file, f"blk.{layer}.{name}", dimensions)


def shape_of(file: GgufFile, name: str, dimensions: int) -> tuple[int, ...]:
    """The shape of a tensor of so many dimensions. ModelError where there is none."""
    if name not in file.tensors:
        raise ModelError(f"{file.path} has no tensor {name}; convert the model again with a current llama.cpp")
    found = file.tensors[name].shape
    if len(found) != dimensions:
        raise ModelError(f"{file.path} has {name} of shape {found}, not of {dimensions} dimensions; {AGAIN}")
    return found


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
