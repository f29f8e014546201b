"""A decoder on a CPU as on a GPU whose launches cost nothing: what is left is Python, and copies of a few bytes. Graphs
keep the results of the call that they would have captured, and kernels compute nothing: tokens have no meaning."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tiermoe.engine import forecasts, forward_context, units
from tiermoe.engine.moe import MoELayer, Part
from tiermoe.formats.expert_format import SlotMatrix
from tiermoe.kernels import gpu, graphs
from tiermoe.kernels.experts import expert_kernel


class FreeGraphs(graphs.Graphs):
    """Graphs that are launched at no cost but Python's."""

    def __init__(self) -> None:
        with patch.multiple(torch.cuda, Stream=lambda _: None, graph_pool_handle=lambda: None):
            super().__init__(torch.device("cpu"))

    def _capture(self, key: Hashable, function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        in_place = [self._kept.get(graphs._storage(x), key) != key for x in inputs]
        own = [x if there else x.clone() for x, there in zip(inputs, in_place, strict=True)]
        result = function(*inputs)
        self._kept.update((graphs._storage(each), key) for each in tree_leaves(result))
        nothing = SimpleNamespace(replay=lambda: None)
        self._graphs[key] = [graphs._Graph(key, nothing, list(zip(own, in_place, strict=True)), result)]
        return result


def _grouped_linear(x: Tensor, tiles: Mapping[int, Tensor], matrix: SlotMatrix, shared: bool) -> Tensor:
    return x.new_zeros((sum(map(len, tiles.values())) if shared else len(x), matrix.rows))


KERNELS = SimpleNamespace(
    linear=None,
    tiles_of=lambda slots, counts, device: {1: torch.zeros((len(slots), 3), dtype=torch.int64)},
    grouped_linear=_grouped_linear,
    weighted_sums=lambda choices, like: like.new_zeros((choices.shape[1], like.shape[-1])),
    write_row=lambda kept, new, place: None,
    attend_row=lambda query, keys, values, *_, **__: query.new_zeros((len(query), values.shape[-1])),
)
"""In the place of Triton's."""


def _read_back(tensors: Sequence[Tensor], key: Hashable = None) -> list[Tensor]:
    """As `gpu.read_back`, whose copy here waits for nothing."""
    together = graphs.launch((key, len(tensors)), gpu._together, *tensors)
    parts = torch.split(torch.empty(together.shape).copy_(together), [each.numel() for each in tensors])
    return [part.view(each.shape).to(each.dtype) for part, each in zip(parts, tensors, strict=True)]


def _choices(layer: MoELayer, parts: Sequence[Part], hidden: Tensor) -> tuple[Sequence[Part], Tensor | None]:
    """As `MoELayer._read_back` of a GPU's tensors."""
    found = layer._context.read_back(layer._index, [each for part in parts for each in part[1:]])
    return [(part[0], found[2 * at], found[2 * at + 1]) for at, part in enumerate(parts)], None


@contextlib.contextmanager
def free_graphs() -> Iterator[None]:
    """Engines that are made within it compute as on a GPU, with their decoder's `_graphs` a `FreeGraphs`."""
    with (
        patch.object(gpu, "triton", lambda *_: KERNELS),
        patch.object(units, "expert_kernel", lambda form, gate, _: expert_kernel(form, gate, "cuda")),
        patch.object(forward_context, "read_back", _read_back),
        patch.object(forecasts, "read_back", _read_back),
        patch.object(MoELayer, "_read_back", _choices),
    ):
        yield
