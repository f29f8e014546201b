"""GPU kernels: torch's own product and norm for plain weights, Triton's (`triton_kernels`) for packed ones, for a group
of experts by few launches a matrix, and for the weighted sums of experts."""

from __future__ import annotations

import functools
import importlib
import struct
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.errors import ConfigError
from tiermoe.formats.encoding import Encoding
from tiermoe.formats.expert_format import ExpertFormat, SlotMatrix
from tiermoe.formats.neurons import Sealed
from tiermoe.kernels import graphs
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


def read_back(tensors: Sequence[Tensor], key: Hashable = None) -> list[Tensor]:
    """The tensors in main memory: those of a GPU by one copy of all, the only time that the host waits. Integers below
    2^24, and floats of at most 32 bits. key: of the graph that puts them together; None: of no graph."""
    there = [each for each in tensors if each.device.type != "cpu"]
    if not there:
        return list(tensors)
    together = _through_pinned(
        _together(*there) if key is None else graphs.launch((key, len(there)), _together, *there)
    )
    parts = iter(torch.split(together, [each.numel() for each in there]))
    return [each if each.device.type == "cpu" else next(parts).view(each.shape).to(each.dtype) for each in tensors]


def _together(*tensors: Tensor) -> Tensor:
    return torch.cat([each.reshape(-1).float() for each in tensors])


class _Pinned(threading.local):
    """A thread's pinned memory, float32, which grows."""

    buffer = torch.empty(0)


_pinned = _Pinned()


def _through_pinned(values: Tensor) -> Tensor:
    """values (N) of a GPU, float32, in main memory. Into pinned memory a copy needs no staging by the driver."""
    count = values.numel()
    if len(_pinned.buffer) < count:
        _pinned.buffer = torch.empty(2 * count, pin_memory=True)
    here = _pinned.buffer[:count].copy_(values, non_blocking=True)
    torch.cuda.current_stream(values.device).record_event().synchronize()
    return here.clone()


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


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def takes_graphs(device: str) -> bool:
    """Whether a token's launches on a device type may be CUDA graphs, with kernels that find its place in the KV cache:
    on a GPU with Triton."""
    return device != "cpu" and has_triton()


def weighted_sums(addresses: Tensor, weights: Tensor, like: Tensor) -> Tensor:
    """`experts.combine_many` on a GPU: one copy and one launch. Needs Triton."""
    choices = torch.stack((addresses, weights.double().view(torch.int64))).to(like.device, non_blocking=True)
    found: Tensor = triton().weighted_sums(choices, like)
    return found


class GroupedExperts:
    """Experts of one format: two packed matrices, and their biases if they have some."""

    def __init__(self, form: ExpertFormat, first: SlotMatrix, second: SlotMatrix) -> None:
        self._first, self._second = first, second
        self._kernels = triton()
        start = form.slot.fields[0]
        assert start.offset == 0
        self._start = start.part, start.field.name

    def __call__(
        self,
        x: Tensor,
        counts: Sequence[int],
        views: Sequence[Views],
        activation: Callable[[Tensor], Tensor],
        shared: bool = False,
    ) -> Tensor:
        """`ExpertKernel.forward_ragged`. shared: x is one token, of every expert. `activation` is called once, on all
        rows, as transformers calls it where it multiplies several experts at a time."""
        tiles = self._kernels.tiles_of(self._slots(views), counts, x.device)
        features = activation(self._kernels.grouped_linear(x, tiles, self._first, shared=shared))
        result: Tensor = self._kernels.grouped_linear(features, tiles, self._second, shared=False)
        return result

    def sum_one(
        self, x: Tensor, views: Sequence[Views], weights: list[float], activation: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """`experts.Grouped.sum_one`."""
        bits = struct.unpack(f"{len(weights)}q", struct.pack(f"{len(weights)}d", *weights))
        key = id(self), len(views)
        choices = graphs.on_device(key, torch.tensor((self._slots(views), bits), dtype=torch.int64), x.device)
        return graphs.launch(key, functools.partial(self._summed, activation), x, choices)

    def _summed(self, activation: Callable[[Tensor], Tensor], x: Tensor, choices: Tensor) -> Tensor:
        """choices (2, K) int64: the experts' slots, and the bits of their weights in float64. Launches do not depend on
        what is in it."""
        count, kernels = choices.shape[1], self._kernels
        rows = torch.arange(count, device=x.device)
        tiles = {1: torch.stack((choices[0], rows, torch.ones_like(rows)), 1)}
        features = activation(kernels.grouped_linear(x, tiles, self._first, shared=True))
        outputs = kernels.grouped_linear(features, tiles, self._second, shared=False)
        addresses = rows * outputs.stride(0) * outputs.element_size() + outputs.data_ptr()
        result: Tensor = kernels.weighted_sums(torch.stack((addresses, choices[1]))[:, None], outputs)
        return result

    def _slots(self, views: Sequence[Views]) -> list[int]:
        """The slots' addresses."""
        part, field = self._start
        return [each[part][field].data_ptr() for each in views]


def grouped_experts(form: ExpertFormat) -> GroupedExperts | None:
    """The grouped kernel of a format; None where it does not take the format: matrices of 16 bits. Needs Triton."""
    parts = [part for part in form.layer.parts if part.is_matrix]
    matrices = [matrix for part in parts if (matrix := packed_matrix(form, part)) is not None]
    biases = sum(matrix.bias is not None for matrix in matrices)
    whole = len(matrices) == len(parts) == 2 and len(parts) + biases == len(form.layer.parts)
    return GroupedExperts(form, *matrices) if whole else None


def packed_matrix(form: ExpertFormat, part: Part) -> SlotMatrix | None:
    """A part of experts as the grouped kernels find it in their slots; None if they do not take it."""
    encoding = form.encodings.get(part.name)
    if isinstance(encoding, Sealed):
        encoding = encoding.inner
    if encoding is None or encoding.name.partition("/")[0] not in KINDS:
        return None
    how = encoding.in_c(*part.out_in)
    assert how is not None
    at = {(placed.part, placed.field.name): placed.offset for placed in form.slot.fields}
    codes, scales = (at[part.name, name] for name in (how.weights, how.scales or how.weights))
    bias = at.get((form.bias_of(part) or "", "weight"))
    return SlotMatrix(*part.out_in, how.coding, how.group, form.dtype, codes, scales, bias)
