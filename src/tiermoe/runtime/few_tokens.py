"""A few tokens through a layer's experts: those that are here in one call, however many of the tokens each has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from tiermoe.kernels.expert import InOneCall, Views
from tiermoe.kernels.native.experts import combine_many
from tiermoe.types import Ready


def compute_few(
    hidden: torch.Tensor,
    chosen: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    run: Iterable[list[Ready]],
    kernels: Mapping[int, InOneCall],
    views_of: Callable[[Ready], Views],
    alone: bool,
) -> torch.Tensor:
    """hidden (T, H) → (T, H), each token's sum of its chosen experts in ascending order, rounded after each step: what
    a call for each expert gives, and what each token gives by itself.

    chosen, weights: of each token (an index that names no expert never comes). run: the experts in groups, as they
    become available. alone: little of torch's runs beside it (`InOneCall.apart`)."""
    tokens_of: dict[int, list[int]] = {}
    for token, experts in enumerate(chosen):
        for expert in experts:
            tokens_of.setdefault(expert, []).append(token)
    outputs: list[torch.Tensor] = []  # kept alive for their addresses
    address: dict[tuple[int, int], int] = {}  # of an expert's output for a token
    for group in run:
        asked = [ready for ready in group if ready.expert in tokens_of]
        for bits in {ready.bits for ready in asked}:
            alike = [ready for ready in asked if ready.bits == bits]
            places = [(token, ready.expert) for ready in alike for token in tokens_of[ready.expert]]
            counts = [len(tokens_of[ready.expert]) for ready in alike]
            gathered = hidden[[token for token, _ in places]]
            output = kernels[bits].apart(gathered, counts, [views_of(ready) for ready in alike], alone)
            outputs.append(output)
            first, each = output.data_ptr(), output.stride(0) * output.element_size()
            address.update((place, first + row * each) for row, place in enumerate(places))
    ordered = [sorted(zip(*each, strict=True)) for each in zip(chosen, weights, strict=True)]
    addresses = [[address.get((token, expert), 0) for expert, _ in row] for token, row in enumerate(ordered)]
    gates = [[gate for _, gate in row] for row in ordered]
    return combine_many(torch.tensor(addresses), torch.tensor(gates, dtype=torch.float32), hidden.shape[1])
