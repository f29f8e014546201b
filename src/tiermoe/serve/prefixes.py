"""The slabs of a server's requests, and the beginnings that finished ones leave in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tiermoe.generation.sequence import shared
from tiermoe.serve.prefix_disk import PrefixDisk, Stored


@dataclass(frozen=True, slots=True)
class Begun:
    """A slab that holds the first `length` tokens of a prompt. stored: a beginning on disk, to be read into it."""

    slab: int
    length: int = 0
    stored: Stored | None = None


class Prefixes:
    """Gives the slabs of `cache`, `rows` of them, to requests. disk: keeps beginnings for longer than memory does.

    What a request leaves stays in its slab until another one needs it, the oldest first: a request begins with the
    longest beginning that any slab holds, or the disk."""

    def __init__(self, cache: Any, rows: int, disk: PrefixDisk | None = None) -> None:
        self.disk = disk
        self._cache = cache
        self._rows = rows
        self._left: OrderedDict[int, list[int]] = OrderedDict()  # slab → tokens of a finished request, oldest first
        self._open = 0

    def begin(self, ids: list[int], at_work: Iterable[tuple[int, list[int]]]) -> Begun:
        """A slab for a prompt, with all of it but the last token at most. at_work: (slab, tokens) of those that run."""
        known = ids[:-1]
        held = ((slab, shared(tokens, known)) for slab, tokens in (*at_work, *self._left.items()))
        length, slab = max(((self._cache.kept(slab, length), slab) for slab, length in held), default=(0, -1))
        stored = self.disk.find(known) if self.disk is not None and length < len(known) else None
        if length and (stored is None or stored.length <= length):
            free = self._open < self._rows
            mine = slab in self._left and (not free or length == len(self._left[slab]))
            if (mine or free) and (begun := self._begun(slab, length, mine)) is not None:
                return Begun(begun, length)
        return Begun(self._fresh(), 0, stored)

    def read(self, slab: int, tokens: list[int]) -> None:
        """A prompt has been read: what it wrote stays while its answer is made. Without its last token, as the same
        prompt would look for it."""
        if self.disk is not None:
            self.disk.offer(slab, tokens[:-1])

    def leave(self, slab: int, tokens: list[int]) -> None:
        """A request has ended: its keys and values stay until their slab is needed."""
        self._left[slab] = tokens[: self._cache.length(slab)]
        if self.disk is not None:
            self.disk.offer(slab, self._left[slab])

    def _fresh(self) -> int:
        if self._open == self._rows:
            oldest, _ = self._left.popitem(last=False)
            self._close(oldest)
        self._open += 1
        opened: int = self._cache.open()
        return opened

    def _begun(self, slab: int, length: int, mine: bool) -> int | None:
        """A slab with the first `length` tokens of `slab`: itself where it is `mine`, else a fork. None where it cannot
        be wound back to them."""
        if mine:
            del self._left[slab]
            self._withdraw(slab, length)
        else:
            slab = self._cache.fork(slab)
            self._open += 1
        try:
            self._cache.crop(slab, length)
        except ValueError:
            self._close(slab)
            return None
        return slab

    def _close(self, slab: int) -> None:
        self._withdraw(slab)
        self._cache.close(slab)
        self._open -= 1

    def _withdraw(self, slab: int, length: int = 0) -> None:
        if self.disk is not None:
            self.disk.withdraw(slab, length)
