"""Experts whose codes are found with their inputs known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from tiermoe.quant.gptq import solve
from tiermoe.quant.quantizers import QUANTIZERS
from tiermoe.quant.row_blocks import Squares
from tiermoe.quant.solved import Solved, levels_of
from tiermoe.store.layout import ExpertFormat, PartViews, Slice
from tiermoe.types import Part

_OTHERS = QUANTIZERS["hqq"]  # for matrices that are not solved: those that take 8 bits


class Inputs(Protocol):
    """What a model's experts got on a text. `made_from` tells the text from others."""

    made_from: str

    def moments(self, layer: int, expert: int, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Part name → second moments (in, in), float32, of what an expert's matrices got; tensors: its parts. Several
        threads ask at once."""


def encode_solved(
    form: ExpertFormat,
    tensors: Mapping[str, torch.Tensor],
    inputs: Inputs,
    place: tuple[int, int],
    buffer: torch.Tensor,
) -> Squares:
    """`ExpertFormat.encode` of the expert at `place` (layer, expert), with its inputs."""
    buffer.zero_()
    views, moments = form.stored.views(buffer), inputs.moments(*place, tensors)
    error = size = 0.0
    for part in form.layer.parts:
        if part.name not in form.encodings:
            form.encode_slice(views, Slice(part, 0, part.shape[0]), tensors[part.name], _OTHERS)
            continue
        values = tensors[part.name]
        matrix = values.t() if part.transposed else values
        its_error, its_size = _encode_matrix(form, views, part, matrix, moments[part.name])
        error, size = error + its_error, size + its_size
    return error, size


def _encode_matrix(
    form: ExpertFormat, views: Mapping[str, PartViews], part: Part, matrix: torch.Tensor, moments: torch.Tensor
) -> Squares:
    levels = levels_of(form.encodings[part.name], form.dtype)
    slices = [each for each in form.slices(_OTHERS) if each.part == part]
    if levels is None:
        found = [
            form.encode_slice(views, each, matrix[each.first : each.last].contiguous(), _OTHERS) for each in slices
        ]
        return sum(error for error, _ in found), sum(size for _, size in found)
    solved = Solved(solve(matrix, moments, levels))
    error = size = 0.0
    for each in slices:
        values, quantizer = solved.rows(each.first, each.last)
        form.encode_slice(views, each, values, quantizer)
        weight = matrix[each.first : each.last].float()
        error += float((values - weight).square_().sum(dtype=torch.float64))
        size += float(weight.square().sum(dtype=torch.float64))
    return error, size
