"""Outline of a model in a GGUF file, from its config and the names and shapes of its tensors alone, without
transformers' modelling code. A file that is not as its architecture has it is left to that code to judge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_checkpoint import GgufCheckpoint
from tiermoe.formats.outline import DenseTensor, Outline
from tiermoe.kernels.gates import usual_gate
from tiermoe.model.architecture import Architecture
from tiermoe.model.attention.grouped import GroupedSizes
from tiermoe.model.attention.kimi_delta import KimiDeltaSizes
from tiermoe.model.attention.latent import LatentSizes
from tiermoe.model.attention.linear import LinearSizes, is_linear
from tiermoe.model.attention.mamba_1 import mamba_sizes_of
from tiermoe.model.families.table import ARCHITECTURES
from tiermoe.model.gguf.experts import FIRST, SECOND, UNGATED
from tiermoe.types import MoeLayer, Part

Shapes = Iterator[tuple[str, tuple[int, ...]]]

_SMALLEST = 4096  # elements of a linear layer that is packed
_OUTPUT = "lm_head.weight"
_COMPUTED_WITH = ("mamba.dt_proj.weight",)
"""Ends of matrices that transformers' code takes as they are (`skeleton.takes_weight`)."""
_CORRECTION = "e_score_correction_bias"
_WIDE = {
    "ernie4_5_moe": (_CORRECTION, "mlp.gate.weight"),
    **dict.fromkeys(("minimax_m2", "minimax_m3_vl_text", "kimi_linear"), ()),
}
"""model_type → ends of the parameters that transformers keeps in float32, where they are not `_CORRECTION` alone."""
_FORGETTING = ".forget_gate."  # of Kimi's layers: what is called a gate is not packed (`Skeleton`)
_ALPHA = 1.702  # GptOssExperts


def outline_of(checkpoint: GgufCheckpoint, config: Any, dtype: torch.dtype) -> Outline | None:
    """The outline; None where the file is not as its architecture has it, where transformers' code decodes the family,
    or in float16, in which transformers keeps some modules in float32."""
    if config.model_type not in ARCHITECTURES or _gate(config) is None or dtype == torch.float16:
        return None
    of = ARCHITECTURES[config.model_type]
    if of.compressed or of.streams:  # what their blocks have is not stated here
        return None
    layers = [_layer(config, index) for index in range(config.num_hidden_layers) if not _is_dense(config, index)]
    dense = dict(_dense(config))
    found = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    if found != _experts_of(layers) | dense or not layers:
        return None
    table = _table(config)
    tied = {_OUTPUT: table} if config.tie_word_embeddings else {}
    return _outline(checkpoint, config, dtype, layers, dense, tied, None if tied else table)


def _table(config: Any) -> str:
    """The path of the input embedding's weight."""
    return f"model.{ARCHITECTURES[config.model_type].named('embed_tokens')}.weight"


def outline_of_head(
    checkpoint: GgufCheckpoint, config: Any, dtype: torch.dtype, beside: Mapping[str, tuple[int, ...]]
) -> Outline:
    """The outline of an MTP head, the last layer of a config. beside: path → shape of its tensors that are none of a
    layer's. ModelError where the file lacks a tensor, or has it in another shape."""
    last = config.num_hidden_layers - 1
    layers = [] if _is_dense(config, last) else [_layer(config, last)]
    dense = {f"model.layers.{last}.{name}": shape for name, shape in _of_layer(config, last)} | dict(beside)
    for path, shape in (_experts_of(layers) | dense).items():
        found = checkpoint.tensors[path].shape if path in checkpoint else None
        if found != shape:
            raise ModelError(
                f"{checkpoint.directory}: {path}, a tensor of the MTP head, has the shape {found} and not {shape}; "
                f"download it again, or use --draft lookup"
            )
    return _outline(checkpoint, config, dtype, layers, dense, {}, None)


def _experts_of(layers: Sequence[MoeLayer]) -> dict[str, tuple[int, ...]]:
    return {f"{layer.name}.{part.name}": (layer.experts, *part.shape) for layer in layers for part in layer.parts}


def _outline(
    checkpoint: GgufCheckpoint,
    config: Any,
    dtype: torch.dtype,
    layers: list[MoeLayer],
    dense: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    table: str | None,
) -> Outline:
    """dense: path → shape of the tensors that are no expert's."""
    unpacked = _table(config), f"{_router(ARCHITECTURES[config.model_type])}.weight", *_COMPUTED_WITH
    experts = _experts_of(layers)
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
        packable=tuple(
            path.removesuffix(".weight") for path, shape in dense.items() if _is_packable(path, shape, unpacked)
        ),
        table=table,
        tables={},
        joined={},
        dense_bytes=sum(math.prod(shape) * tensors[path].dtype.itemsize for path, shape in dense.items()),
        dense_keys=tuple(name for name in checkpoint.tensors if name not in experts),
        gate=_gate(config),
        whole=True,
    )


def _gate(config: Any) -> tuple[Any, ...] | None:
    alpha = _ALPHA if config.model_type == "gpt_oss" else getattr(config, "swiglu_alpha", None)
    if alpha is not None:
        return ("clamped in halves", float(config.swiglu_limit), float(alpha))
    found = usual_gate(getattr(config, "hidden_act", None)) or usual_gate(getattr(config, "mlp_hidden_act", None))
    return found.stored if found else None


def _wide(config: Any) -> tuple[str, ...]:
    """Ends of the parameters that transformers keeps in float32."""
    return _WIDE.get(config.model_type, (_CORRECTION,))


def _tensor(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> DenseTensor:
    return DenseTensor(path, shape, dtype, dtype)


def _is_packable(path: str, shape: tuple[int, ...], unpacked: tuple[str, ...]) -> bool:
    """unpacked: ends of matrices that stay as they are."""
    named = path.endswith(unpacked) or _FORGETTING in path
    return len(shape) == 2 and math.prod(shape) >= _SMALLEST and not named


def _is_dense(config: Any, layer: int) -> bool:
    if ARCHITECTURES[config.model_type].one_part:
        return bool(config.layer_types[layer] != "moe")
    if period := getattr(config, "expert_layer_period", 0):
        return bool(layer % period != config.expert_layer_offset)
    if (mixtures := getattr(config, "moe_layers", None)) is not None:
        return layer not in mixtures
    first = getattr(config, "first_k_dense_replace", 0) or getattr(config, "moe_layer_start_index", 0)
    kinds = getattr(config, "mlp_layer_types", None)
    return layer < first or layer in getattr(config, "mlp_only_layers", []) or bool(kinds and kinds[layer] == "dense")


def _experts(config: Any) -> int:
    return int(next(getattr(config, name) for name in _COUNTS if hasattr(config, name)))


_SHARED = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
_SHARED_INNER = ("moe_shared_expert_intermediate_size", "shared_intermediate_size")
_DENSE_INNER = ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size")
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def _inner(config: Any) -> int:
    own = getattr(config, "moe_intermediate_size", None)
    return int(config.intermediate_size if own is None else own)


def _layer(config: Any, index: int) -> MoeLayer:
    of, hidden, inner = ARCHITECTURES[config.model_type], config.hidden_size, _inner(config)
    columns = getattr(config, "moe_latent_size", None) or hidden
    first = Part(UNGATED, (inner, columns)) if of.gateless else Part(FIRST, (2 * inner, columns))
    parts = [first, Part(SECOND, (columns, inner))]
    if config.model_type == "gpt_oss":
        parts = [each for part in parts for each in (part, Part(f"{part.name}_bias", part.shape[:1]))]
    name = f"model.layers.{index}.{of.experts}"
    return MoeLayer(name, _experts(config), int(config.num_experts_per_tok), tuple(parts))


def _dense(config: Any) -> Shapes:
    """All parameters that are no expert's, with their shapes."""
    hidden = config.hidden_size
    yield _table(config), (config.vocab_size, hidden)
    for name, shape in _norm(ARCHITECTURES[config.model_type], "norm", hidden):
        yield f"model.{name}", shape
    for index in range(config.num_hidden_layers):
        for name, shape in _of_layer(config, index):
            yield f"model.layers.{index}.{name}", shape
    if not config.tie_word_embeddings:
        yield _OUTPUT, (config.vocab_size, hidden)
    if getattr(config, "lm_head_bias", False):
        yield "lm_head.bias", (config.vocab_size,)


def _norm(of: Architecture, name: str, hidden: int) -> Shapes:
    yield f"{of.named(name)}.weight", (hidden,)
    if of.layer_norm:
        yield f"{of.named(name)}.bias", (hidden,)


def _of_layer(config: Any, index: int) -> Shapes:
    of, hidden, kind = ARCHITECTURES[config.model_type], config.hidden_size, config.model_type
    yield from _norm(of, "input_layernorm", hidden)
    if not of.one_part:
        yield from _norm(of, "post_attention_layernorm", hidden)
    if of.attends(config, index):
        yield from _attention(config, index)
        if of.one_part:
            return
    if _is_dense(config, index):
        inner = next(getattr(config, name) for name in _DENSE_INNER if hasattr(config, name))
        yield from _matrices(of, of.block, hidden, inner)
        return
    router = _router(of)
    yield f"{router}.weight", (_experts(config), hidden)
    if kind == "gpt_oss":
        yield f"{router}.bias", (_experts(config),)
    if of.correction:
        yield f"{of.block}.{of.correction}", (1, _experts(config)) if kind == "ernie4_5_moe" else (_experts(config),)
    if of.latent_experts and config.moe_latent_size:
        before, behind = of.latent_experts
        yield f"{of.block}.{before}.weight", (config.moe_latent_size, hidden)
        yield f"{of.block}.{behind}.weight", (hidden, config.moe_latent_size)
    yield from _shared(of, config)


def _router(of: Architecture) -> str:
    return f"{of.block}.{of.gate}"


def _shared(of: Architecture, config: Any) -> Shapes:
    """Of the shared experts, where there are some."""
    hidden, shared = config.hidden_size, f"{of.block}.{of.shared}"
    if of.shared_beside:
        if columns := config.shared_intermediate_size:
            yield f"{of.shared_beside}.input_linear.weight", (2 * columns, hidden)
            yield f"{of.shared_beside}.output_linear.weight", (hidden, columns)
        return
    if of.shared_gate:
        yield from _matrices(of, shared, hidden, config.shared_expert_intermediate_size)
        yield f"{of.block}.{of.shared_gate}.weight", (1, hidden)
        return
    count = max((getattr(config, name) for name in _SHARED if hasattr(config, name)), default=1)
    if of.shared and count:
        own = next((size for name in _SHARED_INNER if (size := getattr(config, name, None)) is not None), None)
        yield from _matrices(of, shared, hidden, count * _inner(config) if own is None else own)


def _matrices(of: Architecture, prefix: str, hidden: int, inner: int) -> Shapes:
    """Of a dense block."""
    for name in of.first_matrices:
        yield f"{prefix}.{name}.weight", (2 * inner if of.fused_gate_up else inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


def _attention(config: Any, index: int) -> Shapes:
    of, hidden = ARCHITECTURES[config.model_type], config.hidden_size
    if is_linear(config, index) and of.mamba:
        for name, shape in mamba_sizes_of(of, config).weight_shapes(hidden).items():
            yield f"{of.named('mamba')}.{name}", shape
    elif is_linear(config, index):
        yield from (KimiDeltaSizes if of.kimi_delta else LinearSizes).of(config, index).weight_shapes(hidden).items()
    elif of.latent:
        yield from LatentSizes.of(of, config, index).weight_shapes(hidden, getattr(config, "q_lora_rank", None)).items()
    else:
        sizes = GroupedSizes.of(of, config, index)
        for name, shape in (*sizes.weight_shapes(hidden).items(), *_biases_and_norms(of, config, sizes)):
            yield f"{of.named('self_attn')}.{name}", shape


def _biases_and_norms(of: Architecture, config: Any, sizes: GroupedSizes) -> Shapes:
    """In the block of grouped attention, as transformers' code of the family has them."""
    kind, columns = config.model_type, {"q": sizes.heads * sizes.columns, "k": sizes.kv_heads * sizes.columns}
    all_projections = bool(getattr(config, "attention_bias", False))
    if all_projections or getattr(config, "qkv_bias", False):
        for name in "qkv":
            yield f"{name}_proj.bias", (columns["q" if name == "q" else "k"],)
    if all_projections and kind != "glm4_moe":
        yield "o_proj.bias", (config.hidden_size,)
    if (
        of.norm_all_heads
        or kind in ("qwen3_moe", "qwen3_5_moe_text", "exaone_moe", "minimax_m3_vl_text", "hy_v3", "mellum")
        or (getattr(config, "use_qk_norm", False) and not of.plain_norms)
    ):
        for name in "qk":
            yield f"{name}_norm.weight", (columns[name] if of.norm_all_heads else sizes.columns,)
