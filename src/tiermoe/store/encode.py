"""The experts of a layer encoded by several workers, in memory that is used again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from tiermoe.process.machine import available_memory
from tiermoe.quant import row_blocks
from tiermoe.quant.gptq import solving_bytes
from tiermoe.quant.quantized import Quantizer
from tiermoe.quant.scratch import scratch
from tiermoe.quant.workers import in_order
from tiermoe.store.checkpoint import Descriptors
from tiermoe.store.layout import ExpertFormat, Slice, expert_format, relative_error
from tiermoe.store.solving import Inputs, encode_solved
from tiermoe.store.source import ExpertSource
from tiermoe.types import Segment

_SOLVING = 2 << 30  # bytes for all workers that solve for codes, fewer where less is free; one alone takes what it must
_SHARE_OF_FREE = 0.7

Task = list[Slice]
"""Slices of an expert that are read and encoded by one worker."""


def encoded_experts(
    form: ExpertFormat,
    quantizer: Quantizer,
    source: ExpertSource,
    layer: int,
    workers: int,
    inputs: Inputs | None = None,
) -> Iterator[tuple[memoryview, float]]:
    """The stored bytes of each expert of a layer, valid until the next one is asked for, and its relative error: the
    RMS of the difference over the RMS of the weights, over all quantised matrices (0.0 at 16 bits).

    Large experts that lie in the checkpoint as they are get read and encoded some rows at a time, by all workers;
    others one by each worker, as are all whose inputs are known."""
    if inputs is not None:
        room = min(_SOLVING, int(available_memory()[0] * _SHARE_OF_FREE))
        workers = max(1, min(workers, room // _solving_bytes(form)))
    placed = _placed_experts(form, source, layer) if inputs is None else None
    tasks = _tasks(form, quantizer) if placed else [[]]
    # one for each expert that is being encoded or written; the gaps between fields stay zero
    count = _in_flight(len(tasks), workers)
    buffers = [torch.zeros(form.stored.nbytes, dtype=torch.uint8) for _ in range(count)]

    def work(number: int) -> row_blocks.Squares:
        expert, task = divmod(number, len(tasks))
        if inputs is not None:
            return encode_solved(form, source.read(layer, expert), inputs, (layer, expert), buffers[expert % count])
        if placed is None:
            return form.encode(source.read(layer, expert), quantizer, buffers[expert % count])
        return _encode(form, quantizer, buffers[expert % count], tasks[task], placed, expert)

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
    """The most that `encoded_experts` holds. reading: what reading a whole expert holds beside the expert; None where
    experts lie in the checkpoint as they are."""
    matrices = [part for part in form.layer.parts if part.name in form.encodings]
    encoding = max(
        (
            row_blocks.workspace_bytes(form.encodings[part.name], quantizer, *part.out_in, form.dtype)
            for part in matrices
        ),
        default=0,
    )
    if reading is None and not any(part.transposed for part in form.layer.parts):
        return _in_flight(len(_tasks(form, quantizer)), workers) * form.stored.nbytes + workers * encoding
    parts = sum(math.prod(part.shape) for part in form.layer.parts) * form.dtype.itemsize
    return workers * (form.stored.nbytes + parts + max(reading or 0, encoding))


class _PlacedExperts:
    """Reads rows of experts where the checkpoint has them as they are."""

    def __init__(self, form: ExpertFormat, segments: list[list[Segment]]) -> None:
        plain = expert_format(form.layer, 16, form.dtype, "any", "").stored
        self._offsets = {placed.part: placed.offset for placed in plain.fields}
        self._dtype, self._segments = form.dtype, segments
        self._files = Descriptors()
        for file in {segment.file for expert in segments for segment in expert}:
            self._files.of(Path(file))  # here, once: several threads read

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
    """None where an expert has to be converted, or a matrix is turned."""
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
    """The slices of an expert, together until they have as many weights as a worker should encode at a time."""
    tasks: list[Task] = []
    weights = row_blocks.BLOCK_WEIGHTS
    for of in form.slices(quantizer):
        if weights >= row_blocks.BLOCK_WEIGHTS:
            tasks.append([])
            weights = 0
        tasks[-1].append(of)
        weights += (of.last - of.first) * math.prod(of.part.shape[1:])
    return tasks


def _solving_bytes(form: ExpertFormat) -> int:
    """About what a worker holds of an expert whose inputs are known: its parts, their moments, what solving for the
    largest takes, and what is stored."""
    shapes = [part.out_in for part in form.layer.parts if part.name in form.encodings]
    parts = sum(math.prod(part.shape) for part in form.layer.parts) * form.dtype.itemsize
    moments = sum(4 * columns * columns for _, columns in shapes)
    return parts + moments + max(solving_bytes(*shape) for shape in shapes) + form.stored.nbytes


def _in_flight(tasks: int, workers: int) -> int:
    """Experts of so many tasks each that are worked on at a time, the one that was finished last among them."""
    return 1 + -(-(workers - 1) // tasks)


def _encode(
    form: ExpertFormat,
    quantizer: Quantizer,
    buffer: torch.Tensor,
    task: Task,
    placed: _PlacedExperts,
    expert: int,
) -> row_blocks.Squares:
    views, error, size = form.stored.views(buffer), 0.0, 0.0
    for of in task:
        its_error, its_size = form.encode_slice(views, of, placed.read(expert, of), quantizer)
        error, size = error + its_error, size + its_size
    return error, size
