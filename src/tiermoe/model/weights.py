"""Dense weights of a decoder, by the paths that they have in a transformers model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding

from tiermoe.errors import ModelError
from tiermoe.model.parts import LayerNorm, Linear, Norm, PackedLinear, PlainLinear, RootMeanSquare

_TEXT_PART = "model.language_model"
"""The path of the text part in a larger model."""


class Weights(Protocol):
    """Dense weights by path: of a store (`stored_weights.StoredWeights`), of a loaded model (`ModuleWeights`), or
    shapes alone (`ShapesOnly`)."""

    def has(self, path: str) -> bool:
        """Whether there is such a module or parameter."""

    def tensor(self, path: str) -> Tensor:
        """A parameter or buffer."""

    def linear(self, path: str) -> Linear:
        """A linear layer, packed or not."""

    def embedding(self, path: str) -> Callable[[Tensor], Tensor]:
        """An embedding, without a scale of its own: int64 (...) → (..., H)."""


@dataclass(frozen=True, slots=True)
class NormKind:
    """The norm that a family has everywhere: by the root of the mean square, but for `layer`."""

    late: bool = False  # of `RootMeanSquare`, as the next two
    centred: bool = False
    by_kernel: bool = True
    layer: bool = False  # `LayerNorm`
    epsilon: str = "rms_norm_eps"  # the config's name of it


class Scope:
    """Weights below a path of a model ('model.layers.3'): what a family's file builds blocks of.

    A block states the shape of each weight that it takes. ModelError if a weight has another one: config and weights
    do not belong together. hidden: columns of the hidden states. dtype: of the model. epsilon: of its norms."""

    def __init__(self, weights: Weights, config: Any, dtype: torch.dtype, norms: NormKind, path: str = "") -> None:
        self._weights, self._config, self._norms, self._path = weights, config, norms, path
        self.hidden, self.dtype = int(config.hidden_size), dtype
        self.epsilon = float(getattr(config, norms.epsilon))

    def at(self, path: str) -> Scope:
        """The weights below `path` in this one."""
        return Scope(self._weights, self._config, self.dtype, self._norms, self.path(path))

    def path(self, name: str) -> str:
        """The path in the model of what has this name here."""
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: str) -> bool:
        return self._weights.has(self.path(name))

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A parameter or buffer."""
        found = self._weights.tensor(self.path(name))
        self._check(name, tuple(found.shape), shape)
        return found

    def flat(self, name: str, size: int) -> Tensor:
        """A parameter of so many numbers, whatever its dimensions."""
        found = self._weights.tensor(self.path(name))
        self._check(name, (found.numel(),), (size,))
        return found.flatten()

    def number(self, name: str) -> float:
        """A parameter of one number."""
        found = self._weights.tensor(self.path(name))
        return 1.0 if found.is_meta else float(found)

    def linear(self, name: str, out: int, in_: int) -> Linear:
        """A linear layer, x (T, in) → (T, out), packed or not, with the bias if there is one."""
        found = self._weights.linear(self.path(name))
        self._check(f"{name}.weight", (found.packed.out, found.packed.in_), (out, in_))
        return found

    def table(self, name: str, experts: int) -> Tensor:
        """A table of tokens' experts, int64 (vocabulary, K). ModelError if it names one that a layer of so many does
        not have."""
        found = self._weights.tensor(self.path(name))
        least, most = (0, 0) if found.is_meta else (int(each) for each in torch.aminmax(found))
        if least < 0 or most >= experts:
            raise ModelError(
                f"{self.path(name)} names experts from {least} to {most}, and the layer has {experts}; download the "
                f"model again"
            )
        return found

    def embedding(self, name: str) -> Callable[[Tensor], Tensor]:
        """A table: int64 (...) → (..., its columns)."""
        return self._weights.embedding(self.path(name))

    def norm(self, name: str, columns: int | None = None, epsilon: float | None = None, groups: int = 1) -> Norm:
        """A norm of so many columns, None: of hidden states. epsilon: None: the config's. groups: so many groups of
        columns are normed each by itself: (..., groups, columns)."""
        epsilon, columns = self.epsilon if epsilon is None else epsilon, self.hidden if columns is None else columns
        weight, of = self.tensor(f"{name}.weight", groups * columns), self._norms
        weight = weight if groups == 1 else weight.view(groups, -1)
        if of.layer:
            return LayerNorm(weight, self.tensor(f"{name}.bias", columns), epsilon)
        return RootMeanSquare(weight, epsilon, of.late, of.centred, of.by_kernel)

    def norm_without_weight(self, columns: int) -> Norm:
        """A norm of so many columns whose weight is 1."""
        return RootMeanSquare(torch.ones(columns, dtype=self.dtype), self.epsilon, late=True)

    def _check(self, name: str, found: tuple[int, ...], asked: tuple[int, ...]) -> None:
        if found != asked:
            raise ModelError(
                f"{self.path(name)} has shape {found}, the config asks for {asked}; config and weights do not belong "
                f"together"
            )


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
    """The weights of a model's text part; `weights` itself if the model has no other parts."""
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


class ShapesOnly:
    """Weights of a model before anything of it is read: tensors of their shapes, without values. Blocks built of them
    say what a model takes: of memory, of its checkpoint.

    shapes: by path. dtype: of all. taken: the paths that a block has asked for, in order; linear: of them those of
    linear layers' matrices."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self._shapes, self._dtype = shapes, dtype
        self._known = known_paths(shapes)
        self.taken: dict[str, tuple[int, ...]] = {}
        self.matrices: list[str] = []

    def has(self, path: str) -> bool:
        return path in self._known

    def tensor(self, path: str) -> Tensor:
        if path not in self._shapes:
            raise ModelError(f"the checkpoint has no tensor {path}, which the config asks for; download it again")
        shape = self.taken[path] = self._shapes[path]
        return torch.empty(shape, dtype=self._dtype, device="meta")

    def linear(self, path: str) -> Linear:
        self.matrices.append(path)
        bias = self.tensor(f"{path}.bias") if self.has(f"{path}.bias") else None
        return PlainLinear(self.tensor(f"{path}.weight"), bias)

    def embedding(self, path: str) -> Callable[[Tensor], Tensor]:
        weight = self.tensor(f"{path}.weight")
        return lambda tokens: embedding(tokens, weight)


def known_paths(parameters: Mapping[str, Any]) -> set[str]:
    """The paths of parameters, and of the modules that have them."""
    split = (path.split(".") for path in parameters)
    return {".".join(names[:end]) for names in split for end in range(1, len(names) + 1)}
