"""Time of packing a model's experts on this machine: one expert is encoded, and the rest takes as long."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from tiermoe.engine.expectation import Range
from tiermoe.formats.encode_experts import encoded_experts
from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.formats.gptq import SECONDS_A_WEIGHT
from tiermoe.formats.quantizers import CALIBRATED, QUANTIZERS
from tiermoe.formats.source import ExpertSource
from tiermoe.platform.threads import torch_threads
from tiermoe.types import MoeLayer, Segment

_SHORT = 1.0  # seconds of an expert up to which another one is encoded: the first touches memory and imports
_LONGEST = 1.5  # times as long as threads take that never wait for the interpreter or the drive


class RandomExperts:
    """Experts of random weights (`source.ExpertSource`), for a checkpoint that is not here."""

    def __init__(self, layers: list[MoeLayer], dtype: torch.dtype) -> None:
        self.layers, self._dtype = layers, dtype

    def read(self, layer: int, expert: int) -> Mapping[str, torch.Tensor]:
        return {part.name: torch.randn(part.shape, dtype=self._dtype) for part in self.layers[layer].parts}

    def in_place(self, layer: int, expert: int) -> list[Segment] | None:
        return None


def packing_seconds(formats: Sequence[ExpertFormat], quantizer: str, source: ExpertSource, threads: int) -> Range:
    """Seconds that packing all experts of `source` takes by so many threads. formats: of each layer. The first expert
    is read and encoded; for GPTQ, which takes seconds an expert, nothing is measured."""
    weights = sum(form.layer.experts * form.layer.expert_elements for form in formats)
    if quantizer in CALIBRATED and formats[0].bits < 8:
        seconds = weights * SECONDS_A_WEIGHT
    else:
        seconds = weights / formats[0].layer.expert_elements * _seconds_of_expert(formats[0], quantizer, source)
    return Range(seconds / threads, seconds / threads * _LONGEST)


def _seconds_of_expert(form: ExpertFormat, quantizer: str, source: ExpertSource) -> float:
    with torch_threads(1):  # as each worker of packing has
        encoded = encoded_experts(form, QUANTIZERS[quantizer], source, 0, 1)
        found = _seconds_of_next(encoded)
        if found < _SHORT and form.layer.experts > 1:
            found = min(found, _seconds_of_next(encoded))
        encoded.close()
    return found


def _seconds_of_next(encoded: Iterator[object]) -> float:
    """Of this thread alone, which does all the work: other programs' time does not count."""
    began = time.thread_time()
    next(encoded)
    return time.thread_time() - began
