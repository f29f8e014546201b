"""Experts with SiLU gates in one call: first matrix, gate, second matrix, of one expert or of all that a token has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tiermoe.kernels.native.matrix import MatrixForm, matrix_form
from tiermoe.native import ROWS, Coding, _native, available
from tiermoe.quant.encoding import Encoding
from tiermoe.quant.scratch import scratch
from tiermoe.types import Part


class GatedExperts:
    """Experts second(silu(gate) * up) in bfloat16, where gate and up are the halves of first(x).

    first (2 I, H), second (H, I): the forms of the matrices."""

    def __init__(self, names: tuple[str, str], first: MatrixForm, second: MatrixForm) -> None:
        self._matrices = tuple(zip(names, (first, second), strict=True))
        self._hidden, self._inner = second.out, second.in_

    def pack(self, views: Mapping[str, Mapping[str, Tensor]]) -> bytes:
        """What the kernel is told of the expert in a slot; valid as long as the slot lives."""
        return b"".join(form.pack(views[name]) for name, form in self._matrices)

    def absent(self) -> bytes:
        """What a kernel is told in the place of an expert that is not here."""
        return b"".join(form.absent() for _, form in self._matrices)

    def __call__(self, x: Tensor, experts: Sequence[bytes], among_others: bool) -> Tensor:
        """x (M, H) through each of the packed `experts` → (experts, M, H). among_others: in a pass of several tokens,
        much of which torch computes; decides whose threads compute, and changes no value."""
        results = x.shape[0] * len(experts)
        return self._run(x, experts, None, results, among_others).view(len(experts), x.shape[0], self._hidden)

    def apart(self, x: Tensor, counts: list[int], experts: Sequence[bytes], among_others: bool) -> Tensor:
        """Each of the packed `experts` computes rows of its own: the first counts[0] rows of x (M, H) are the first
        one's, and so on → (M, H). A row's result depends on neither the other rows nor the other experts."""
        return self._run(x, experts, counts, x.shape[0], among_others)

    def _run(
        self, x: Tensor, experts: Sequence[bytes], counts: list[int] | None, results: int, among_others: bool
    ) -> Tensor:
        x = x.contiguous()
        rows, threads = x.shape[0], torch.get_num_threads()
        out = torch.empty((results, self._hidden), dtype=torch.bfloat16)
        inner = scratch.address("inner", 2 * results * self._inner)
        sums = scratch.address("sums", _native.sums(experts[0], rows, results, threads))
        _native.experts(
            b"".join(experts), counts, x.data_ptr(), rows, inner, sums, out.data_ptr(), threads, among_others
        )
        return out


def gated_experts(
    first: Part, second: Part, encodings: Mapping[str, Encoding], dtype: torch.dtype
) -> GatedExperts | None:
    """The kernel of experts whose two matrices have these encodings; None where it cannot take them."""
    forms = []
    for part in (first, second):
        encoding = encodings.get(part.name)
        form = matrix_form(encoding, *part.out_in, dtype) if encoding and not part.transposed else None
        if form is None or form.coding != Coding.INT4:
            return None
        forms.append(form)
    up, down = forms
    if down.in_ % ROWS or (up.out, up.in_) != (2 * down.in_, down.out):
        return None
    return GatedExperts((first.name, second.name), up, down)


def combines(output: Tensor) -> bool:
    """Whether `combine` takes outputs like this one (H)."""
    return output.dtype == torch.bfloat16 and output.device.type == "cpu" and output.numel() % 16 == 0 and available()


def combine(outputs: Sequence[Tensor], weights: list[float]) -> Tensor:
    """sum of weights[i] * outputs[i], in their order, rounded to bfloat16 after each product and each sum: the values
    that torch's separate operations give. outputs (H), contiguous, at least one → (1, H)."""
    columns = outputs[0].numel()
    out = torch.empty((1, columns), dtype=torch.bfloat16)
    _native.combine([output.data_ptr() for output in outputs], weights, columns, out.data_ptr())
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
