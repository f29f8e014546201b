"""The experts of a model in a GGUF file: where they lie, and their values for who packs them anew."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tiermoe.errors import ModelError
from tiermoe.model.shells import is_shell
from tiermoe.store.gguf.checkpoint import GgufCheckpoint
from tiermoe.types import MoeLayer, Part, Segment

_CONVERTED = 12  # bytes a weight: blocks, float32, and joined in the compute dtype


class GgufExperts:
    """`store.source.ExpertSource` of a GGUF file. model: on the meta device with shells. Matrices are (out, in)
    whatever the family's own are, and gate comes before up. ModelError where config and tensors do not belong
    together."""

    def __init__(self, model: Any, checkpoint: GgufCheckpoint, dtype: torch.dtype, top_k: int) -> None:
        self.checkpoint, self.dtype = checkpoint, dtype
        shells = {name: module for name, module in model.named_modules() if is_shell(module)}
        self.layers = [_layer_of(name, shell, top_k) for name, shell in shells.items()]
        self.expert_keys = {f"{layer.name}.{part.name}" for layer in self.layers for part in layer.parts}
        self._check(model)

    def direct_key(self, parameter: str) -> str | None:
        """The checkpoint key that becomes a dense parameter: its own."""
        return parameter if parameter in self.checkpoint and parameter not in self.expert_keys else None

    def read(self, layer: int, expert: int) -> Mapping[str, torch.Tensor]:
        name = self.layers[layer].name
        return {
            part.name: self.checkpoint.read(f"{name}.{part.name}", expert)[0].to(self.dtype)
            for part in self.layers[layer].parts
        }

    def sources(self, layer: int) -> dict[str, tuple[str, ...]]:
        """Each part is a parameter of its own."""
        own = self.layers[layer]
        return {part.name: (f"{own.name}.{part.name}",) for part in own.parts}

    def reading_bytes(self) -> int:
        """The most that `read` holds beside what it returns."""
        return _CONVERTED * max(math.prod(part.shape) for layer in self.layers for part in layer.parts)

    def in_place(self, layer: int, expert: int) -> list[Segment] | None:
        """None: where experts lie is told with the types they lie in (`store.own_experts`)."""

    def _check(self, model: Any) -> None:
        entries = self.checkpoint.tensors
        wanted = {path: tuple(tensor.shape) for path, tensor in model.state_dict().items()}
        for layer in self.layers:
            wanted |= {f"{layer.name}.{part.name}": (layer.experts, *part.shape) for part in layer.parts}
        for path, shape in wanted.items():
            if path in entries and entries[path].shape != shape:
                raise ModelError(
                    f"{self.checkpoint.directory}: {path} has the shape {entries[path].shape}, by the file's entries "
                    f"it has {shape}; download it again"
                )
        missing = sorted(key for key in self.expert_keys if key not in entries)
        unknown = sorted(set(entries) - set(wanted))
        if missing or unknown:
            raise ModelError(
                f"{self.checkpoint.directory} {'lacks' if missing else 'holds'} {(missing or unknown)[0]}, which this "
                f"family {'has' if missing else 'has not'}; convert the model again with a current llama.cpp"
            )


def _layer_of(name: str, shell: Any, top_k: int) -> MoeLayer:
    parts = tuple(Part(part, shape) for part, shape in shell.expert_shapes.items())
    if shell.is_transposed:
        parts = tuple(replace(part, shape=part.shape[::-1]) if part.is_matrix else part for part in parts)
    return MoeLayer(name, shell.num_experts, top_k, parts)
