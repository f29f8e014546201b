"""Gated experts in one call: first matrix, gate, second matrix, of one expert or of all that a token has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from tiermoe.kernels.gates import ClampedGate, gelu_gate, silu_gate
from tiermoe.kernels.native.matrix import MatrixForm, matrix_form
from tiermoe.native import ROWS, Coding, _native, available
from tiermoe.quant.plain import Plain
from tiermoe.quant.scratch import scratch
from tiermoe.store.layout import ExpertFormat
from tiermoe.types import Part

Views = Mapping[str, Mapping[str, Tensor]]


class Gate(IntEnum):
    """What lies between the matrices of an expert; the order is that of expert.h."""

    SILU = 0
    CLAMPED = 1
    CLAMPED_HALVES = 2
    GELU_TANH = 3


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """A matrix of an expert: the names of its part and of its bias's, if any, in a slot, and its form."""

    name: str
    form: MatrixForm
    bias: str | None

    def bias_in(self, views: Views) -> int:
        """The bias's address; 0 without one."""
        return views[self.bias]["weight"].data_ptr() if self.bias else 0


class GatedExperts:
    """Experts second(gate(first(x))) in bfloat16; first (2 I, H), second (H, I). `hidden`: H."""

    def __init__(self, first: ExpertMatrix, second: ExpertMatrix, gate: tuple[Gate, float, float]) -> None:
        """gate: with its limit and alpha, 0 where it has none."""
        self._first, self._second = first, second
        self.hidden, self._inner = second.form.out, second.form.in_
        self._gate = gate
        self.plain = Coding.BF16 in (first.form.coding, second.form.coding)

    def pack(self, views: Views) -> bytes:
        """What the kernel is told of the expert in a slot; valid as long as the slot lives."""
        first, second = self._first, self._second
        return _native.expert(
            first.form.pack(views[first.name]), second.form.pack(views[second.name]), first.bias_in(views),
            second.bias_in(views), *self._gate,
        )  # fmt: skip

    def absent(self) -> bytes:
        """What a kernel is told in the place of an expert that is not here."""
        return _native.expert(self._first.form.absent(), self._second.form.absent(), 0, 0, *self._gate)

    def __call__(self, x: Tensor, experts: Sequence[bytes], among_others: bool) -> Tensor:
        """x (M, H) through each of the packed `experts` → (experts, M, H). among_others: in a pass of several tokens,
        much of which torch computes; decides whose threads compute, and changes no value."""
        results = x.shape[0] * len(experts)
        return self._run(x, experts, None, results, among_others).view(len(experts), x.shape[0], self.hidden)

    def apart(self, x: Tensor, counts: list[int], experts: Sequence[bytes], among_others: bool) -> Tensor:
        """Each of the packed `experts` computes rows of its own: the first counts[0] rows of x (M, H) are the first
        one's, and so on → (M, H). A row's result depends on neither the other rows nor the other experts.
        among_others: see a call."""
        return self._run(x, experts, counts, x.shape[0], among_others)

    def _run(
        self, x: Tensor, experts: Sequence[bytes], counts: list[int] | None, results: int, among_others: bool
    ) -> Tensor:
        x = x.contiguous()
        rows, threads = x.shape[0], torch.get_num_threads()
        out = torch.empty((results, self.hidden), dtype=torch.bfloat16)
        inner = scratch.address("inner", 2 * results * self._inner)
        room = scratch.address("prepared", _native.prepared(experts[0], rows, results, threads))
        _native.experts(
            b"".join(experts), counts, x.data_ptr(), rows, inner, room, out.data_ptr(), threads, among_others
        )
        return out


def gated_experts(form: ExpertFormat, activation: Callable[[Tensor], Tensor]) -> GatedExperts | None:
    """The kernel of experts of a format; None where it cannot take their matrices, biases or activation."""
    first, second = (_matrix(form, part) for part in form.layer.parts if part.is_matrix)
    gate = _gate(activation)
    if first is None or second is None or gate is None:
        return None
    named = {first.name, second.name, first.bias, second.bias}
    if any(part.name not in named for part in form.layer.parts):
        return None
    up, down = first.form, second.form
    if down.in_ % ROWS or down.out % ROWS or (up.out, up.in_) != (2 * down.in_, down.out):
        return None
    return GatedExperts(first, second, gate)


def _gate(activation: Callable[[Tensor], Tensor]) -> tuple[Gate, float, float] | None:
    if isinstance(activation, ClampedGate):
        return Gate.CLAMPED_HALVES if activation.halves else Gate.CLAMPED, activation.limit, activation.alpha
    if activation is silu_gate:
        return Gate.SILU, 0.0, 0.0
    return (Gate.GELU_TANH, 0.0, 0.0) if activation is gelu_gate else None


def _matrix(form: ExpertFormat, part: Part) -> ExpertMatrix | None:
    encoding = form.encodings.get(part.name)
    if encoding is None and part.transposed:
        return None
    taken = matrix_form(encoding or Plain(), *part.out_in, form.dtype)
    return ExpertMatrix(part.name, taken, bias_of(form, part)) if taken else None


def bias_of(form: ExpertFormat, matrix: Part) -> str | None:
    """The name of the part that is a matrix's bias."""
    names = {f"{matrix.name}_bias", matrix.name.replace(".weight", ".bias")} - {matrix.name}
    return next((part.name for part in form.layer.parts if part.name in names), None)


def combines(output: Tensor) -> bool:
    """Whether `combine` takes outputs like this one (H)."""
    return output.dtype == torch.bfloat16 and output.device.type == "cpu" and output.numel() % 16 == 0 and available()


def combine(outputs: Sequence[Tensor], weights: list[float]) -> Tensor:
    """sum of weights[i] * outputs[i], in their order, rounded to bfloat16 after each product and each sum: the values
    that torch's separate operations give. outputs (H), contiguous, at least one → (1, H)."""
    return combine_rows([output.data_ptr() for output in outputs], weights, outputs[0].numel())


def combine_rows(addresses: list[int], weights: list[float], columns: int) -> Tensor:
    """`combine` of contiguous rows of so many columns in bfloat16 that lie at `addresses`, 0 where there is none → (1,
    columns)."""
    out = torch.empty((1, columns), dtype=torch.bfloat16)
    there = [each for each in zip(addresses, weights, strict=True) if each[0]]
    _native.combine([address for address, _ in there], [weight for _, weight in there], columns, out.data_ptr())
    return out


def combine_many(addresses: Tensor, weights: Tensor, columns: int) -> Tensor:
    """`combine` for each of T tokens → (T, columns). addresses: int64 (T, K) of contiguous rows of so many columns in
    bfloat16, in the order in which they are added, 0 where there is none; weights: float32 (T, K)."""
    tokens, k = addresses.shape
    out = torch.empty((tokens, columns), dtype=torch.bfloat16)
    _native.combine_many(
        addresses.data_ptr(), weights.data_ptr(), tokens, k, columns, out.data_ptr(), torch.get_num_threads()
    )
    return out
