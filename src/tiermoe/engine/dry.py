"""DRY: a penalty for each token that would go on with a sequence that prompt and answer have already (p-e-w,
text-generation-webui, pull request 5677, 2024). Definition: llama.cpp, src/llama-sampling.cpp
(`llama_sampler_dry_apply`, `get_overlapping_token_sequences`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from tiermoe.engine.detokenize import token_bytes
from tiermoe.model.tokenizer import Tokenizer

_LONGEST_REST = 20  # tokens of a breaker after its first one that are compared, as in llama.cpp
_HARDEST = 1e8  # a larger penalty, divided by the smallest temperature, would overflow


class Breakers:
    """Strings that no repetition goes over, as tokens: a token that contains a string, or one that ends with the
    beginning of a string and is followed by the tokens of its rest. Tokens are looked at as they come."""

    def __init__(self, strings: Sequence[str], tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._strings = [string.encode() for string in strings if string]
        self._beginning: dict[bytes, list[bytes]] = defaultdict(list)  # proper beginning → strings that have it
        for string in self._strings:
            for end in range(1, len(string)):
                self._beginning[string[:end]].append(string)
        self._rests: dict[int, list[list[int]]] = {}

    def breaks(self, token: int) -> bool:
        """Whether a token contains a string."""
        return [] in self._rests_behind(token)

    def tokens_behind(self, tokens: Sequence[int], most: int) -> int | None:
        """How many tokens at the end come after the last breaker; None: none of the last `most` tokens begins one."""
        if not self._strings:
            return None
        for behind in range(min(most, len(tokens))):
            at = len(tokens) - behind
            rests = self._rests_behind(tokens[at - 1])
            if whole := [len(rest) for rest in rests if list(tokens[at : at + len(rest)]) == rest]:
                return behind - max(whole)
        return None

    def _rests_behind(self, token: int) -> list[list[int]]:
        """Tokens after `token` with which it is a breaker; [] if it is one alone."""
        found = self._rests.get(token)
        if found is None:
            found = self._rests[token] = self._find_rests(token) if self._strings else []
        return found

    def _find_rests(self, token: int) -> list[list[int]]:
        assert self._tokenizer is not None
        text = token_bytes(self._tokenizer, token)
        found: list[list[int]] = [[]] if any(string in text for string in self._strings) else []
        for length in range(1, len(text) + 1):
            for string in self._beginning.get(text[len(text) - length :], ()):
                rest = string[length:]
                if string not in text and (rest[0] & 0xC0) != 0x80:  # tokens of a part of a character are not known
                    tokens = self._tokenizer.encode(rest.decode(), add_special_tokens=False)
                    found.append(tokens[:_LONGEST_REST])
        return found


class Dry:
    """The penalties of one answer: multiplier · base ^ (length of the sequence that is repeated - allowed_length), from
    allowed_length on. last_n: tokens that are looked at; -1: all.

    The first token of an answer takes time in proportion to the prompt, in Python (Z-algorithm); each further one a few
    operations on arrays of as many numbers."""

    def __init__(self, multiplier: float, base: float, allowed_length: int, last_n: int, breakers: Breakers) -> None:
        self._multiplier, self._base = multiplier, base
        self._allowed = allowed_length
        self._last_n = last_n
        self._breakers = breakers
        self._seen = 0  # tokens of prompt and answer
        self._tokens: NDArray[numpy.int64] = numpy.zeros(0, numpy.int64)
        self._repeated: NDArray[numpy.int64] = numpy.zeros(0, numpy.int64)
        """For each token but the last: how many tokens, up to it, are those at the end, after the last breaker."""

    def penalties(self, before: Sequence[int]) -> dict[int, float]:
        """Token id → what is subtracted from its logit. before: tokens of prompt and answer so far; mostly one more
        than in the call before."""
        if len(before) == self._seen + 1 and self._seen:
            self._add(before)
        else:
            self._begin(before)
        self._seen = len(before)
        reach = numpy.minimum(self._repeated, numpy.arange(1, len(self._repeated) + 1))  # no further than last_n
        places = numpy.flatnonzero(reach >= self._allowed)
        places = places[numpy.argsort(reach[places], kind="stable")]  # of a token the longest is kept
        longest = dict(zip(self._tokens[places + 1].tolist(), reach[places].tolist(), strict=True))
        return {token: self._penalty(length) for token, length in longest.items() if not self._breakers.breaks(token)}

    def _penalty(self, length: int) -> float:
        with numpy.errstate(over="ignore"):
            return float(min(self._multiplier * numpy.power(self._base, float(length - self._allowed)), _HARDEST))

    def _begin(self, before: Sequence[int]) -> None:
        window = before[-self._last_n :] if self._last_n > 0 else before if self._last_n else []
        self._tokens = numpy.array(window, numpy.int64)
        self._repeated = numpy.array(_z(window[::-1])[:0:-1], numpy.int64)
        self._end_at_breaker(before, len(before))

    def _add(self, before: Sequence[int]) -> None:
        """Goes on with one more token: a sequence that is repeated goes on where the same token stands, and ends
        elsewhere."""
        longer = numpy.concatenate((numpy.zeros(1, numpy.int64), self._repeated)) + 1
        self._repeated = numpy.where(self._tokens == before[-1], longer[: len(self._tokens)], 0)
        self._tokens = numpy.append(self._tokens, before[-1])
        if self._last_n >= 0:
            first = max(len(self._tokens) - self._last_n, 0)
            self._tokens, self._repeated = self._tokens[first:], self._repeated[first:]
        self._end_at_breaker(before, _LONGEST_REST + 1)

    def _end_at_breaker(self, before: Sequence[int], most: int) -> None:
        behind = self._breakers.tokens_behind(before, most)
        if behind is not None:
            self._repeated = numpy.minimum(self._repeated, behind)


def _z(sequence: Sequence[int]) -> list[int]:
    """For each place, how many elements from there on are those at the beginning (Z-algorithm); 0 for the first place.
    Main & Lorentz, "An O(n log n) Algorithm for Finding All Repetitions in a String", 1984; Gusfield, "Algorithms on
    Strings, Trees, and Sequences", 1997, section 1.4."""
    lengths, left, right = [0] * len(sequence), 0, 0  # sequence[left:right] is the match that reaches furthest
    for at in range(1, len(sequence)):
        length = min(lengths[at - left], right - at) if at < right else 0
        if at + length >= right:
            while at + length < len(sequence) and sequence[length] == sequence[at + length]:
                length += 1
            left, right = at, at + length
        lengths[at] = length
    return lengths
