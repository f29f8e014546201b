"""What a GGUF file's model is made of, from its config and the names and shapes of its tensors alone: no modelling code
of transformers is imported for it. Whatever is not as its architecture has it is left to that code to judge."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from tiermoe.model.architectures import ARCHITECTURES
from tiermoe.model.discovery import top_k
from tiermoe.model.linear_attention import delta_sizes, is_linear
from tiermoe.store.gguf.checkpoint import GgufCheckpoint
from tiermoe.store.outline import DenseTensor, Outline
from tiermoe.types import MoeLayer, Part

Shapes = Iterator[tuple[str, tuple[int, ...]]]

_SMALLEST = 4096  # elements of a linear layer that is packed
_TABLE, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_ROUTERS = ("mlp.gate.weight", "mlp.router.weight")
_CORRECTION = "e_score_correction_bias"
_ALPHA = 1.702  # GptOssExperts


def outline_of(checkpoint: GgufCheckpoint, config: Any, dtype: torch.dtype) -> Outline | None:
    """None where the file is not as its architecture has it, where transformers' code decodes the family, or in
    float16, in which transformers keeps some modules in float32."""
    gate = _gate(config) if config.model_type in ARCHITECTURES else None
    if gate is None or dtype == torch.float16:
        return None
    layers = [_layer(config, index) for index in range(config.num_hidden_layers) if not _is_dense(config, index)]
    experts = {f"{layer.name}.{part.name}": (layer.experts, *part.shape) for layer in layers for part in layer.parts}
    dense = dict(_dense(config))
    found = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    if found != experts | dense or not layers:
        return None
    tied = {_OUTPUT: _TABLE} if config.tie_word_embeddings else {}
    wide = _wide(config)
    tensors = {
        path: _tensor(path, shape, torch.float32 if path.endswith(wide) else dtype) for path, shape in dense.items()
    }
    tensors |= {path: DenseTensor(None, dense[source], dtype, dtype) for path, source in tied.items()}
    return Outline(
        layers=layers,
        sources=tuple({part.name: (f"{layer.name}.{part.name}",) for part in layer.parts} for layer in layers),
        tensors=tensors,
        tied=tied,
        packable=tuple(path.removesuffix(".weight") for path, shape in dense.items() if _is_packable(path, shape)),
        table=None if tied else _TABLE,
        tables={},
        dense_bytes=sum(math.prod(shape) * tensors[path].dtype.itemsize for path, shape in dense.items()),
        dense_keys=tuple(name for name in checkpoint.tensors if name not in experts),
        gate=gate,
        whole=True,
    )


def _gate(config: Any) -> tuple[Any, ...] | None:
    if config.model_type == "gpt_oss":
        return ("clamped in halves", float(config.swiglu_limit), _ALPHA)
    return ("silu",) if getattr(config, "hidden_act", None) == "silu" else None


def _wide(config: Any) -> tuple[str, ...]:
    """Ends of the parameters that transformers keeps in float32."""
    return {"ernie4_5_moe": (_CORRECTION, "mlp.gate.weight"), "minimax_m2": ()}.get(config.model_type, (_CORRECTION,))


def _tensor(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> DenseTensor:
    return DenseTensor(path, shape, dtype, dtype)


def _is_packable(path: str, shape: tuple[int, ...]) -> bool:
    linear = len(shape) == 2 and path != _TABLE and not path.endswith(_ROUTERS)
    return linear and math.prod(shape) >= _SMALLEST


def _is_dense(config: Any, layer: int) -> bool:
    first = getattr(config, "first_k_dense_replace", 0) or getattr(config, "moe_layer_start_index", 0)
    return layer < first or layer in getattr(config, "mlp_only_layers", [])


def _experts(config: Any) -> int:
    return int(next(getattr(config, name) for name in _COUNTS if hasattr(config, name)))


_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def _inner(config: Any) -> int:
    own = getattr(config, "moe_intermediate_size", None)
    return int(config.intermediate_size if own is None else own)


def _layer(config: Any, index: int) -> MoeLayer:
    hidden, inner = config.hidden_size, _inner(config)
    parts = [Part("gate_up_proj", (2 * inner, hidden)), Part("down_proj", (hidden, inner))]
    if config.model_type == "gpt_oss":
        parts = [each for part in parts for each in (part, Part(f"{part.name}_bias", part.shape[:1]))]
    return MoeLayer(f"model.layers.{index}.mlp.experts", _experts(config), top_k(config, index), tuple(parts))


def _dense(config: Any) -> Shapes:
    """All parameters that are no expert's, with their shapes."""
    hidden = config.hidden_size
    yield _TABLE, (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    for index in range(config.num_hidden_layers):
        for name, shape in _of_layer(config, index):
            yield f"model.layers.{index}.{name}", shape
    if not config.tie_word_embeddings:
        yield _OUTPUT, (config.vocab_size, hidden)


def _of_layer(config: Any, index: int) -> Shapes:
    hidden, kind = config.hidden_size, config.model_type
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield from _attention(config, index)
    if _is_dense(config, index):
        yield from _three("mlp", hidden, config.intermediate_size)
        return
    router = "mlp.router" if kind == "gpt_oss" else "mlp.gate"
    yield f"{router}.weight", (_experts(config), hidden)
    if kind == "gpt_oss":
        yield f"{router}.bias", (_experts(config),)
    if kind in ("deepseek_v3", "glm4_moe"):
        yield f"{router}.{_CORRECTION}", (_experts(config),)
    if kind == "minimax_m2":
        yield f"mlp.{_CORRECTION}", (_experts(config),)
    if kind == "ernie4_5_moe":
        yield f"{router}.moe_statics.{_CORRECTION}", (1, _experts(config))
    yield from _shared(config)


def _shared(config: Any) -> Shapes:
    """Of the shared experts, where there are some."""
    hidden = config.hidden_size
    if hasattr(config, "shared_expert_intermediate_size"):
        yield from _three("mlp.shared_expert", hidden, config.shared_expert_intermediate_size)
        yield "mlp.shared_expert_gate.weight", (1, hidden)
        return
    count = getattr(config, "n_shared_experts", 0) or getattr(config, "moe_num_shared_experts", 0)
    if count:
        yield from _three("mlp.shared_experts", hidden, count * _inner(config))


def _three(prefix: str, hidden: int, inner: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


def _attention(config: Any, index: int) -> Shapes:
    if is_linear(config, index):
        return _linear(config)
    return _latent(config) if hasattr(config, "kv_lora_rank") else _grouped(config)


def _grouped(config: Any) -> Shapes:
    hidden, heads, kind = config.hidden_size, config.num_attention_heads, config.model_type
    head = getattr(config, "head_dim", None) or hidden // heads
    rows = {"q": heads * head, "k": config.num_key_value_heads * head, "v": config.num_key_value_heads * head}
    out, gated = rows["q"], ARCHITECTURES[kind].gated
    whole = bool(getattr(config, "attention_bias", False))
    for name, count in rows.items():
        yield f"self_attn.{name}_proj.weight", (2 * count if gated and name == "q" else count, hidden)
        if whole or getattr(config, "qkv_bias", False):
            yield f"self_attn.{name}_proj.bias", (count,)
    yield "self_attn.o_proj.weight", (hidden, out)
    if whole and kind != "glm4_moe":
        yield "self_attn.o_proj.bias", (hidden,)
    if kind == "gpt_oss":
        yield "self_attn.sinks", (heads,)
    across = ARCHITECTURES[kind].norm_all_heads
    if across or kind in ("qwen3_moe", "qwen3_5_moe_text") or getattr(config, "use_qk_norm", False):
        yield "self_attn.q_norm.weight", (out if across else head,)
        yield "self_attn.k_norm.weight", (rows["k"] if across else head,)


def _linear(config: Any) -> Shapes:
    sizes, hidden = delta_sizes(config), config.hidden_size
    yield "linear_attn.in_proj_qkv.weight", (sizes.channels, hidden)
    yield "linear_attn.in_proj_z.weight", (sizes.values, hidden)
    yield "linear_attn.in_proj_b.weight", (sizes.heads, hidden)
    yield "linear_attn.in_proj_a.weight", (sizes.heads, hidden)
    yield "linear_attn.conv1d.weight", (sizes.channels, 1, sizes.kept + 1)
    yield "linear_attn.A_log", (sizes.heads,)
    yield "linear_attn.dt_bias", (sizes.heads,)
    yield "linear_attn.norm.weight", (sizes.value_columns,)
    yield "linear_attn.out_proj.weight", (hidden, sizes.values)


def _latent(config: Any) -> Shapes:
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.q_lora_rank:
        yield "self_attn.q_a_proj.weight", (config.q_lora_rank, hidden)
        yield "self_attn.q_a_layernorm.weight", (config.q_lora_rank,)
        yield "self_attn.q_b_proj.weight", (heads * key, config.q_lora_rank)
    else:
        yield "self_attn.q_proj.weight", (heads * key, hidden)
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent + config.qk_rope_head_dim, hidden)
    yield "self_attn.kv_a_layernorm.weight", (latent,)
    yield "self_attn.kv_b_proj.weight", (heads * (config.qk_nope_head_dim + config.v_head_dim), latent)
    yield "self_attn.o_proj.weight", (hidden, heads * config.v_head_dim)
