"""Drafts by what gives probabilities of a next token: the likeliest one, and again, while that is worth verifying."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from tiermoe.engine.speculation import LEAST, Chances, Speculation

Draft = Generator[list[int], torch.Tensor, list[int]]
"""A draft that is under way: asks what follows tokens, and is sent the probabilities (vocabulary)."""
_BOUNDS = (0.4, 0.7, 0.9)  # of a token's probability, between the kinds of guesses
CHANCES = (0.25, 0.5, 0.75, 0.92)
"""Assumed chance of a guess of each kind."""


class LikeliestTokens:
    """Drafts of one sequence. least: guesses that are worth a step of several tokens."""

    def __init__(self, speculation: Speculation, chances: Chances, least: int = LEAST) -> None:
        self._speculation = speculation
        self._chances = chances
        self._least = least
        self._guesses: list[tuple[int, int]] = []  # of the last draft, with their kinds
        self._at = 0  # tokens before them

    def ready(self, tokens: list[int]) -> bool:
        """Whether drafts of the sequence, `tokens` by now, can be made at once; makes them so for the next step."""
        return True

    def begin(self, prompt: Sequence[int], answer: Sequence[int], most: int, rows: int) -> Draft:
        """A draft as of `speculation.Drafter`. It asks what follows the sequence, and what follows the guesses that
        were made of it since."""
        tokens = [*prompt, *answer]
        self._chances.learn(self._guesses, tokens[self._at :])
        self._guesses, self._at = [], len(tokens)
        if most < self._least or not self._speculation.allows(rows):
            return []
        if not self.ready(tokens):
            self._speculation.ignore_step()
            return []
        chance = 1.0
        while len(self._guesses) < most:
            probability, token = (yield list(tokens)).max(dim=0)
            kind = sum(float(probability) >= bound for bound in _BOUNDS)
            self._guesses.append((int(token), kind))
            chance *= self._chances.of(kind)
            if chance < self._speculation.share:
                break
            tokens.append(int(token))
        worth = [token for token, _ in self._guesses][: len(tokens) - self._at]
        return worth if len(worth) >= self._least else []
