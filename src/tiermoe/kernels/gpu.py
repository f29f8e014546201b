"""GPU kernels: torch's own product and norm for plain weights, Triton's (`triton_kernels`) for packed ones, and a
token's experts with one launch for each matrix of all of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.errors import ConfigError
from tiermoe.formats.encoding import Encoding
from tiermoe.formats.expert_format import ExpertFormat, SlotMatrix
from tiermoe.formats.neurons import Sealed
from tiermoe.types import Part

Views = Mapping[str, Mapping[str, Tensor]]

KINDS = ("int8", "int6", "int4", "u2", "tcq2", "nl4", "nl3", "nl2")
"""How the names of the encodings begin that Triton's kernels read."""


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, late: bool) -> Tensor:
    """weight (H) times x (..., H) by the root of its mean square, by torch's fused operator. late: rounded to x's dtype
    after the product with the weight, else before and after it."""
    if late:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    return weight * F.rms_norm(x, weight.shape, None, epsilon)


def read_back(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in main memory: those of a GPU by one copy of all, the only time that the host waits. Integers below
    2^24, and floats of at most 32 bits."""
    if all(each.device.type == "cpu" for each in tensors):
        return list(tensors)
    together = torch.cat([each.reshape(-1).float() for each in tensors]).cpu()
    parts = torch.split(together, [each.numel() for each in tensors])
    return [part.view(each.shape).to(each.dtype) for part, each in zip(parts, tensors, strict=True)]


class PlainLinear:
    """The checkpoint's own weights."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        pass

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        return F.linear(x, slot["weight"])


class PackedLinear:
    """Slots of an encoding of `KINDS`. Raises ConfigError where Triton is not installed."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        self._encoding = encoding
        self._linear = triton().linear

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        how = self._encoding.in_c(out, in_)
        assert how is not None
        scales = slot[how.scales or how.weights]
        result: Tensor = self._linear(x, how.coding, how.group, slot[how.weights], scales, out)
        return result


def triton(module: str = "triton_kernels") -> Any:
    """A module of kernels, imported on first use: Triton exists for Linux alone, and a machine without a GPU needs none
    of it."""
    try:
        return importlib.import_module(f"tiermoe.kernels.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise ConfigError("packed weights on a GPU need Triton: pip install tiermoe[cuda]") from error


def addresses(starts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Where tensors of a GPU begin, int64 on `device`. Nobody waits for the kernels before it: the list is taken before
    the call returns."""
    return torch.tensor([each.data_ptr() for each in starts], dtype=torch.int64).to(device, non_blocking=True)


class GroupedExperts:
    """Experts of one format: two packed matrices and nothing else."""

    def __init__(self, form: ExpertFormat, first: SlotMatrix, second: SlotMatrix) -> None:
        self._first, self._second = first, second
        self._multiply: Callable[..., Tensor] = triton().grouped_linear
        start = form.slot.fields[0]
        assert start.offset == 0
        self._start = start.part, start.field.name

    def __call__(self, x: Tensor, views: Sequence[Views], activation: Callable[[Tensor], Tensor]) -> Tensor:
        """x (1, hidden) → (E, hidden). `views` are the fields of the E experts' slots. `activation` is called once, on
        a row for each expert, as transformers calls it where it multiplies several experts at a time."""
        part, field = self._start
        slots = addresses([each[part][field] for each in views], x.device)
        features = activation(self._multiply(x, slots, self._first, shared=True))
        return self._multiply(features, slots, self._second, shared=False)


def grouped_experts(form: ExpertFormat) -> GroupedExperts | None:
    """The grouped kernel of a format; None where it does not take the format: biases, matrices of 16 bits. Needs
    Triton."""
    found = [packed_matrix(form, part) for part in form.layer.parts]
    matrices = [matrix for matrix in found if matrix is not None]
    return GroupedExperts(form, *matrices) if len(matrices) == len(found) == 2 else None


def packed_matrix(form: ExpertFormat, part: Part) -> SlotMatrix | None:
    """A part of experts as the grouped kernels find it in their slots; None if they do not take it."""
    encoding = form.encodings.get(part.name)
    if isinstance(encoding, Sealed):
        encoding = encoding.inner
    if encoding is None or encoding.name.partition("/")[0] not in KINDS:
        return None
    how = encoding.in_c(*part.out_in)
    assert how is not None
    at = {placed.field.name: placed.offset for placed in form.slot.fields if placed.part == part.name}
    codes, scales = at[how.weights], at[how.scales or how.weights]
    return SlotMatrix(*part.out_in, how.coding, how.group, form.dtype, codes, scales)
