"""Prompt lookup: a draft of what comes next, from what followed the same tokens earlier in prompt and answer (Saxena,
"Prompt Lookup Decoding", 2023). It needs no model. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence

from tiermoe.engine.speculation import LEAST, MOST, CachedSequence, Chances, Speculation

MATCH = 3  # tokens that must be the same: fewer are followed by anything
_CHANCES = (0.35, 0.6, 0.8, 0.9)  # of a guess behind a match of 3 or 4 tokens, 5 to 7, 8 to 15, more
_TOKEN_BITS = 32
_ROW = (1 << MATCH * _TOKEN_BITS) - 1
LONGEST = 32  # tokens of a match that are looked at


class PromptLookup:
    """A sequence's tokens, indexed by each `MATCH` of them in a row. Memory grows with the sequence, about 150 bytes a
    token. places: latest places of the same last tokens that are compared."""

    def __init__(self, places: int = 8) -> None:
        self._places = places
        self._tokens: list[int] = []
        self._last: dict[int, int] = {}  # `MATCH` tokens in a row, as one number → position behind their last place
        self._earlier: list[int] = []  # position → that behind the place before of the tokens that end there; 0: none
        self._row = 0  # the last `MATCH` tokens, as one number

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence goes on with these tokens. Notes every place but the sequence's own end, which nothing follows
        yet."""
        last, earlier, row = self._last, self._earlier, self._row
        for end, token in enumerate(tokens, len(earlier)):
            if end >= MATCH:
                earlier.append(last.get(row, 0))
                last[row] = end
            else:
                earlier.append(0)
            row = (row << _TOKEN_BITS | token) & _ROW
        self._tokens += tokens
        self._row = row

    def draft(self, most: int) -> tuple[list[int], int]:
        """(`most` tokens that may follow, length of the match that says so); ([], 0) where nothing matches. Of several
        places the one with the longest match is taken, then the latest. A draft that reaches the sequence's end goes on
        with its own beginning."""
        tokens, end = self._tokens, len(self._tokens)
        place = self._last.get(self._row, 0) if end >= MATCH else 0
        if not place:
            return [], 0
        best, length = 0, 0
        for _ in range(self._places):
            same = _matching(tokens, place)
            if same > length:
                best, length = place, same
            place = self._earlier[place]
            if not place:
                break
        period = end - best
        return [tokens[best + at % period] for at in range(most)], length


def _matching(tokens: Sequence[int], place: int) -> int:
    """Number of tokens before `place` that are the same as the last ones, at most `LONGEST`."""
    end, length = len(tokens), 0
    while length < min(LONGEST, place) and tokens[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


class Lookup:
    """Drafts of all sequences by prompt lookup: what `Speculation` makes drafters with."""

    def __init__(self) -> None:
        self._chances = Chances(_CHANCES)

    def __call__(self, speculation: Speculation) -> LookupDrafter:
        return LookupDrafter(speculation, Chances(_CHANCES, self._chances))


class LookupDrafter:
    """Drafts of one sequence by prompt lookup. It learns from every draft, verified or not."""

    def __init__(self, speculation: Speculation, chances: Chances) -> None:
        self._lookup = PromptLookup()
        self._speculation = speculation
        self._chances = chances
        self._found: list[int] = []  # the last draft
        self._match = 0  # length of the match behind it
        self._withheld = False  # it was worth verifying, and was not

    def draft(
        self, prompt: Sequence[int], answer: Sequence[int], most: int, rows: int, place: CachedSequence | None = None
    ) -> list[int]:
        lookup, speculation = self._lookup, self._speculation
        if not len(lookup):
            lookup.extend(prompt)
        came = answer[len(lookup) - len(prompt) :]
        lookup.extend(came)
        if self._found:
            self._learn(came)
        self._found, self._match = lookup.draft(MOST)
        if not self._found:
            return []
        chance, worth = 1.0, 0
        for at in range(min(most, len(self._found))):
            chance *= self._chances.of(_kind(self._match + at))
            if chance < speculation.share:
                break
            worth += 1
        allowed = speculation.allows(rows)
        self._withheld = worth >= LEAST and not allowed
        return self._found[:worth] if worth >= LEAST and allowed else []

    def _learn(self, came: Sequence[int]) -> None:
        """Compares the last draft with the tokens that came."""
        if self._withheld and came:
            self._speculation.record_withheld(self._found[0] == came[0])
        self._chances.learn(((guess, _kind(self._match + at)) for at, guess in enumerate(self._found)), came)


def _kind(match: int) -> int:
    return 0 if match < 5 else min(match.bit_length() - 2, len(_CHANCES) - 1)
