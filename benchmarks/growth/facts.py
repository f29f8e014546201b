"""Sizes of what is measured, for the reasons of bends."""

from typing import Any

from benchmarks.growth.points import Model, random_model
from benchmarks.growth.reasons import Facts
from benchmarks.random_moe import Shape
from tiermoe.errors import ConfigError
from tiermoe.model.blueprint import inspect_model
from tiermoe.model.hub import resolve_model
from tiermoe.process.bandwidth import last_cache_bytes

_ITEM = 2  # bytes of a key's or value's number in bfloat16


def model_of(name: str | None, shape: Shape) -> Model:
    """The model along prompts and budgets: the one that was named, or a random one. ConfigError where layers differ."""
    if name is None:
        return random_model(shape)
    layers = inspect_model(resolve_model(name), name).layers
    if len({(layer.experts, layer.top_k) for layer in layers}) > 1:
        raise ConfigError(f"the MoE layers of {name} differ in experts; only models with equal layers have these axes")
    return Model(len(layers), layers[0].experts, layers[0].top_k)


def facts_of(model: Model, chunk: int) -> Facts:
    """What is known of the model: a named one's arithmetic is not."""
    if model.shape is None:
        return Facts(last_cache_bytes(), chunk)
    return Facts(last_cache_bytes(), chunk, **_arithmetic(model.shape))


def _arithmetic(shape: Shape) -> dict[str, Any]:
    """Of a token in all layers: two floating-point operations for each weight used; for each position attended to, a
    product with its key and one with its value in each head."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    dense = shape.hidden * (2 * queries + 2 * keys + shape.experts)
    experts = shape.top_k * 3 * shape.hidden * shape.inner
    return {
        "flops": 2.0 * shape.layers * (dense + experts),
        "attended": 4.0 * shape.layers * queries,
        "kv_bytes": 2 * shape.layers * keys * _ITEM,
    }
