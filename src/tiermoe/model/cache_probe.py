"""What a model's cache takes, asked of the model itself: a forward pass on the meta device, which computes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache of one sequence. fixed: bytes that it holds whatever the length (convolutions, recurrent
    states); per_token: more for each token that it keeps; window: of how many tokens at the most, None: of all."""

    fixed: int
    per_token: float
    window: int | None

    def nbytes(self, context: int, chunk: int) -> int:
        """Bytes after `context` tokens. A window is a view of all that was concatenated: the tokens before it stay
        until the next ones come."""
        window = self.window
        tokens = min(window - 1 + chunk, context) if window is not None and window < context else context
        return int(self.fixed + self.per_token * tokens)


def measured(model: Any, tokens: int) -> list[LayerCache] | None:
    """Of each layer of a skeleton's cache; `tokens` are enough for what keeps one of several. None where the model's
    code does not run on the meta device."""
    few, many = _cache_after(model, tokens), _cache_after(model, 2 * tokens)
    if few is None or many is None:
        return None
    found = []
    for (before, _), (after, window) in zip(few, many, strict=True):
        per_token = (after - before) / tokens
        found.append(LayerCache(round(before - per_token * tokens), per_token, window))
    return found


def _cache_after(model: Any, tokens: int) -> list[tuple[int, int | None]] | None:
    """(bytes, window) of each layer after so many tokens."""
    shells = [module for module in model.modules() if hasattr(module, "run_experts")]
    for shell in shells:
        shell.run_experts = _nothing
    try:
        with torch.no_grad():
            ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
            cache = model(input_ids=ids, use_cache=True).past_key_values
    except (RuntimeError, NotImplementedError):
        return None
    finally:
        for shell in shells:
            del shell.run_experts
    layers = [(_nbytes(layer), getattr(layer, "sliding_window", None)) for layer in cache.layers]
    return layers + [(_linear_nbytes(each), None) for each in _linear(cache)]


def bytes_of(cache: Any) -> int:
    """Bytes that a cache of transformers' holds."""
    return sum(map(_nbytes, getattr(cache, "layers", ()))) + sum(map(_linear_nbytes, _linear(cache)))


def _linear(cache: Any) -> Any:
    return getattr(cache, "linear_cache", ())


def _linear_nbytes(its: Any) -> int:
    return sum(part.nbytes for part in tensors_in(its))


def _nothing(hidden: Tensor, *_: Tensor) -> Tensor:
    return torch.zeros_like(hidden)


def _nbytes(layer: Any) -> int:
    return sum(each.untyped_storage().nbytes() for each in tensors_in(vars(layer)))


def tensors_in(held: Any) -> Iterator[Tensor]:
    """All tensors in a dict or a list, and in the objects in it that belong to a cache."""
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, dict):
        for each in held.values():
            yield from tensors_in(each)
    elif isinstance(held, list | tuple):
        for each in held:
            yield from tensors_in(each)
