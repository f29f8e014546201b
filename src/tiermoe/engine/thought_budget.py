"""Budget of thoughts: behind so many tokens of thought the tokens that end a thought are forced, and the answer goes
on, as in llama.cpp's server (common/reasoning-budget.cpp)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol


class Thinking(Protocol):
    """Reader of an answer's text."""

    @property
    def inside(self) -> bool:
        """Whether a thought is under way."""

    def add(self, text: str) -> object: ...


class ThoughtBudget:
    """Budget of the thoughts in one answer. most: their tokens. end: ids of the tokens that end a thought. thinking:
    reads the answer."""

    def __init__(self, most: int, end: Sequence[int], thinking: Thinking) -> None:
        self._left = most
        self._end = end
        self._thinking = thinking
        self._forced = deque[int]()  # to come
        self._check(thinking.inside)

    @property
    def forced(self) -> int | None:
        """The token that must come next; None: any may."""
        return self._forced[0] if self._forced else None

    def add(self, text: str) -> None:
        """Goes on behind one more token. text: what is certain of the answer's text with it."""
        if self._forced:
            self._forced.popleft()
        before = self._thinking.inside
        self._left -= before
        self._thinking.add(text)
        self._check(self._thinking.inside and not before)

    def _check(self, begun: bool) -> None:
        """Forces the end where the budget ends now, or had ended before a thought has begun."""
        if (self._thinking.inside and self._left == 0) or (begun and self._left < 0):
            self._forced.extend(self._end)
