"""Many tokens' sums of their chosen experts, whose outputs come expert by expert: each token's in ascending order of
the experts, rounded to the outputs' dtype after each product and each sum, as transformers' eager experts do."""

from __future__ import annotations

from typing import Protocol

import torch

from tiermoe.kernels.native.experts import combine_many, combines


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
