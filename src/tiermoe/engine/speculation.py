"""Speculation: how many guesses at next tokens a step verifies, decided from times. It changes when tokens come, never
which: a verified token has the logits that it has alone, and is chosen from them. Standard library only.

A guess costs what it adds to a step: computing it, and reading experts that no other token of the step uses. It saves a
token's time where it is right. So a guess is verified where its chance is above its cost, as a share of a token's time
without speculation (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, section 3.4).
Both are measured while answers are written: the cost covers the drive where experts are missing, the chance what is
being written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tiermoe.types import MOST_VERIFIED

if TYPE_CHECKING:
    from tiermoe.model.cache.kv import KVCache

MOST = MOST_VERIFIED - 1  # guesses of a sequence in a step
LEAST = 2  # guesses that are worth a step of several tokens: its first one costs more than the next
_WEIGHT = 4.0  # observations that a prior counts for
_KEPT = 0.96  # of the weight of older observations, for each newer one

_CHEAPEST = 1e-3  # least share of a token's time that a guess is taken to cost
_SHARE = 0.6  # cost of a guess before one was measured, as a share of a token's time
_NEW = 1 / 16  # weight of the latest time in an average
_OUTLIER = 3.0  # times an average: longer steps count as this long
_FORGOTTEN = 1 / 512  # of what is known of the cost, for each step without guesses: it is asked again
_STALE = 32  # steps with guesses after which one runs without

LOSS = 0.01
"""Share of the time of decoding that guesses may lose, besides `_CREDIT`."""
_CREDIT = 8.0  # tokens' time: most that may be lost beyond that, of what guesses won; one begins with half of it


class CachedSequence(NamedTuple):
    """A sequence in the KV cache, all of it but its last token."""

    cache: KVCache
    slab: int
    end: int  # the position of the last token


class Drafter(Protocol):
    """Guesses at the next tokens of one sequence."""

    def draft(
        self, prompt: Sequence[int], answer: Sequence[int], most: int, rows: int, place: CachedSequence | None = None
    ) -> list[int]:
        """Guesses at what follows prompt and answer that are worth verifying, at most `most`, often none. rows: answers
        in the step. place: the sequence in the model that verifies, for drafters that look there. The sequence
        goes on from call to call."""


class DraftRequest(NamedTuple):
    """A drafter, and what its `draft` is called with."""

    drafter: Any
    prompt: Sequence[int]
    answer: Sequence[int]
    most: int
    rows: int
    place: CachedSequence


def draft_alone(asked: Sequence[DraftRequest]) -> list[list[int]]:
    """The draft of each drafter."""
    return [drafter.draft(*rest) for drafter, *rest in asked]


class Chances:
    """How often guesses of each kind were right. assumed: chance of each kind before any. earlier: of all sequences,
    which take its place."""

    def __init__(self, assumed: Sequence[float], earlier: Chances | None = None) -> None:
        self._assumed = assumed
        self._earlier = earlier
        self._right = [0.0] * len(assumed)
        self._seen = [0.0] * len(assumed)

    def of(self, kind: int) -> float:
        """The chance of a guess whose predecessors are right."""
        before = self._assumed[kind] if self._earlier is None else self._earlier.of(kind)
        return (self._right[kind] + _WEIGHT * before) / (self._seen[kind] + _WEIGHT)

    def learn(self, guesses: Iterable[tuple[int, int]], came: Sequence[int]) -> None:
        """Compares a draft, (token, kind) each, with the tokens that came, up to the first that is wrong."""
        for (guess, kind), token in zip(guesses, came, strict=False):
            self._record(kind, guess == token)
            if guess != token:
                break

    def _record(self, kind: int, right: bool) -> None:
        self._right[kind] = _KEPT * self._right[kind] + right
        self._seen[kind] = _KEPT * self._seen[kind] + 1
        if self._earlier is not None:
            self._earlier._record(kind, right)


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
    `share`: what a guess costs, of a token's time.

    drafter: makes that of a sequence. drafts: gives the drafts of all sequences of a step."""

    def __init__(
        self,
        drafter: Callable[[Speculation], Drafter],
        drafts: Callable[[Sequence[DraftRequest]], list[list[int]]] = draft_alone,
    ) -> None:
        self._drafter = drafter
        self.drafts = drafts
        self.share = _SHARE
        self._plain: dict[int, Average] = {}  # answers in a step → the step without guesses
        self._credit = _CREDIT / 2  # tokens' times that guesses may lose
        self._since_plain = 0
        self._ignored = False  # the running step's time

    def drafter(self) -> Drafter:
        """The drafter of a new sequence."""
        return self._drafter(self)

    def allows(self, rows: int) -> bool:
        """Whether a step of so many answers may have guesses."""
        known = rows in self._plain and self._plain[rows].count > 0
        return known and self._since_plain < _STALE and self._credit > 0

    def record(self, rows: int, guesses: int, tokens: int, seconds: float) -> None:
        """A step of so many answers, with so many guesses in all, gave `tokens` tokens (rows and right guesses)."""
        if self._ignored:
            self._ignored = False
            return
        average = self._plain.get(rows)
        if average is None:
            average = self._plain[rows] = Average()
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

    def ignore_step(self) -> None:
        """The running step takes what no later one does: its time says nothing of guesses."""
        self._ignored = True

    def record_withheld(self, right: bool) -> None:
        """A guess that was worth verifying, and was not verified, would have been right or not."""
        if self._credit <= 0:
            self._earn(right - self.share)

    def _earn(self, tokens: float) -> None:
        self._credit = min(self._credit + tokens, _CREDIT)
