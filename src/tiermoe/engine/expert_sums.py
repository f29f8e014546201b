"""Tokens' sums of their chosen experts, whose outputs come group by group: each token's in ascending order of the
experts, rounded to the outputs' dtype after each product and each sum, as transformers' eager experts do.

Of a few tokens all experts that are here are one call, however many of the tokens each has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from tiermoe.kernels.expert import InOneCall, Views
from tiermoe.kernels.native.experts import combine_many, combines
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


class Sums(Protocol):
    """Choices are numbered by expert: `keep` takes a run of them."""

    def keep(self, output: torch.Tensor, rows: slice) -> None:
        """output (rows, H): what an expert gives for the tokens of these choices."""

    def total(self) -> torch.Tensor:
        """(T, H). A choice that was not kept adds nothing."""


class Choices:
    """index, weights (T, K), where an index of `experts` or more names none. Choices by ascending expert, each (T K):
    `token`, `gates`, and `place` among its token's experts in ascending order. `counts`: choices of each expert."""

    def __init__(self, index: torch.Tensor, weights: torch.Tensor, experts: int) -> None:
        # positions in (k, token) order, as transformers' eager experts gather their rows
        by_expert = index.t().reshape(-1).argsort(stable=True)
        self.shape = index.shape
        self.token = by_expert % index.shape[0]
        self.place = index.argsort(dim=1).argsort(dim=1).t().reshape(-1)[by_expert]
        self.gates = weights.t().reshape(-1)[by_expert]
        self.counts = torch.bincount(index.reshape(-1), minlength=experts).tolist()[:experts]


def sums_of(choices: Choices, hidden: torch.Tensor, complete: bool) -> Sums:
    """Sums for tokens hidden (T, H). complete: every choice will be kept."""
    return NativeSums(choices, hidden) if combines(hidden[0]) else TorchSums(choices, hidden, complete)


class TorchSums:
    """Products are kept by place, (K, T, H), and added when all are there."""

    def __init__(self, choices: Choices, hidden: torch.Tensor, complete: bool) -> None:
        tokens, k = choices.shape
        self._choices = choices
        self._kept = (torch.empty if complete else torch.zeros)(
            (k, tokens, hidden.shape[1]), dtype=hidden.dtype, device=hidden.device
        )

    def keep(self, output: torch.Tensor, rows: slice) -> None:
        choices = self._choices
        product = (output * choices.gates[rows, None]).to(output.dtype)
        self._kept[choices.place[rows], choices.token[rows]] = product

    def total(self) -> torch.Tensor:
        total = self._kept[0]
        for product in self._kept[1:]:
            total += product
        return total


class NativeSums:
    """Outputs stay where they are until all are there; one call reads each once."""

    def __init__(self, choices: Choices, hidden: torch.Tensor) -> None:
        self._choices = choices
        self._columns = hidden.shape[1]
        self._outputs: list[torch.Tensor] = []  # kept alive for their addresses
        self._addresses = torch.zeros(choices.shape, dtype=torch.int64)
        self._gates = torch.zeros(choices.shape, dtype=torch.float32)

    def keep(self, output: torch.Tensor, rows: slice) -> None:
        output = output.contiguous()
        self._outputs.append(output)
        where = self._choices.token[rows], self._choices.place[rows]
        row_bytes = output.shape[1] * output.element_size()
        self._addresses[where] = output.data_ptr() + torch.arange(len(output)) * row_bytes
        self._gates[where] = self._choices.gates[rows].float()

    def total(self) -> torch.Tensor:
        return combine_many(self._addresses, self._gates, self._columns)
