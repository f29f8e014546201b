"""Encoding of a layer's experts by several workers, in memory that is used again; also with known inputs."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from tiermoe.formats.encoding import BLOCK_WEIGHTS, Squares, in_order, scratch, summed, workspace_bytes
from tiermoe.formats.expert_format import ExpertFormat, PartViews, Slice, expert_format, relative_error
from tiermoe.formats.gptq import Solved, levels_of, solve, solving_bytes
from tiermoe.formats.quantizers import QUANTIZERS, Quantizer
from tiermoe.formats.safetensors import FileReader
from tiermoe.formats.source import ExpertSource
from tiermoe.platform.machine import available_memory
from tiermoe.types import Part, Segment

_OTHERS = QUANTIZERS["hqq"]  # for matrices that are not solved: those that take 8 bits
# bytes for all workers that solve for codes, fewer where less is free; one worker takes what it must
_SOLVING = 2 << 30
_SHARE_OF_FREE = 0.7

Task = list[Slice]
"""Slices of an expert that are read and encoded by one worker."""


class Inputs(Protocol):
    """The inputs of a model's experts on a text."""

    made_from: str  # tells the text from others

    def moments(self, layer: int, expert: int, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Part name → second moments (in, in), float32, of the inputs of an expert's matrices. tensors: the expert's
        parts. Several threads call it at once."""


def encoded_experts(
    form: ExpertFormat,
    quantizer: Quantizer,
    source: ExpertSource,
    layer: int,
    workers: int,
    inputs: Inputs | None = None,
) -> Generator[tuple[memoryview, float], None, None]:
    """The stored bytes of each expert of a layer, valid until the next iteration, and the expert's relative error: the
    RMS of the difference over the RMS of the weights, over all quantised matrices (0.0 at 16 bits).

    A large expert that the checkpoint has as it is: all workers read and encode some rows at a time. Any other expert,
    and every expert with known inputs: one worker reads and encodes it."""
    if inputs is not None:
        room = min(_SOLVING, int(available_memory()[0] * _SHARE_OF_FREE))
        workers = max(1, min(workers, room // _solving_bytes(form)))
    placed = _placed_experts(form, source, layer) if inputs is None else None
    tasks = _tasks(form, quantizer) if placed else [[]]
    # one for each expert that is being encoded or written; the gaps between fields stay zero
    count = _in_flight(len(tasks), workers)
    buffers = [torch.zeros(form.stored.nbytes, dtype=torch.uint8) for _ in range(count)]

    def work(number: int) -> Squares:
        expert, task = divmod(number, len(tasks))
        if inputs is not None:
            return _encode_solved(form, source.read(layer, expert), inputs, (layer, expert), buffers[expert % count])
        if placed is None:
            return form.encode(source.read(layer, expert), quantizer, buffers[expert % count])
        views = form.stored.views(buffers[expert % count])
        return summed(form.encode_slice(views, of, placed.read(expert, of), quantizer) for of in tasks[task])

    error = size = 0.0
    try:
        for number, squares in enumerate(in_order(work, form.layer.experts * len(tasks), workers)):
            expert, task = divmod(number, len(tasks))
            error, size = error + squares[0], size + squares[1]
            if task == len(tasks) - 1:
                yield buffers[expert % count].numpy().data, relative_error(error, size)
                error = size = 0.0
    finally:
        if placed is not None:
            placed.close()


def working_bytes(form: ExpertFormat, quantizer: Quantizer, reading: int | None, workers: int) -> int:
    """Largest memory of `encoded_experts`, in bytes. reading: bytes of reading a whole expert beside the expert; None
    where the checkpoint has experts as they are."""
    matrices = [part for part in form.layer.parts if part.name in form.encodings]
    encoding = max(
        (workspace_bytes(form.encodings[part.name], quantizer, *part.out_in, form.dtype) for part in matrices),
        default=0,
    )
    if reading is None and not any(part.transposed for part in form.layer.parts):
        return _in_flight(len(_tasks(form, quantizer)), workers) * form.stored.nbytes + workers * encoding
    parts = sum(math.prod(part.shape) for part in form.layer.parts) * form.dtype.itemsize
    return workers * (form.stored.nbytes + parts + max(reading or 0, encoding))


class _PlacedExperts:
    """Reads rows of experts where the checkpoint has them as they are."""

    def __init__(self, form: ExpertFormat, segments: list[list[Segment]]) -> None:
        plain = expert_format(form.layer, 16, form.dtype, "").stored
        self._offsets = {placed.part: placed.offset for placed in plain.fields}
        self._dtype, self._segments = form.dtype, segments
        self._files = FileReader()
        for file in {segment.file for expert in segments for segment in expert}:
            self._files.descriptor(Path(file))  # opened before several threads read

    def read(self, expert: int, of: Slice) -> torch.Tensor:
        """Rows of a matrix, or a vector, in a buffer that the thread's next call uses again."""
        shape = (of.last - of.first, *of.part.shape[1:])
        values = scratch.take("rows", shape, self._dtype)
        begin = self._offsets[of.part.name] + of.first * math.prod(shape[1:]) * self._dtype.itemsize
        view = values.view(torch.uint8).numpy().reshape(-1).data
        for segment in self._segments[expert]:
            first, last = max(begin, segment.at), min(begin + len(view), segment.at + segment.nbytes)
            if first < last:
                offset = segment.offset + first - segment.at
                self._files.fill(view[first - begin : last - begin], Path(segment.file), offset, f"expert {expert}")
        return values

    def close(self) -> None:
        self._files.close()


def _placed_experts(form: ExpertFormat, source: ExpertSource, layer: int) -> _PlacedExperts | None:
    """None where an expert has to be converted, or a matrix is transposed."""
    if any(part.transposed for part in form.layer.parts):
        return None
    segments = []
    for expert in range(form.layer.experts):
        found = source.in_place(layer, expert)
        if found is None:
            return None
        segments.append(found)
    return _PlacedExperts(form, segments)


def _tasks(form: ExpertFormat, quantizer: Quantizer) -> list[Task]:
    """The slices of an expert, joined up to the weights that a worker encodes at a time."""
    tasks: list[Task] = []
    weights = BLOCK_WEIGHTS
    for of in form.slices(quantizer):
        if weights >= BLOCK_WEIGHTS:
            tasks.append([])
            weights = 0
        tasks[-1].append(of)
        weights += (of.last - of.first) * math.prod(of.part.shape[1:])
    return tasks


def _solving_bytes(form: ExpertFormat) -> int:
    """Approximate bytes of a worker for an expert with known inputs: the parts, their moments, what solving for the
    largest part takes, and what is stored."""
    shapes = [part.out_in for part in form.layer.parts if part.name in form.encodings]
    parts = sum(math.prod(part.shape) for part in form.layer.parts) * form.dtype.itemsize
    moments = sum(4 * columns * columns for _, columns in shapes)
    return parts + moments + max(solving_bytes(*shape) for shape in shapes) + form.stored.nbytes


def _in_flight(tasks: int, workers: int) -> int:
    """Experts of so many tasks each that are in memory at a time: those in work, and the one finished last."""
    return 1 + -(-(workers - 1) // tasks)


def _encode_solved(
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
        squares = _encode_matrix(form, views, part, matrix, moments[part.name])
        error, size = error + squares[0], size + squares[1]
    return error, size


def _encode_matrix(
    form: ExpertFormat, views: Mapping[str, PartViews], part: Part, matrix: torch.Tensor, moments: torch.Tensor
) -> Squares:
    levels = levels_of(form.encodings[part.name], form.dtype)
    slices = [each for each in form.slices(_OTHERS) if each.part == part]
    if levels is None:
        return summed(
            form.encode_slice(views, each, matrix[each.first : each.last].contiguous(), _OTHERS) for each in slices
        )
    solved = Solved(solve(matrix, moments, levels))
    error = size = 0.0
    for each in slices:
        values, quantizer = solved.rows(each.first, each.last)
        form.encode_slice(views, each, values, quantizer)
        weight = matrix[each.first : each.last].float()
        error += float((values - weight).square_().sum(dtype=torch.float64))
        size += float(weight.square().sum(dtype=torch.float64))
    return error, size
