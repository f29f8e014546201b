"""What a GGUF file's model is made of, from its config and the names and shapes of its tensors alone: no modelling code
of transformers is imported for it. Whatever is not as its architecture has it is left to that code to judge."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from tiermoe.model.discovery import top_k
from tiermoe.store.gguf.checkpoint import GgufCheckpoint
from tiermoe.store.outline import DenseTensor, Outline
from tiermoe.types import MoeLayer, Part

Shapes = Iterator[tuple[str, tuple[int, ...]]]

_SMALLEST = 4096  # elements of a linear layer that is packed
_TABLE, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_ROUTERS = ("mlp.gate.weight", "mlp.router.weight")
_WIDE = "e_score_correction_bias"  # transformers keeps it in float32
_ALPHA = 1.702  # GptOssExperts


def outline_of(checkpoint: GgufCheckpoint, config: Any, dtype: torch.dtype) -> Outline | None:
    """None where the file is not as its architecture has it, or in float16, in which transformers keeps some modules in
    float32."""
    gate = _gate(config)
    if gate is None or dtype == torch.float16:
        return None
    layers = [_layer(config, index) for index in range(config.num_hidden_layers) if not _is_dense(config, index)]
    experts = {f"{layer.name}.{part.name}": (layer.experts, *part.shape) for layer in layers for part in layer.parts}
    dense = dict(_dense(config))
    found = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    if found != experts | dense or not layers:
        return None
    tied = {_OUTPUT: _TABLE} if config.tie_word_embeddings else {}
    tensors = {path: _tensor(path, shape, dtype) for path, shape in dense.items()}
    tensors |= {path: DenseTensor(None, dense[source], dtype, dtype) for path, source in tied.items()}
    return Outline(
        layers=layers,
        sources=tuple({part.name: (f"{layer.name}.{part.name}",) for part in layer.parts} for layer in layers),
        tensors=tensors,
        tied=tied,
        packable=tuple(path.removesuffix(".weight") for path, shape in dense.items() if _is_packable(path, shape)),
        table=None if tied else _TABLE,
        dense_bytes=sum(math.prod(shape) * tensors[path].dtype.itemsize for path, shape in dense.items()),
        dense_keys=tuple(name for name in checkpoint.tensors if name not in experts),
        gate=gate,
        whole=True,
    )


def _gate(config: Any) -> tuple[Any, ...] | None:
    if config.model_type == "gpt_oss":
        return ("clamped in halves", float(config.swiglu_limit), _ALPHA)
    return ("silu",) if config.hidden_act == "silu" else None


def _tensor(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> DenseTensor:
    kept = torch.float32 if path.endswith(_WIDE) else dtype
    return DenseTensor(path, shape, kept, kept)


def _is_packable(path: str, shape: tuple[int, ...]) -> bool:
    linear = len(shape) == 2 and path != _TABLE and not path.endswith(_ROUTERS)
    return linear and math.prod(shape) >= _SMALLEST


def _is_dense(config: Any, layer: int) -> bool:
    return layer < getattr(config, "first_k_dense_replace", 0) or layer in getattr(config, "mlp_only_layers", [])


def _experts(config: Any) -> int:
    return int(next(getattr(config, name) for name in _COUNTS if hasattr(config, name)))


_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _inner(config: Any) -> int:
    return int(getattr(config, "moe_intermediate_size", config.intermediate_size))


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
    yield from _latent(config) if hasattr(config, "kv_lora_rank") else _grouped(config)
    if _is_dense(config, index):
        yield from _three("mlp", hidden, config.intermediate_size)
        return
    router = "mlp.router" if kind == "gpt_oss" else "mlp.gate"
    yield f"{router}.weight", (_experts(config), hidden)
    if kind == "gpt_oss":
        yield f"{router}.bias", (_experts(config),)
    if kind == "deepseek_v3":
        yield f"{router}.{_WIDE}", (_experts(config),)
    if kind.startswith("deepseek"):
        yield from _three("mlp.shared_experts", hidden, config.n_shared_experts * _inner(config))
    if kind == "qwen2_moe":
        yield from _three("mlp.shared_expert", hidden, config.shared_expert_intermediate_size)
        yield "mlp.shared_expert_gate.weight", (1, hidden)


def _three(prefix: str, hidden: int, inner: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


def _grouped(config: Any) -> Shapes:
    hidden, heads, kind = config.hidden_size, config.num_attention_heads, config.model_type
    head = getattr(config, "head_dim", None) or hidden // heads
    rows = {"q": heads * head, "k": config.num_key_value_heads * head, "v": config.num_key_value_heads * head}
    whole = bool(getattr(config, "attention_bias", False))
    for name, count in rows.items():
        yield f"self_attn.{name}_proj.weight", (count, hidden)
        if whole or getattr(config, "qkv_bias", False):
            yield f"self_attn.{name}_proj.bias", (count,)
    yield "self_attn.o_proj.weight", (hidden, rows["q"])
    if whole:
        yield "self_attn.o_proj.bias", (hidden,)
    if kind == "gpt_oss":
        yield "self_attn.sinks", (heads,)
    if kind in ("qwen3_moe", "olmoe"):
        yield "self_attn.q_norm.weight", (head if kind == "qwen3_moe" else rows["q"],)
        yield "self_attn.k_norm.weight", (head if kind == "qwen3_moe" else rows["k"],)


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
