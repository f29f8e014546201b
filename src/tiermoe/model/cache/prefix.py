"""Prefix cache: the KV slabs of requests, and prompt prefixes found again in the slabs of earlier ones.

A finished request leaves its keys and values in its slab until another request needs the slab or its memory. A new
request begins with the longest prefix that any slab holds, or that lies on disk (`prefix_disk.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiermoe.batch import Kind
from tiermoe.model.cache.prefix_disk import BLOCK, PrefixDisk, StoredPrefix


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens that both sequences begin with."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of a slab from one source: a prompt step, decode steps, or the disk."""

    count: int  # tokens in the slab
    source: Kind | StoredPrefix  # PROMPT: one step; DECODE: steps of one token each; or read from disk
    cropped: tuple[int, ...] = ()  # tokens that ran after them in the same step and were dropped


@dataclass(slots=True)
class SlabContents:
    """Tokens whose keys and values lie in a slab, and the steps in which they ran: the same steps give the same bits
    again. salt: prefixes are shared among requests of one salt; those of a salt are not kept on disk."""

    tokens: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    salt: str = ""

    def add(self, tokens: Sequence[int], source: Kind | StoredPrefix) -> None:
        """Appends tokens as a part of their own; generated tokens in a row are one part."""
        if not tokens:
            return
        last = self.parts[-1] if self.parts else None
        if source is Kind.DECODE and last is not None and last.source is Kind.DECODE:
            self.parts[-1] = Part(last.count + len(tokens), source)
        else:
            self.parts.append(Part(len(tokens), source))
        self.tokens.extend(tokens)

    def prefix(self, length: int) -> SlabContents:
        """The first `length` tokens."""
        found, at = SlabContents(self.tokens[:length], salt=self.salt), 0
        for part in self.parts:
            count = min(part.count, length - at)
            if count <= 0:
                break
            cut = () if part.source is Kind.DECODE else (*self.tokens[at + count : at + part.count], *part.cropped)
            found.parts.append(Part(count, part.source, cut))
            at += count
        return found

    def resumable(self, length: int) -> int:
        """How many of the first `length` tokens stay where the rest is to run in the steps of these contents."""
        at = 0
        for part in self.parts:
            if at + part.count > length:
                return length if part.source is Kind.DECODE else at
            at += part.count
        return at

    @property
    def written(self) -> int:
        """Positions that the steps of all parts wrote, cropped ones included."""
        first, found = 0, 0
        for part in self.parts:
            found = max(found, first + part.count + len(part.cropped))
            first += part.count
        return found

    def part_at(self, position: int) -> tuple[Part, int]:
        """The part of the token at a position, and the part's first position."""
        first = 0
        for part in self.parts:
            if position < first + part.count:
                return part, first
            first += part.count
        raise IndexError(f"there is no token at {position}, there are {first}")

    def step_tokens(self, part: Part, first: int) -> tuple[int, ...]:
        """All tokens of the step of a part that begins at position `first`, cropped ones included."""
        return (*self.tokens[first : first + part.count], *part.cropped)

    def reusable(self, other: SlabContents) -> int:
        """Length of the prefix that `other` holds with the same bits, where the rest can run after it in the steps of
        these contents."""
        same, at = common_prefix(self.tokens, other.tokens) if self.salt == other.salt else 0, 0
        for part, their in zip(self.parts, other.parts, strict=False):
            if part.source is not their.source:
                break
            if part.source is Kind.DECODE:
                count = min(part.count, their.count, same - at)
            elif their.count >= part.count and self.step_tokens(part, at) == other.step_tokens(their, at):
                count = part.count
            else:
                break
            at += count
            if not count == part.count == their.count:
                break
        return at


@dataclass(frozen=True, slots=True)
class OpenedSlab:
    """A slab for a request, with the prefix that was found."""

    slab: int
    contents: SlabContents
    stored: StoredPrefix | None = None  # a prefix on disk that is still to be read into the slab


class PrefixCache:
    """KV slabs of requests at work, and of finished ones whose prefixes may be used again.

    cache: the KV cache, of at least `rows` slabs. memory: bytes of keys and values in all slabs together, at least
    those of one full slab; None: those of all slabs. disk: keeps prefixes for longer than memory does.

    Memory is reserved for a request when it begins and as it grows. Nothing is taken from a request at work but by
    `close`; what finished requests left is evicted, the oldest first."""

    def __init__(self, cache: Any, rows: int, memory: int | None = None, disk: PrefixDisk | None = None) -> None:
        self.disk = disk
        self._cache = cache
        self._rows = rows
        self._memory = None if memory is None else max(memory, cache.nbytes(cache.context))
        self._left: OrderedDict[int, SlabContents] = OrderedDict()  # slabs of finished requests, oldest first
        self._reserved: dict[int, int] = {}  # bytes of each open slab

    @property
    def reserved(self) -> int:
        """Bytes reserved for requests at work and for what finished ones left; where memory is not shared, the bytes
        that the slabs hold."""
        if self._memory is None:
            return sum(self._cache.nbytes_held(slab) for slab in list(self._reserved))
        return sum(self._reserved.values())

    def open(
        self, ids: list[int], tokens: int, at_work: Iterable[tuple[int, SlabContents]], salt: str = ""
    ) -> OpenedSlab | None:
        """A slab for the prompt `ids`, with a prefix of all but its last token at most; None while requests at work
        leave too little memory. tokens: to reserve memory for. at_work: slabs of the requests at work. salt: of
        `SlabContents`."""
        known, disk = ids[:-1], None if salt else self.disk

        def usable(contents: SlabContents) -> int:
            return common_prefix(contents.tokens, known) if contents.salt == salt else 0

        def stored_beyond(length: int) -> StoredPrefix | None:
            stored = disk.find(known) if disk is not None and length < len(known) else None
            return stored if stored is not None and stored.length > length else None

        return self._open(at_work, tokens, usable, stored_beyond, salt)

    def reopen(
        self,
        before: SlabContents,
        saved: StoredPrefix | None,
        tokens: int,
        at_work: Iterable[tuple[int, SlabContents]],
    ) -> OpenedSlab | None:
        """`open` for a preempted request with the slab contents `before`, of which `saved` is on disk: the prefix has
        the same bits."""

        def stored_beyond(length: int) -> StoredPrefix | None:
            if saved is not None and before.resumable(saved.length) > length:
                return saved.unread()
            first = before.parts[0] if before.parts else None
            if first is None or not isinstance(first.source, StoredPrefix) or first.count <= length:
                return None
            return first.source.unread()

        return self._open(at_work, tokens, before.reusable, stored_beyond, before.salt)

    def _open(
        self,
        at_work: Iterable[tuple[int, SlabContents]],
        tokens: int,
        usable: Callable[[SlabContents], int],
        stored_beyond: Callable[[int], StoredPrefix | None],
        salt: str,
    ) -> OpenedSlab | None:
        """usable: length of the prefix of a slab's contents that the request can use. stored_beyond: the prefix on disk
        that is longer than so many tokens."""
        needed = self._cache.nbytes(tokens)
        if not self._fits(needed, self._running()):
            return None
        contents = {**dict(at_work), **self._left}
        lengths = ((self._cache.kept(slab, usable(each)), slab) for slab, each in contents.items())
        length, slab = max(lengths, default=(0, -1))
        stored = stored_beyond(length)
        if length and stored is None:
            opened = self._continue(slab, length, needed)
            if opened is not None:
                return OpenedSlab(opened, contents[slab].prefix(length))
        self._make_room(needed)
        fresh: int = self._cache.open()
        self._reserved[fresh] = needed
        return OpenedSlab(fresh, SlabContents(salt=salt), stored)

    def grow(self, slab: int, tokens: int) -> bool:
        """Reserves memory for so many tokens of a request at work; False while the others leave too little."""
        more = self._cache.nbytes(tokens) - self._reserved[slab]
        if more <= 0:
            return True
        if not self._fits(more, self._running()):
            return False
        self._make_room(more, rows=0)
        self._reserved[slab] += more
        return True

    def prompt_read(self, slab: int, contents: SlabContents, done: bool) -> None:
        """Offers what has been read of a prompt to the disk, so that it is there when the request is preempted: all but
        its last token, as the same prompt would look for it; until it is done whole blocks, where they are enough to go
        on from."""
        tokens = contents.tokens
        if self.disk is None or contents.salt:
            return
        if done:
            self.disk.offer(slab, tokens[:-1])
        elif not self._cache.has_ends:
            self.disk.offer(slab, tokens[: len(tokens) // BLOCK * BLOCK])

    def leave(self, slab: int, contents: SlabContents) -> None:
        """Keeps the slab of a finished request until its slab or memory is needed."""
        self._left[slab] = contents.prefix(self._cache.length(slab))
        self._reserved[slab] = min(self._reserved[slab], self._cache.nbytes(self._cache.reached(slab)))
        if self.disk is not None and not contents.salt:
            self.disk.offer(slab, self._left[slab].tokens)

    def close(self, slab: int) -> None:
        """Frees the slab of a request that failed or is preempted."""
        self._withdraw(slab)
        self._cache.close(slab)
        del self._reserved[slab]

    def _running(self) -> list[int]:
        """Slabs of requests at work."""
        return [slab for slab in self._reserved if slab not in self._left]

    def _fits(self, needed: int, beside: Iterable[int]) -> bool:
        """Whether there is memory for so many bytes beside those of the slabs `beside`."""
        return self._memory is None or needed + sum(self._reserved[slab] for slab in beside) <= self._memory

    def _make_room(self, needed: int, rows: int = 1, keep: int = -1) -> None:
        """Evicts what finished requests left, the oldest first and never the slab `keep`, until `rows` slabs and
        `needed` bytes are free."""
        for oldest in [slab for slab in self._left if slab != keep]:
            if len(self._reserved) + rows <= self._rows and self._fits(needed, self._reserved):
                break
            del self._left[oldest]
            self.close(oldest)

    def _continue(self, slab: int, length: int, needed: int) -> int | None:
        """A slab with the first `length` tokens of `slab`: that slab itself where a finished request left it and loses
        nothing, or if there is no room for both; else a fork. None without room, or if the slab cannot be
        cropped to them."""
        free = len(self._reserved) < self._rows
        if slab in self._left:
            both = free and self._fits(needed, [*self._running(), slab])
            if length == len(self._left[slab].tokens) or not both:
                return self._take_over(slab, length, needed)
        elif not free:
            return None
        self._make_room(needed, keep=slab)
        try:
            fork: int = self._cache.fork(slab, length)
        except ValueError:
            return None
        self._reserved[fork] = needed
        return fork

    def _take_over(self, slab: int, length: int, needed: int) -> int | None:
        """The slab of a finished request, cropped to `length` tokens. None if it cannot be, or if its pages are
        too many for the memory."""
        needed = max(needed, self._reserved[slab])
        if not self._fits(needed, self._running()):
            return None
        del self._left[slab]
        self._withdraw(slab, length)
        try:
            self._cache.crop(slab, length)
        except ValueError:
            self.close(slab)
            return None
        self._reserved[slab] = 0
        self._make_room(needed, rows=0)
        self._reserved[slab] = needed
        return slab

    def _withdraw(self, slab: int, length: int = 0) -> None:
        if self.disk is not None:
            self.disk.withdraw(slab, length)
