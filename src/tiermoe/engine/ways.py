"""The ways in which one sequence comes to its logits, with the same bits in each: `tiermoe doctor --exact` goes through
them on a user's machine, tests/test_one_arithmetic.py for every kind of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiermoe import native
from tiermoe.batch import Batch, Row, decode, prompt, verify
from tiermoe.engine.engine import Engine
from tiermoe.engine.steps import SequenceCache
from tiermoe.platform.machine import processors


class Way(NamedTuple):
    """A way to a sequence's logits."""

    name: str
    logits: Callable[[], Tensor]  # (tokens - first, vocabulary)
    first: int = 0  # the first token that has logits
    left_out: str = ""  # why nobody promises these bits here; empty: they are promised

    def differing(self, whole: Tensor) -> list[int]:
        """Positions at which the logits mismatch `whole` (tokens, vocabulary) bitwise."""
        bits, expected = (each.contiguous().view(torch.uint8) for each in (self.logits(), whole[self.first :]))
        return [self.first + at for at in (bits != expected).any(1).nonzero().flatten().tolist()]


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways of one sequence: `ids`, a prompt of `given` tokens (more than 40) and its answer. engine: with a cache
    of at least three slabs."""

    engine: Engine
    ids: Sequence[int]
    given: int

    def all(self) -> list[Way]:
        """Every way but `whole`, which they are compared with."""
        again, given = Way("once more", self.whole), self.given
        if not self.engine.decoder.chunk_invariant:
            return [again, Way("in other steps", self.whole, left_out="torch computes this model, or a part of it")]
        threads, used, sets = torch.get_num_threads(), native.instruction_set(), native.instruction_sets()
        alone = [Way("on another instruction set", self.whole, left_out=f"this machine runs {used} alone")]
        return [
            again,
            *(Way(f"in chunks of {most}", partial(self.in_chunks, most)) for most in (1, 7, 64, 100) if most < given),
            *(Way(f"after a prefix of {at}", partial(self.after_prefix, at), at) for at in (1, 40, given - 1)),
            Way("beside two other sequences", self.beside_others),
            Way("verified as guesses", self.verified),
            Way("after wrong guesses", self.rolled_back),
            Way("after a preemption", self.preempted),
            *(
                Way(f"threads: {count}", partial(self._under, torch.set_num_threads, count, threads))
                for count in sorted({1, 2, 3, processors()} - {threads})
            ),
            *(
                [Way(f"on {name}", partial(self._under, native.use, name, used)) for name in sets if name != used]
                or alone
            ),
        ]

    def whole(self) -> Tensor:
        """The prompt in one piece, then the answer's tokens one by one: logits (tokens, vocabulary)."""
        return self.in_chunks(self.given)

    def in_chunks(self, most: int) -> Tensor:
        """The prompt in steps of at most `most` tokens."""
        cache, slab = self._opened()
        return self._run(self._rows(slab, most=most), cache)

    def after_prefix(self, length: int) -> Tensor:
        """Its first tokens come from another sequence's slab."""
        cache, other = self._opened()
        self._run([prompt(other, self.ids[:length])], cache)
        return self._run(self._rows(cache.fork(other, length), length), cache)

    def beside_others(self) -> Tensor:
        """Two other sequences take part in its steps."""
        cache, slab = self._opened()
        others, found = [cache.open(), cache.open()], []
        for row in self._rows(slab, most=-(-self.given // 3)):
            if row.first:
                beside = [decode(other, cache.length(other), self.ids[1]) for other in others]
            else:
                beside = [prompt(other, self.ids[at : at + 20]) for at, other in enumerate(others, 1)]
            step = self.engine.step(Batch((row, *beside)), cache, every=True)
            found.append(step[: len(row.tokens)])
        return torch.cat(found)

    def verified(self) -> Tensor:
        """The answer is guesses, all of them right."""
        cache, slab = self._opened()
        return self._run([self._rows(slab)[0], verify(slab, self.given, self.ids[self.given :])], cache)

    def rolled_back(self) -> Tensor:
        """The guesses after the answer's first token are wrong."""
        (cache, slab), end = self._opened(), self.given + 1
        guesses = verify(slab, self.given, [self.ids[self.given], *self.ids[:3]])
        found = self._run([self._rows(slab)[0], guesses], cache)[:end]
        cache.crop(slab, end)
        return torch.cat((found, self._run(self._rows(slab, end), cache)))

    def preempted(self) -> Tensor:
        """It loses its slab, and half of its answer comes again as a part of its prompt."""
        cache, slab = self._opened()
        self._run(self._rows(slab), cache)
        cache.close(slab)
        longer = replace(self, given=(self.given + len(self.ids)) // 2)
        return self._run(longer._rows(cache.open()), cache)

    def _under(self, use: Callable[[Any], None], setting: Any, before: Any) -> Tensor:
        """On other threads or another instruction set, which may change while no step runs."""
        use(setting)
        try:
            return self.whole()
        finally:
            use(before)

    def _opened(self) -> tuple[SequenceCache, int]:
        cache = self.engine.new_cache(3)
        return cache, cache.open()

    def _rows(self, slab: int, first: int = 0, most: int | None = None) -> list[Row]:
        """The rows of the tokens from `first` on: of the prompt at most `most` in each, of the answer one."""
        starts = range(first, self.given, most or self.given)
        rows = [prompt(slab, self.ids[at : min(at + starts.step, self.given)], at) for at in starts]
        return rows + [decode(slab, at, self.ids[at]) for at in range(max(first, self.given), len(self.ids))]

    def _run(self, rows: Sequence[Row], cache: SequenceCache) -> Tensor:
        """The logits of every token of rows, a step each."""
        return torch.cat([self.engine.step(Batch((row,)), cache, every=True) for row in rows])
