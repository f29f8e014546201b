"""The tokens that a slab holds, and in which steps they ran: the same steps give the same bits again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tiermoe.batch import Kind
from tiermoe.generation.sequence import shared
from tiermoe.serve.prefix_disk import Stored


@dataclass(frozen=True, slots=True)
class Part:
    """`count` tokens that are held of one step (PROMPT), of steps of one token each (DECODE), or of what was read from
    disk. beyond: tokens that came with them and are held no more."""

    count: int
    how: Kind | Stored
    beyond: tuple[int, ...] = ()


@dataclass(slots=True)
class Held:
    """Tokens whose keys and values lie in a slab, and the parts in which they came."""

    tokens: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def add(self, tokens: Sequence[int], how: Kind | Stored) -> None:
        """More tokens, in a part of their own; those that were generated are one part for as long as they follow one
        another."""
        if not tokens:
            return
        last = self.parts[-1] if self.parts else None
        if how is Kind.DECODE and last is not None and last.how is Kind.DECODE:
            self.parts[-1] = Part(last.count + len(tokens), how)
        else:
            self.parts.append(Part(len(tokens), how))
        self.tokens.extend(tokens)

    def beginning(self, length: int) -> Held:
        """The first `length` tokens."""
        found, at = Held(self.tokens[:length]), 0
        for part in self.parts:
            count = min(part.count, length - at)
            if count <= 0:
                break
            cut = () if part.how is Kind.DECODE else (*self.tokens[at + count : at + part.count], *part.beyond)
            found.parts.append(Part(count, part.how, cut))
            at += count
        return found

    @property
    def reach(self) -> int:
        """Positions that were written when the parts ran."""
        first, found = 0, 0
        for part in self.parts:
            found = max(found, first + part.count + len(part.beyond))
            first += part.count
        return found

    def ran(self, at: int) -> tuple[Part, int]:
        """The part that the token at position `at` came in, and where that begins."""
        first = 0
        for part in self.parts:
            if at < first + part.count:
                return part, first
            first += part.count
        raise IndexError(f"there is no token at {at}, there are {first}")

    def whole(self, part: Part, first: int) -> tuple[int, ...]:
        """All tokens that came in a part, which begins at position `first`."""
        return (*self.tokens[first : first + part.count], *part.beyond)

    def alike(self, other: Held) -> int:
        """How many of the first tokens have the same bits in `other`, where the rest can go on behind them in the parts
        in which it ran."""
        same, at = shared(self.tokens, other.tokens), 0
        for part, its in zip(self.parts, other.parts, strict=False):
            if part.how is not its.how:
                break
            if part.how is Kind.DECODE:
                count = min(part.count, its.count, same - at)
            elif its.count >= part.count and self.whole(part, at) == other.whole(its, at):
                count = part.count
            else:
                break
            at += count
            if not count == part.count == its.count:
                break
        return at
