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
