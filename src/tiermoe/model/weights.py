"""Where a decoder's dense weights come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from tiermoe.model.linear import Linear, PackedLinear, PlainLinear


class Weights(Protocol):
    """Dense weights by the paths that they have in a transformers model."""

    def has(self, path: str) -> bool:
        """Whether there is such a module or parameter."""

    def tensor(self, path: str) -> Tensor:
        """A parameter or buffer."""

    def linear(self, path: str) -> Linear:
        """A linear layer, packed or not."""

    def embedding(self, path: str) -> Callable[[Tensor], Tensor]:
        """The input embedding: int64 (T) → (T, H)."""


class TextPart:
    """The weights of a larger model's text part, by the paths that they have in a text model."""

    def __init__(self, whole: Weights) -> None:
        self._whole = whole

    def has(self, path: str) -> bool:
        """Whether there is such a module or parameter."""
        return self._whole.has(_inside(path))

    def tensor(self, path: str) -> Tensor:
        """A parameter or buffer."""
        return self._whole.tensor(_inside(path))

    def linear(self, path: str) -> Linear:
        """A linear layer, packed or not."""
        return self._whole.linear(_inside(path))

    def embedding(self, path: str) -> Callable[[Tensor], Tensor]:
        """The input embedding: int64 (T) → (T, H)."""
        return self._whole.embedding(_inside(path))


def text_part(weights: Weights) -> Weights:
    """Those of a model's text part; `weights` itself where it has no other parts."""
    return TextPart(weights) if weights.has(_INSIDE) else weights


_INSIDE = "model.language_model"


def _inside(path: str) -> str:
    first, _, rest = path.partition(".")
    return f"{_INSIDE}.{rest}" if first == "model" else path


class ModuleWeights:
    """Those of a transformers model that is loaded. Names are paths of its modules."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def has(self, path: str) -> bool:
        """Whether there is such a module or parameter."""
        owner: Any = self._model
        for name in path.split("."):
            owner = owner[int(name)] if name.isdigit() else getattr(owner, name, None)
            if owner is None:
                return False
        return True

    def tensor(self, path: str) -> Tensor:
        """A parameter or buffer."""
        parent, _, name = path.rpartition(".")
        tensor: Tensor = getattr(self._model.get_submodule(parent), name)
        return tensor

    def linear(self, path: str) -> Linear:
        """A linear layer, packed or not."""
        module = self._model.get_submodule(path)
        return module if isinstance(module, PackedLinear) else PlainLinear(module.weight, module.bias)

    def embedding(self, path: str) -> Callable[[Tensor], Tensor]:
        """The input embedding: int64 (T) → (T, H)."""
        module: Callable[[Tensor], Tensor] = self._model.get_submodule(path)
        return module
