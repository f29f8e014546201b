"""Experts with SiLU gates in one call: first matrix, gate, second matrix, of one expert or of all that a token has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tiermoe.kernels.native.linear import matrix_of
from tiermoe.native import _native, available, takes
from tiermoe.quant.encoding import Encoding
from tiermoe.quant.int2 import Int2
from tiermoe.quant.int4 import Int4
from tiermoe.quant.scratch import scratch
from tiermoe.types import Part


class GatedExperts:
    """Experts second(silu(gate) * up) in bfloat16, where gate and up are the halves of first(x).

    first (2 I, H), second (H, I): matrices with `groups` weights to a scale each."""

    def __init__(self, first: Part, second: Part, groups: tuple[int, int]) -> None:
        self._matrices = tuple(zip((first, second), groups, strict=True))
        self._hidden, self._inner = second.out_in

    def pack(self, views: Mapping[str, Mapping[str, Tensor]]) -> bytes:
        """What the kernel is told of the expert in a slot; valid as long as the slot lives."""
        return b"".join(matrix_of(views[part.name], *part.out_in, group) for part, group in self._matrices)

    def absent(self) -> bytes:
        """What a kernel is told in the place of an expert that is not here."""
        return b"".join(_native.matrix(0, 0, *part.out_in, group) for part, group in self._matrices)

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
    groups = []
    for part in (first, second):
        encoding = encodings.get(part.name)
        in_slot = encoding.in_slot if isinstance(encoding, Int2) else encoding
        if part.transposed or not isinstance(in_slot, Int4) or not takes(dtype, *part.out_in, in_slot.group):
            return None
        groups.append(in_slot.group)
    inner = second.out_in[1]
    if inner % 64 or first.out_in != (2 * inner, second.out_in[0]):
        return None
    return GatedExperts(first, second, (groups[0], groups[1]))


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
