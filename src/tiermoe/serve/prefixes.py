"""The slabs of a server's requests, and the beginnings that finished ones leave in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tiermoe.generation.sequence import shared
from tiermoe.serve.held import Held
from tiermoe.serve.prefix_disk import PrefixDisk, Stored


@dataclass(frozen=True, slots=True)
class Begun:
    """A slab, and what it holds of a prompt. stored: a beginning on disk, to be read into it."""

    slab: int
    held: Held = field(default_factory=Held)
    stored: Stored | None = None


class Prefixes:
    """Gives the slabs of `cache`, `rows` of them, to requests. memory: most bytes of keys and values in all slabs, of a
    slab's at least; None: as many as they hold. disk: keeps beginnings for longer than memory does.

    A request is given memory when it begins, and more as it grows; nothing is taken from one at work but by `close`.
    What it leaves stays in its slab until another one needs the slab or the memory, the oldest first: a request begins
    with the longest beginning that any slab holds, or the disk."""

    def __init__(self, cache: Any, rows: int, memory: int | None = None, disk: PrefixDisk | None = None) -> None:
        self.disk = disk
        self._cache = cache
        self._rows = rows
        self._memory = None if memory is None else max(memory, cache.nbytes(cache.context))
        self._left: OrderedDict[int, Held] = OrderedDict()  # slab → what a finished request left, oldest first
        self._taken: dict[int, int] = {}  # slab → bytes that are set aside for it, of each that is open

    @property
    def taken(self) -> int:
        """Bytes that are set aside for requests at work and for what others have left; of slabs that share no memory,
        those that they hold."""
        if self._memory is None:
            return sum(self._cache.nbytes_held(slab) for slab in list(self._taken))
        return sum(self._taken.values())

    @property
    def _running(self) -> list[int]:
        """The slabs of requests at work."""
        return [slab for slab in self._taken if slab not in self._left]

    def begin(self, ids: list[int], tokens: int, at_work: Iterable[tuple[int, Held]]) -> Begun | None:
        """A slab for a prompt, with all of it but the last token at most; None while those that run leave too little
        memory. tokens: that memory is given for. at_work: slabs of those that run."""
        known = ids[:-1]
        its = {slab: (held, shared(held.tokens, known)) for slab, held in self._all(at_work)}
        return self._begin(its, tokens, lambda length: self._found(known, length))

    def begin_again(self, past: Held, tokens: int, at_work: Iterable[tuple[int, Held]]) -> Begun | None:
        """The same for what runs again: it has the bits of `past`."""
        its = {slab: (held, past.alike(held)) for slab, held in self._all(at_work)}
        return self._begin(its, tokens, lambda length: _stored(past, length))

    def _begin(
        self, known: dict[int, tuple[Held, int]], tokens: int, stored_beyond: Callable[[int], Stored | None]
    ) -> Begun | None:
        """known: slab → what it holds, and how many tokens of it are of use. stored_beyond: what lies on disk that is
        longer than so many tokens."""
        needed = self._cache.nbytes(tokens)
        if not self._fits(needed, self._running):
            return None
        lengths = ((self._cache.kept(slab, length), slab) for slab, (_, length) in known.items())
        length, slab = max(lengths, default=(0, -1))
        stored = stored_beyond(length)
        if length and stored is None:
            begun = self._begun(slab, length, needed)
            if begun is not None:
                return Begun(begun, known[slab][0].beginning(length))
        return Begun(self._fresh(needed), stored=stored)

    def _all(self, at_work: Iterable[tuple[int, Held]]) -> Iterator[tuple[int, Held]]:
        yield from at_work
        yield from self._left.items()

    def _found(self, known: list[int], length: int) -> Stored | None:
        if self.disk is None or length >= len(known):
            return None
        stored = self.disk.find(known)
        return stored if stored is not None and stored.length > length else None

    def grow(self, slab: int, tokens: int) -> bool:
        """Gives a request at work memory for so many tokens; False while the others leave too little."""
        more = self._cache.nbytes(tokens) - self._taken[slab]
        if more <= 0:
            return True
        if not self._fits(more, self._running):
            return False
        self._make_room(more, rows=0)
        self._taken[slab] += more
        return True

    def read(self, slab: int, tokens: list[int]) -> None:
        """A prompt has been read: what it wrote stays while its answer is made. Without its last token, as the same
        prompt would look for it."""
        if self.disk is not None:
            self.disk.offer(slab, tokens[:-1])

    def leave(self, slab: int, held: Held) -> None:
        """A request has ended: its keys and values stay until their slab or its memory is needed."""
        self._left[slab] = held.beginning(self._cache.length(slab))
        self._taken[slab] = min(self._taken[slab], self._cache.nbytes(self._cache.reached(slab)))
        if self.disk is not None:
            self.disk.offer(slab, self._left[slab].tokens)

    def close(self, slab: int) -> None:
        """A request has failed, or is put back: nothing of it stays."""
        self._withdraw(slab)
        self._cache.close(slab)
        del self._taken[slab]

    def _fits(self, needed: int, beside: Iterable[int]) -> bool:
        """Whether there is memory for so much beside what these slabs have."""
        return self._memory is None or needed + sum(self._taken[slab] for slab in beside) <= self._memory

    def _make_room(self, needed: int, rows: int = 1, keep: int = -1) -> None:
        """Closes what was left the longest ago, but for the slab `keep`, until there are `rows` and so much memory."""
        for oldest in [slab for slab in self._left if slab != keep]:
            if len(self._taken) + rows <= self._rows and self._fits(needed, self._taken):
                break
            del self._left[oldest]
            self.close(oldest)

    def _fresh(self, needed: int) -> int:
        self._make_room(needed)
        slab: int = self._cache.open()
        self._taken[slab] = needed
        return slab

    def _begun(self, slab: int, length: int, needed: int) -> int | None:
        """A slab with the first `length` tokens of `slab`: itself where it was left and loses nothing, or where there
        is no room for both; else a fork. None where there is no room, or where it cannot be wound back to them."""
        free = len(self._taken) < self._rows
        if slab in self._left:
            both = free and self._fits(needed, [*self._running, slab])
            if length == len(self._left[slab].tokens) or not both:
                return self._gone_on(slab, length, needed)
        elif not free:
            return None
        self._make_room(needed, keep=slab)
        try:
            other: int = self._cache.fork(slab, length)
        except ValueError:
            return None
        self._taken[other] = needed
        return other

    def _gone_on(self, slab: int, length: int, needed: int) -> int | None:
        """The slab of a finished request with the first `length` of its tokens. None where it cannot be wound back to
        them, or where what it has taken is too much for the memory."""
        needed = max(needed, self._taken[slab])
        if not self._fits(needed, self._running):
            return None
        del self._left[slab]
        self._withdraw(slab, length)
        try:
            self._cache.crop(slab, length)
        except ValueError:
            self.close(slab)
            return None
        self._taken[slab] = 0
        self._make_room(needed, rows=0)
        self._taken[slab] = needed
        return slab

    def _withdraw(self, slab: int, length: int = 0) -> None:
        if self.disk is not None:
            self.disk.withdraw(slab, length)


def _stored(past: Held, length: int) -> Stored | None:
    """What was read from disk at the beginning of `past`, to be read again; None where that has `length` tokens at the
    most."""
    first = past.parts[0] if past.parts else None
    if first is None or not isinstance(first.how, Stored) or first.count <= length:
        return None
    return first.how.anew()
