"""Speculation: how many tokens of a draft a step verifies, decided from times. It changes when tokens come, never
which: a verified token has the logits that it has alone, and is chosen from them. Standard library only.

A guess costs what it adds to a step: computing it, and reading experts that no other token of the step uses. It saves a
token's time where it is right. So a guess is verified where its chance is above its cost, as a share of a token's time
without speculation (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, section 3.4).
Both are measured while answers are written: the cost covers the drive where experts are missing, the chance what is
being written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tiermoe.engine.prompt_lookup import PromptLookup

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

LOSS = 0.01
"""Share of the time of decoding that guesses may lose, beside `_CREDIT`."""
_CREDIT = 8.0  # tokens' time: most that may be lost beyond that, of what guesses won; one begins with half of it


@dataclass(slots=True)
class Chances:
    """How often guesses were right, by the length of the match behind each. prior: what is assumed before."""

    prior: Chances | None = None
    right: list[float] = field(default_factory=lambda: [0.0] * len(_PRIOR))
    seen: list[float] = field(default_factory=lambda: [0.0] * len(_PRIOR))

    def of(self, match: int) -> float:
        """The chance of a guess behind a match of so many tokens."""
        kind = _kind(match)
        before = _PRIOR[kind] if self.prior is None else self.prior.of(match)
        return (self.right[kind] + _WEIGHT * before) / (self.seen[kind] + _WEIGHT)

    def record(self, match: int, right: bool) -> None:
        """A guess behind a match of so many tokens was right, or was not."""
        kind = _kind(match)
        self.right[kind] = _KEPT * self.right[kind] + right
        self.seen[kind] = _KEPT * self.seen[kind] + 1
        if self.prior is not None:
            self.prior.record(match, right)


def _kind(match: int) -> int:
    return 0 if match < 5 else min(match.bit_length() - 2, len(_PRIOR) - 1)


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
    tokens' time. What they won is set against losses up to the same few tokens: a text that repeats does not pay for
    the next one. Once they have lost too much, they are verified again when as many would have been right since.
    `share`: what a guess costs, of a token's time."""

    def __init__(self) -> None:
        self.chances = Chances()
        self.share = _SHARE
        self._plain: dict[int, Average] = {}  # answers in a step → the step without guesses
        self._credit = _CREDIT / 2  # tokens' times that guesses may lose
        self._since_plain = 0

    def allows(self, rows: int) -> bool:
        """Whether a step of so many answers may have guesses."""
        known = rows in self._plain and self._plain[rows].count > 0
        return known and self._since_plain < _STALE and self._credit > 0

    def record(self, rows: int, guesses: int, tokens: int, seconds: float) -> None:
        """A step of so many answers, with so many guesses in all, gave `tokens` tokens (rows and right guesses)."""
        average = self._plain.setdefault(rows, Average())
        plain = average.seconds or seconds
        seconds = min(seconds, _OUTLIER * plain * (1 + self.share * guesses / rows))
        took = rows * seconds / plain  # in tokens' times
        if guesses:
            self._since_plain += 1
            self.share = max(self.share + 2 * _NEW * ((took - rows) / guesses - self.share), _CHEAPEST)
            self._earn(tokens - took)
        else:
            average.add(seconds)
            self._since_plain = 0
            self.share += _FORGOTTEN * (_SHARE - self.share)
        self._earn(LOSS * took)

    def record_withheld(self, right: bool) -> None:
        """A guess that was worth verifying, and was not verified, would have been right or not."""
        if self._credit <= 0:
            self._earn(right - self.share)

    def _earn(self, tokens: float) -> None:
        self._credit = min(self._credit + tokens, _CREDIT)


class Drafter:
    """Drafts of one sequence, by prompt lookup. It learns from every draft, verified or not."""

    def __init__(self, speculation: Speculation) -> None:
        self._lookup = PromptLookup()
        self._speculation = speculation
        self._chances = Chances(speculation.chances)
        self._found: list[int] = []  # the last draft
        self._match = 0  # length of the match behind it
        self._withheld = False  # it was worth verifying, and was not

    def draft(self, prompt: Sequence[int], answer: Sequence[int], most: int, rows: int) -> list[int]:
        """Guesses at what follows prompt and answer that are worth verifying, at most `most`, often none. rows: answers
        in the step."""
        lookup, speculation = self._lookup, self._speculation
        if not len(lookup):
            lookup.extend(prompt)
        came = answer[len(lookup) - len(prompt) :]
        lookup.extend(came)
        self._learn(came)
        self._found, self._match = lookup.draft(MOST)
        chance, worth = 1.0, 0
        for at in range(min(most, len(self._found))):
            chance *= self._chances.of(self._match + at)
            if chance < speculation.share:
                break
            worth += 1
        allowed = speculation.allows(rows)
        self._withheld = worth >= _LEAST and not allowed
        return self._found[:worth] if worth >= _LEAST and allowed else []

    def _learn(self, came: Sequence[int]) -> None:
        """Compares the last draft with the tokens that came."""
        if self._withheld and came:
            self._speculation.record_withheld(self._found[0] == came[0])
        for at, (guess, token) in enumerate(zip(self._found, came, strict=False)):
            self._chances.record(self._match + at, guess == token)
            if guess != token:
                break
