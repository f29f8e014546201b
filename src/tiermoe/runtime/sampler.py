"""Choosing the next token from logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiermoe.runtime.sampling import Sampling

_CANDIDATES = 256  # of which the nucleus is nearly always a part: sorting a whole vocabulary takes milliseconds


class Sampler:
    """Draws tokens by a `Sampling`; its random numbers are its own, so that a seed names an answer. penalty: by which
    the logits of tokens that were there already are divided, or multiplied where they are negative."""

    def __init__(self, sampling: Sampling, penalty: float | None = None) -> None:
        self._sampling = sampling
        self._penalty = 1.0 if penalty is None else penalty
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def choose(self, logits: Tensor, before: Sequence[int] = ()) -> int:
        """logits (vocabulary) → a token. Temperature 0: the likeliest, of equal ones the first. before: the tokens that
        were there already."""
        sampling = self._sampling
        if self._penalty != 1 and before:
            logits = self._penalised(logits, before)
        if sampling.temperature == 0:
            return int(logits.argmax())
        probabilities = torch.softmax(logits.float() / sampling.temperature, dim=-1)
        if sampling.top_k or sampling.top_p < 1:
            kept, tokens = self._nucleus(probabilities)
            return int(tokens[self._drawn(kept)])
        return self._drawn(probabilities)

    def _penalised(self, logits: Tensor, before: Sequence[int]) -> Tensor:
        logits = logits.float()
        there = torch.tensor(sorted(set(before)))
        values = logits[there]
        logits[there] = torch.where(values < 0, values * self._penalty, values / self._penalty)
        return logits

    def _nucleus(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens, falling, at most top_k, that together reach top_p; at least one."""
        most = min(self._sampling.top_k or probabilities.numel(), probabilities.numel())
        kept, tokens = probabilities.topk(min(most, _CANDIDATES))
        if self._sampling.top_p < 1:
            wanted = self._sampling.top_p * (1.0 if not self._sampling.top_k else float(kept.sum()))
            if len(kept) < most and float(kept.sum()) < wanted:
                kept, tokens = probabilities.topk(most)
            reached = int(torch.searchsorted(kept.cumsum(0), torch.tensor(wanted))) + 1
            kept, tokens = kept[:reached], tokens[:reached]
        elif len(kept) < most:
            kept, tokens = probabilities.topk(most)
        return kept, tokens

    def _drawn(self, weights: Tensor) -> int:
        """An index, by weights that need not sum to 1."""
        sums = weights.cumsum(0)
        at = torch.rand((), generator=self._random) * sums[-1]
        return min(int(torch.searchsorted(sums, at, right=True)), weights.numel() - 1)
