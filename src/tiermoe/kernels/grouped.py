"""A token's experts on a GPU: one launch per matrix for all of them (`triton_grouped`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tiermoe.kernels.gpu.slot_matrix import SlotMatrix
from tiermoe.quant.encoding import Encoding
from tiermoe.quant.int2 import RowMajorInt2
from tiermoe.quant.int8 import Int8
from tiermoe.quant.rowmajor import RowMajorInt4
from tiermoe.store.layout import ExpertFormat
from tiermoe.types import Part

Views = Mapping[str, Mapping[str, Tensor]]


class GroupedExperts:
    """Experts of one format: two packed matrices and nothing else."""

    def __init__(self, form: ExpertFormat, first: SlotMatrix, second: SlotMatrix) -> None:
        from tiermoe.kernels.gpu.triton_grouped import grouped_linear

        self._first, self._second = first, second
        self._multiply = grouped_linear
        start = form.slot.fields[0]
        assert start.offset == 0
        self._start = start.part, start.field.name

    def __call__(self, x: Tensor, views: Sequence[Views], activation: Callable[[Tensor], Tensor]) -> Tensor:
        """x (1, hidden) → (E, hidden). `views` are the fields of the E experts' slots. `activation` is called once, on
        a row for each expert, as transformers calls it where it multiplies several experts at a time."""
        part, field = self._start
        addresses = torch.tensor([each[part][field].data_ptr() for each in views], dtype=torch.int64)
        # the list is taken before the call returns: nobody waits for the kernels before it
        slots = addresses.to(x.device, non_blocking=True)
        features = activation(self._multiply(x, slots, self._first, shared=True))
        return self._multiply(features, slots, self._second, shared=False)


def grouped_experts(form: ExpertFormat) -> GroupedExperts | None:
    """None where the launch does not take the format: biases, matrices of 16 bits, a CPU's layout. Needs Triton."""
    found = [_packed_matrix(form, part) for part in form.layer.parts]
    matrices = [matrix for matrix in found if matrix is not None]
    return GroupedExperts(form, *matrices) if len(matrices) == len(found) == 2 else None


def _packed_matrix(form: ExpertFormat, part: Part) -> SlotMatrix | None:
    taken = _bits_and_group(form.encodings.get(part.name))
    if taken is None:
        return None
    at = {placed.field.name: placed.offset for placed in form.slot.fields if placed.part == part.name}
    codes, zero = ("weight", "scale") if taken[0] == 8 else ("codes", "zero")
    ladders = at.get("ladders", at[codes])  # read at 2 bits alone
    return SlotMatrix(*part.out_in, *taken, form.dtype, at[codes], ladders, at["scale"], at[zero])


def _bits_and_group(encoding: Encoding | None) -> tuple[int, int] | None:
    """Of what a slot holds; None where the kernel does not read it."""
    if isinstance(encoding, (RowMajorInt4, RowMajorInt2)):
        return encoding.bits, encoding.group
    return (8, 1) if isinstance(encoding, Int8) else None
