"""Experts of a model in a GGUF file: the tensors that they lie in, and their values for packing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_checkpoint import GgufCheckpoint, Parameter, Stacked
from tiermoe.formats.gguf_file import GgufFile, GgufTensor
from tiermoe.model.gguf.shapes import AGAIN
from tiermoe.types import MoeLayer, Part, Segment

FIRST, UNGATED, SECOND = "gate_up_proj", "up_proj", "down_proj"
"""The names of a layer's stacked expert matrices in all families; the first has no gate in some."""
_CONVERTED = 12  # bytes a weight: blocks, float32, and joined in the compute dtype


def expert_parameters(file: GgufFile, layer: int, block: str) -> dict[str, Parameter]:
    """The stacked matrices and biases of a layer's experts. ModelError where one is missing."""
    found: dict[str, Parameter] = {}
    for suffix, end in (("weight", ""), ("bias", "_bias")):
        there = {
            matrix: file.tensors[name]
            for matrix in ("gate_up", "gate", "up", "down")
            if (name := f"blk.{layer}.ffn_{matrix}_exps.{suffix}") in file.tensors
        }
        if suffix == "bias" and not there:
            continue
        first = [there[matrix] for matrix in ("gate_up", "gate", "up") if matrix in there]
        if "down" not in there or there.keys() - {"down"} not in ({"gate_up"}, {"gate", "up"}, {"up"}):
            raise ModelError(
                f"{file.path} holds of layer {layer}'s experts {_named(there)} ({suffix}), not gate, up and down; "
                f"download it again, or convert the model with a current llama.cpp"
            )
        dimensions = 3 if suffix == "weight" else 2
        for matrix, tensor in there.items():
            if len(tensor.shape) != dimensions or tensor.shape[0] != there["down"].shape[0]:
                raise ModelError(
                    f"{file.path}: the {suffix} {matrix} of layer {layer}'s experts has shape {tensor.shape}; {AGAIN}"
                )
        prefix, name = f"model.layers.{layer}.{block}", UNGATED if first == [there.get("up")] else FIRST
        found |= {f"{prefix}.{name}{end}": Stacked(tuple(first)), f"{prefix}.{SECOND}{end}": Stacked((there["down"],))}
    return found


def _named(there: Mapping[str, GgufTensor]) -> str:
    return ", ".join(there) or "nothing"


class GgufExperts:
    """`formats.source.ExpertSource` of a GGUF file. model: on the meta device, with `shells` for experts by path.
    Matrices are (out, in) whatever the family's own are, and gate comes before up. ModelError where config and tensors
    do not belong together."""

    def __init__(
        self, model: Any, shells: Mapping[str, Any], checkpoint: GgufCheckpoint, dtype: torch.dtype, top_k: int
    ) -> None:
        self.checkpoint, self.dtype = checkpoint, dtype
        self.layers = [_layer_of(name, shell, top_k) for name, shell in shells.items()]
        self.expert_keys = {f"{layer.name}.{part.name}" for layer in self.layers for part in layer.parts}
        self._check(model)

    def direct_key(self, parameter: str) -> str | None:
        """The checkpoint key that becomes a dense parameter: its own."""
        return parameter if parameter in self.checkpoint and parameter not in self.expert_keys else None

    def row_keys(self, parameter: str) -> tuple[str, ...]:
        """The checkpoint keys that hold a dense parameter's rows: its own."""
        direct = self.direct_key(parameter)
        return () if direct is None else (direct,)

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
        """Largest memory of `read` beside the result, in bytes."""
        return _CONVERTED * max(math.prod(part.shape) for layer in self.layers for part in layer.parts)

    def in_place(self, layer: int, expert: int) -> list[Segment] | None:
        """None: `formats.source` has the places of experts, with their types."""

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
