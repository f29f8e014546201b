"""Tokens' sums of their chosen experts, whose outputs come expert by expert in any order: each token's in ascending
order of the experts, rounded to the outputs' dtype after each product and each sum, as transformers' eager experts do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Protocol

import torch

from tiermoe.kernels.experts import combine_many, combine_rows, combines, weighted_sum
from tiermoe.types import FEW_TOKENS

_EXPERT = itemgetter(0)


class Sums(Protocol):
    """The sums of some tokens: says which rows of the hidden states an expert computes, and keeps what it gives."""

    def counts(self, experts: Sequence[int]) -> list[int]:
        """Of how many tokens each of the experts is one."""

    def rows(self, experts: Sequence[int]) -> torch.Tensor:
        """The hidden states (M, H) of the tokens of the first expert, then of the second's, and so on."""

    def keep(self, experts: Sequence[int], outputs: torch.Tensor) -> None:
        """outputs (M, H): what the experts give for `rows(experts)`."""

    def total(self) -> torch.Tensor:
        """(T, H). An expert whose outputs were not kept adds nothing."""


def sums_of(hidden: torch.Tensor, chosen: list[list[int]], index: torch.Tensor, weights: torch.Tensor) -> Sums:
    """The sums of tokens hidden (T, H), on any device. index, weights (T, K), in main memory: each token's experts, in
    any order; an index that names no expert never comes. chosen: the index, as lists."""
    native, tokens = combines(hidden[0]), len(chosen)
    if tokens == 1 or (native and tokens <= FEW_TOKENS):
        return FewSums(hidden, chosen, weights, native)
    choices = Choices(index, weights)
    return NativeSums(choices, hidden) if native else TorchSums(choices, hidden)


class FewSums:
    """Of one token, or of a few whose outputs the native sum takes: in Python's lists, which are faster for few. An
    expert that a token names twice computes it once.

    native: `combines` takes the outputs."""

    def __init__(self, hidden: torch.Tensor, chosen: list[list[int]], weights: torch.Tensor, native: bool) -> None:
        self._hidden, self._chosen, self._weights, self._native = hidden, chosen, weights, native
        self._tokens_of: dict[int, list[int]] = {}
        for token, experts in enumerate(chosen):
            for expert in dict.fromkeys(experts):
                self._tokens_of.setdefault(expert, []).append(token)
        self._outputs: list[torch.Tensor] = []  # kept alive for their addresses
        self._row: dict[tuple[int, int], torch.Tensor] = {}  # by token and expert, where torch adds
        self._address: dict[tuple[int, int], int] = {}  # where the native sum does

    def counts(self, experts: Sequence[int]) -> list[int]:
        return [len(self._tokens_of.get(expert, ())) for expert in experts]

    def rows(self, experts: Sequence[int]) -> torch.Tensor:
        if len(self._chosen) == 1:  # without indices, which would have to be copied to a GPU
            return self._hidden.expand(len(experts), -1)
        tokens = torch.tensor([token for expert in experts for token in self._tokens_of[expert]])
        return self._hidden[tokens.to(self._hidden.device, non_blocking=True)]

    def keep(self, experts: Sequence[int], outputs: torch.Tensor) -> None:
        places = [(token, expert) for expert in experts for token in self._tokens_of[expert]]
        if not self._native:
            self._row.update(zip(places, outputs, strict=True))
            return
        self._outputs.append(outputs)
        first, each = outputs.data_ptr(), outputs.stride(0) * outputs.element_size()
        self._address.update((place, first + row * each) for row, place in enumerate(places))

    def total(self) -> torch.Tensor:
        if not self._native:
            return self._added()
        gates = self._weights.tolist()
        ordered = [sorted(zip(*each, strict=True), key=_EXPERT) for each in zip(self._chosen, gates, strict=True)]
        addresses = [[self._address.get((token, expert), 0) for expert, _ in row] for token, row in enumerate(ordered)]
        if len(ordered) == 1:
            return combine_rows(addresses[0], [gate for _, gate in ordered[0]], self._hidden)
        factors = torch.tensor([[gate for _, gate in row] for row in ordered], dtype=torch.float32)
        return combine_many(torch.tensor(addresses), factors, self._hidden)

    def _added(self) -> torch.Tensor:
        """The one token's sum."""
        chosen = self._chosen[0]
        ascending = sorted(range(len(chosen)), key=chosen.__getitem__)
        places = [place for place in ascending if (0, chosen[place]) in self._row]
        if not places:
            return torch.zeros_like(self._hidden)
        return weighted_sum([self._row[0, chosen[place]] for place in places], self._weights[0], places)


class Choices:
    """index, weights (T, K), in main memory. Choices by ascending expert, each (T K) there: `token`, `gates`, and
    `place` among its token's experts in ascending order. `count`: choices of each expert; `of`: where an expert's
    lie."""

    def __init__(self, index: torch.Tensor, weights: torch.Tensor) -> None:
        # positions in (k, token) order, as transformers' eager experts gather their rows
        by_expert = index.t().reshape(-1).argsort(stable=True)
        self.shape = index.shape
        self.token = by_expert % index.shape[0]
        self.place = index.argsort(dim=1, stable=True).argsort(dim=1).t().reshape(-1)[by_expert]
        self.gates = weights.t().reshape(-1)[by_expert]
        self.count = torch.bincount(index.reshape(-1)).tolist()
        self._ends = list(accumulate(self.count))

    def counts(self, experts: Sequence[int]) -> list[int]:
        return [self.count[expert] if expert < len(self.count) else 0 for expert in experts]

    def of(self, expert: int) -> slice:
        return slice(self._ends[expert] - self.count[expert], self._ends[expert])

    def tokens(self, experts: Sequence[int]) -> torch.Tensor:
        """(M): the tokens of the first expert, then the second's, and so on."""
        if len(experts) == 1:
            return self.token[self.of(experts[0])]
        return torch.cat([self.token[self.of(expert)] for expert in experts])


class _ManySums:
    def __init__(self, choices: Choices, hidden: torch.Tensor) -> None:
        self._choices, self._hidden = choices, hidden

    def counts(self, experts: Sequence[int]) -> list[int]:
        return self._choices.counts(experts)

    def rows(self, experts: Sequence[int]) -> torch.Tensor:
        return self._hidden[self._choices.tokens(experts).to(self._hidden.device, non_blocking=True)]


class TorchSums(_ManySums):
    """Products are kept by place, (K, T, H), and added when all are there."""

    def __init__(self, choices: Choices, hidden: torch.Tensor) -> None:
        tokens, k = choices.shape
        super().__init__(choices, hidden)
        self._kept = torch.zeros((k, tokens, hidden.shape[1]), dtype=hidden.dtype, device=hidden.device)
        self._token, self._place, self._gates = (
            each.to(hidden.device, non_blocking=True) for each in (choices.token, choices.place, choices.gates)
        )

    def keep(self, experts: Sequence[int], outputs: torch.Tensor) -> None:
        for expert, output in zip(experts, torch.split(outputs, self.counts(experts)), strict=True):
            rows = self._choices.of(expert)
            product = (output * self._gates[rows, None]).to(output.dtype)
            self._kept[self._place[rows], self._token[rows]] = product

    def total(self) -> torch.Tensor:
        total = self._kept[0]
        for product in self._kept[1:]:
            total += product
        return total


class NativeSums(_ManySums):
    """One call reads each output once, by its address. On a CPU outputs are kept in one piece of memory (T K, H), which
    goes back as a whole; on a GPU they are read in place."""

    def __init__(self, choices: Choices, hidden: torch.Tensor) -> None:
        super().__init__(choices, hidden)
        rows = choices.token.numel() if hidden.device.type == "cpu" else 0
        self._piece = hidden.new_empty((rows, hidden.shape[1]))
        self._outputs: list[torch.Tensor] = []
        self._addresses = torch.zeros_like(choices.token)

    def keep(self, experts: Sequence[int], outputs: torch.Tensor) -> None:
        if self._hidden.device.type == "cpu":
            here, self._piece = self._piece[: len(outputs)], self._piece[len(outputs) :]
            outputs = here.copy_(outputs)
        self._outputs.append(outputs)
        address, row = outputs.data_ptr(), outputs.stride(0) * outputs.element_size()
        for expert, count in zip(experts, self.counts(experts), strict=True):
            end = address + count * row
            self._addresses[self._choices.of(expert)] = torch.arange(address, end, row)
            address = end

    def total(self) -> torch.Tensor:
        choices = self._choices
        gates, addresses = torch.empty(choices.shape), torch.empty(choices.shape, dtype=torch.int64)
        where = choices.token, choices.place
        gates[where], addresses[where] = choices.gates.float(), self._addresses
        return combine_many(addresses, gates, self._hidden)
