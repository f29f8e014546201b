"""Prompt lookup: a draft of what comes next, from what followed the same tokens earlier in prompt and answer (Saxena,
"Prompt Lookup Decoding", 2023). It needs no model. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MATCH = 3  # tokens that must be the same: fewer are followed by anything
LONGEST = 32  # tokens of a match that are looked at


class PromptLookup:
    """A sequence's tokens, indexed by each `MATCH` of them in a row. Memory grows with the sequence, about 150 bytes a
    token. places: latest places of the same last tokens that are compared."""

    def __init__(self, places: int = 8) -> None:
        self._places = places
        self._tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}  # tokens in a row → position behind their last place
        self._earlier: list[
            int
        ] = []  # position → position behind the place before of the tokens that end there; 0: none

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """The sequence goes on with these tokens."""
        self._tokens.extend(tokens)

    def draft(self, most: int) -> tuple[list[int], int]:
        """(`most` tokens that may follow, length of the match that says so); ([], 0) where nothing matches. Of several
        places the one with the longest match is taken, then the latest. A draft that reaches the sequence's end goes on
        with its own beginning."""
        self._index()
        tokens, end = self._tokens, len(self._tokens)
        best, length = 0, 0
        place = self._last.get(tuple(tokens[-MATCH:]), 0)
        for _ in range(self._places):
            if not place:
                break
            same = _matching(tokens, place)
            if same > length:
                best, length = place, same
            place = self._earlier[place]
        period = end - best
        return ([tokens[best + at % period] for at in range(most)], length) if best else ([], 0)

    def _index(self) -> None:
        """Notes every place but the sequence's own end, which nothing follows yet."""
        tokens, last, earlier = self._tokens, self._last, self._earlier
        for end in range(len(earlier), len(tokens)):
            row = tuple(tokens[max(0, end - MATCH) : end])
            earlier.append(last.get(row, 0) if len(row) == MATCH else 0)
            if len(row) == MATCH:
                last[row] = end


def _matching(tokens: Sequence[int], place: int) -> int:
    """Number of tokens before `place` that are the same as the last ones, at most `LONGEST`."""
    end, length = len(tokens), 0
    while length < min(LONGEST, place) and tokens[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length
