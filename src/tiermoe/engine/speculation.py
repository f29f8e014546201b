"""Speculation: how many tokens of a draft a step verifies, decided from times. It changes when tokens come, never which:
a verified token has the logits that it has alone, and is chosen from them. Standard library only.

A guess costs what it adds to a step: computing it, and reading experts that no other token of the step uses. It saves a
token's time where it is right. So a guess is verified where its chance is above its cost, as a share of a token's time
without speculation (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, section 3.4).
Both are measured while answers are written: the cost covers the drive where experts are missing, the chance what is
being written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tiermoe.engine.prompt_lookup import LONGEST, PromptLookup

MOST = 16  # guesses of a sequence in a step
_LEAST = 2  # guesses that are worth a step of several tokens: its first one costs more than the next
_PRIOR = (0.35, 0.6, 0.8, 0.9)  # chance of a guess behind a match of 3 or 4 tokens, 5 to 7, 8 to 15, more
_WEIGHT = 4.0  # observations that a prior counts for
_KEPT = 0.96  # of the weight of older observations, for each newer one

_CHEAPEST = 1e-3  # least share of a token's time that a guess is taken to cost
_SHARE = 0.6  # cost of a guess before one was measured, as a share of a token's time
_NEW = 1 / 16  # weight of the latest time in an average
_OUTLIER = 3.0  # times an average: longer steps count as this long
_FORGOTTEN = 1 / 512  # of what is known of the cost, for each step without guesses: it is asked again
_STALE = 32  # steps with guesses after which one runs without

LOSS = 0.02
"""Share of the time of decoding that guesses may lose, beside `_CREDIT`."""
_CREDIT = 4.0  # tokens' time: most that may be lost beyond that, and what one begins with is half of it


@dataclass(slots=True)
class Chances:
    """How often guesses were right, by the length of the match behind them. prior: what is assumed before."""

    prior: Chances | None = None
    right: list[float] = field(default_factory=lambda: [0.0] * len(_PRIOR))
    seen: list[float] = field(default_factory=lambda: [0.0] * len(_PRIOR))

    def of(self, kind: int) -> float:
        """The chance of a guess whose predecessors are right."""
        before = _PRIOR[kind] if self.prior is None else self.prior.of(kind)
        return (self.right[kind] + _WEIGHT * before) / (self.seen[kind] + _WEIGHT)

    def record(self, kind: int, right: int, wrong: int) -> None:
        """So many guesses in a row were right, and so many (0 or 1) behind them wrong."""
        kept = _KEPT ** (right + wrong)
        self.right[kind] = kept * self.right[kind] + right
        self.seen[kind] = kept * self.seen[kind] + right + wrong
        if self.prior is not None:
            self.prior.record(kind, right, wrong)


class Drafter:
    """Drafts of one sequence, by prompt lookup. chances: of all sequences before it."""

    def __init__(self, chances: Chances) -> None:
        self._lookup = PromptLookup()
        self._chances = Chances(chances)
        self._kind = 0  # of the last draft

    def draft(self, prompt: Sequence[int], answer: Sequence[int], most: int, share: float) -> list[int]:
        """Guesses at what follows prompt and answer that are worth verifying, at most `most`, often none. share: cost of
        a guess."""
        lookup = self._lookup
        if not len(lookup):
            lookup.extend(prompt)
        lookup.extend(answer[len(lookup) - len(prompt) :])
        found, length = lookup.draft(most)
        if not found:
            return []
        self._kind = min(length, LONGEST - 1).bit_length() - 2 if length > 4 else 0
        chance = min(self._chances.of(self._kind), 0.99)
        worth = most if share <= chance**most else int(math.log(share) / math.log(chance))
        return found[:worth] if worth >= _LEAST else []

    def record(self, drafted: int, right: int) -> None:
        """Of the last draft, whose first `drafted` guesses were verified, the first `right` were right."""
        self._chances.record(self._kind, right, int(right < drafted))


@dataclass(slots=True)
class Average:
    """Average of the latest seconds, about 16 of them. The first step of a kind is not counted: it warms up."""

    seconds: float = 0.0
    count: int = -1

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count:
            self.seconds += max(1 / self.count, _NEW) * (seconds - self.seconds)


class Speculation:
    """Times of steps with guesses and without, and what guesses have lost.

    Guesses are verified while what they lost, against the times without, is at most `LOSS` of all decoding and a few
    tokens' time. What they won is set against losses up to the same few tokens: a text that repeats does not pay for the
    next one."""

    def __init__(self) -> None:
        self.chances = Chances()
        self._plain: dict[int, Average] = {}  # answers in a step → the step without guesses
        self._share = _SHARE
        self._credit: float | None = None  # seconds that guesses may lose
        self._since_plain = 0

    def share(self, rows: int) -> float | None:
        """What a guess costs in a step of so many answers, as a share of a token's time; None: the step takes none."""
        known = rows in self._plain and self._plain[rows].count > 0
        if not known or self._since_plain >= _STALE or (self._credit is not None and self._credit <= 0):
            return None
        return self._share

    def record(self, rows: int, guesses: int, tokens: int, seconds: float) -> None:
        """A step of so many answers, with so many guesses in all, gave `tokens` tokens (rows and right guesses)."""
        average = self._plain.setdefault(rows, Average())
        plain = average.seconds or seconds
        seconds = min(seconds, _OUTLIER * plain * (1 + self._share * guesses / rows))
        gain = 0.0
        if guesses:
            self._since_plain += 1
            cost = (seconds - plain) / guesses * rows / plain
            self._share = max(self._share + 2 * _NEW * (cost - self._share), _CHEAPEST)
            gain = tokens * plain / rows - seconds
        else:
            average.add(seconds)
            self._since_plain = 0
            self._share += _FORGOTTEN * (_SHARE - self._share)
        if average.count > 0:
            most = _CREDIT * average.seconds / rows
            self._credit = min((most / 2 if self._credit is None else self._credit) + LOSS * seconds + gain, most)
