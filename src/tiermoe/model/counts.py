"""A config's counts are held against the tensors that are there, before anything is built by them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tiermoe.errors import ModelError
from tiermoe.store.outline import Outline
from tiermoe.store.source import TensorSource

_LAYERS = re.compile(r"layers?$")
_EXPERTS = re.compile(r"experts")
_SIZES = re.compile(r"(size|dim|heads|rank|vocab|columns|model|ff|state|groups?)$")
_FEW = 1024
"""Layers and experts that any config may name: parts that are never built have theirs too."""
_SMALL = 1 << 20
"""Rows and columns that any config may name: a few MiB are made of them at the most."""
_GENERATION: dict[Any, tuple[str, ...]] = {
    (int, float): ("temperature", "top_p", "repetition_penalty"),
    int: ("top_k", "eos_token_id", "bos_token_id", "pad_token_id", "do_sample"),
}
"""Kinds → fields of generation_config.json."""
_NUMBERED = re.compile(r"\.(\d{1,9})\.")


def check_counts(fields: Mapping[str, Any], tensors: Mapping[str, Any], file: Path) -> None:
    """ModelError where a config names more layers than the tensors' names have, or more experts, heads, rows or columns
    than the longest dimension of a tensor. fields: of the config, parts inside of it included."""
    for name, value in _numbers(fields):
        if _LAYERS.search(name):
            fits = value <= _FEW or value <= _layers(tensors)
        elif _EXPERTS.search(name) or _SIZES.search(name):
            fits = value <= (_FEW if _EXPERTS.search(name) else _SMALL) or value <= _longest(tensors)
        else:
            continue
        if not fits:
            raise ModelError(
                f"{file} says {name} {value:,}, which its {len(tensors):,} tensors of {_layers(tensors):,} layers and "
                f"up to {_longest(tensors):,} rows do not have; config and weights do not belong together"
            )


def _layers(tensors: Mapping[str, Any]) -> int:
    """By the first number in each tensor's name."""
    return 1 + max((int(found[1]) for name in tensors if (found := _NUMBERED.search(name))), default=-1)


def _longest(tensors: Mapping[str, Any]) -> int:
    return max((size for entry in tensors.values() for size in entry.shape), default=0)


def _numbers(fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        else:
            several = value if isinstance(value, list) else [value]
            yield from ((name, each) for each in several if isinstance(each, int | float))


def check_generation(fields: Any) -> None:
    """ValueError where generation_config.json is no object, or a value that is read of it has another kind."""
    if not isinstance(fields, dict):
        raise ValueError("it is no JSON object")
    for kinds, names in _GENERATION.items():
        for name in names:
            value = fields.get(name)
            several = value if isinstance(value, list) and name == "eos_token_id" else [value]
            if any(each is not None and not isinstance(each, kinds) for each in several):
                raise ValueError(f"{name} is {value!r}")


def check_outline(outline: Outline, checkpoint: TensorSource, directory: Path) -> None:
    """ModelError where a tensor has another shape than the config asks for, or a token uses no expert, or more than
    there are."""
    for path, tensor in outline.tensors.items():
        found = tensor.shape if tensor.key is None else tuple(checkpoint.tensors[tensor.key].shape)
        if found != tensor.shape:
            raise ModelError(
                f"{path} has shape {found} in {directory}, the config asks for {tensor.shape}; config and weights do "
                f"not belong together"
            )
    for layer in outline.layers:
        if not layer.expert_elements:
            raise ModelError(f"{directory} says that the experts of {layer.name} have no weights; download it again")
        if not 1 <= layer.top_k <= layer.experts:
            raise ModelError(
                f"{directory} says that a token uses {layer.top_k} of the {layer.experts} experts of {layer.name}; "
                f"download it again"
            )
