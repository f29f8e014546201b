"""Dense weights of a decoder, by the paths that they have in a transformers model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.nn.functional import embedding

from tiermoe.model.linear import Linear, PackedLinear, PlainLinear

_TEXT_PART = "model.language_model"
"""The path of the text part in a larger model."""


class Weights(Protocol):
    """Dense weights by path: of a store (`dense_weights.StoredWeights`), or of a loaded model (`ModuleWeights`)."""

    def has(self, path: str) -> bool:
        """Whether there is such a module or parameter."""

    def tensor(self, path: str) -> Tensor:
        """A parameter or buffer."""

    def linear(self, path: str) -> Linear:
        """A linear layer, packed or not."""

    def embedding(self, path: str) -> Callable[[Tensor], Tensor]:
        """An embedding, without a scale of its own: int64 (...) → (..., H)."""


class TextPart:
    """Weights of a larger model's text part, by the paths that they have in a text model."""

    def __init__(self, whole: Weights) -> None:
        self._whole = whole

    def has(self, path: str) -> bool:
        return self._whole.has(inside(path))

    def tensor(self, path: str) -> Tensor:
        return self._whole.tensor(inside(path))

    def linear(self, path: str) -> Linear:
        return self._whole.linear(inside(path))

    def embedding(self, path: str) -> Callable[[Tensor], Tensor]:
        return self._whole.embedding(inside(path))


def text_part(weights: Weights) -> Weights:
    """The weights of a model's text part; `weights` itself where the model has no other parts."""
    return TextPart(weights) if weights.has(_TEXT_PART) else weights


def inside(path: str) -> str:
    """The path in a larger model of what has this one in a text model."""
    first, _, rest = path.partition(".")
    return f"{_TEXT_PART}.{rest}" if first == "model" else path


class ModuleWeights:
    """Weights of a loaded transformers model; paths are those of its modules."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def has(self, path: str) -> bool:
        owner: Any = self._model
        for name in path.split("."):
            owner = owner[int(name)] if name.isdigit() else getattr(owner, name, None)
            if owner is None:
                return False
        return True

    def tensor(self, path: str) -> Tensor:
        parent, _, name = path.rpartition(".")
        tensor: Tensor = getattr(self._model.get_submodule(parent), name)
        return tensor

    def linear(self, path: str) -> Linear:
        module = self._model.get_submodule(path)
        return module if isinstance(module, PackedLinear) else PlainLinear(module.weight, module.bias)

    def embedding(self, path: str) -> Callable[[Tensor], Tensor]:
        module = self._model.get_submodule(path)
        on_disk: Callable[[Tensor], Tensor] | None = module.rows if module.weight.is_meta else None
        return on_disk or partial(embedding, weight=module.weight)
