"""Drafts by what gives probabilities of a next token: the likeliest one, and again, while that is worth verifying."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from tiermoe.engine.speculation import LEAST, Chances, Place, Speculation

_BOUNDS = (0.4, 0.7, 0.9)  # of a token's probability, between the kinds of guesses
CHANCES = (0.25, 0.5, 0.75, 0.92)
"""Assumed chance of a guess of each kind."""


class LikeliestTokens(ABC):
    """Drafts of one sequence. least: guesses that are worth a step of several tokens."""

    def __init__(self, speculation: Speculation, chances: Chances, least: int = LEAST) -> None:
        self._speculation = speculation
        self._chances = chances
        self._least = least
        self._guesses: list[tuple[int, int]] = []  # of the last draft, with their kinds
        self._at = 0  # tokens before them

    @abstractmethod
    def ready(self, tokens: list[int], place: Place | None) -> bool:
        """Whether drafts of the sequence, `tokens` by now, can be made at once; makes them so for the next step."""

    @abstractmethod
    def probabilities(self, tokens: list[int]) -> torch.Tensor:
        """Probabilities (vocabulary) of what follows `tokens`: the sequence, and the guesses that were made of it since
        `ready`."""

    def draft(
        self, prompt: Sequence[int], answer: Sequence[int], most: int, rows: int, place: Place | None = None
    ) -> list[int]:
        """As of `speculation.Drafter`."""
        tokens = [*prompt, *answer]
        self._chances.learn(self._guesses, tokens[self._at :])
        self._guesses, self._at = [], len(tokens)
        if most < self._least or not self._speculation.allows(rows):
            return []
        if not self.ready(tokens, place):
            self._speculation.ignore_step()
            return []
        chance = 1.0
        while len(self._guesses) < most:
            probability, token = self.probabilities(list(tokens)).max(dim=0)
            kind = sum(float(probability) >= bound for bound in _BOUNDS)
            self._guesses.append((int(token), kind))
            chance *= self._chances.of(kind)
            if chance < self._speculation.share:
                break
            tokens.append(int(token))
        worth = [token for token, _ in self._guesses][: len(tokens) - self._at]
        return worth if len(worth) >= self._least else []
