"""Request scheduler: which requests run in the next step, and the KV memory that they have.

A step is a chunk of one prompt, or a token of every answer, by turns if there are both. So a long prompt delays the
others by a chunk. Where experts are missing, a step has both, and more prompts as far as they fit into a chunk: it
reads each expert once. Chunks of a long prompt go through a layer together there, and a step is so many layers of them
as compute as much as a chunk does (`LayeredPrompt`), by turns with answers and short prompts.

KV memory is reserved for a prompt and the beginning of its answer, and for more as the answer grows. Where it ends, the
request that came last is preempted for those that came before it. Preempted requests run again later, in the steps in
which they ran (`prefix_cache.SlabContents`): no bit of them changes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor

from tiermoe.batch import Row
from tiermoe.engine.request import Counts, RequestState
from tiermoe.engine.steps import SequenceCache
from tiermoe.model.cache.prefix import PrefixCache
from tiermoe.model.cache.prefix_disk import StoredPrefix

BESIDE = 4
"""Most chunks of a prompt that runs chunk by chunk while those of another go through the layers together. It reads its
experts so many times at most, and does not wait for the other's."""

Prompt = tuple[RequestState, Row]
"""A request, and the row of its prompt that a step runs."""

_number = attrgetter("number")


@dataclass(frozen=True, slots=True)
class Limits:
    """What runs at once, at most."""

    rows: int  # requests
    context: int  # tokens of a request
    chunk: int  # tokens of a prompt in a step
    scored: int  # the same of a prompt of which all tokens are scored
    verified: int  # generated tokens of a request in a step
    together: int  # chunks of a prompt that go through a layer together
    layers: int  # of the decoder, where these are several
    joins: bool  # answers and prompts run in one step


@dataclass(slots=True)
class LayeredPrompt:
    """Chunks of a prompt on their way through the layers."""

    row: RequestState
    chunks: list[Row]
    layers: int  # of each turn
    turns: Iterator[Tensor | None] | None = None  # `Engine.step_by_layers`, from the first turn on
    done: int = 0  # layers that have run


@dataclass(frozen=True, slots=True)
class Turn:
    """What a step runs: a token of each answer and a row of each prompt, or layers of one prompt. Nothing while a
    prefix is read from disk."""

    answering: list[RequestState]
    prompts: list[Prompt]
    layered: LayeredPrompt | None
    failed: list[tuple[RequestState, Exception]]  # requests that could not begin


class RequestScheduler:
    """First come, first served: requests wait for a slab, read their prompts, and decode. A request without KV memory
    blocks the requests after it, however short they are.

    cache: the KV cache. prefixes: its slabs. layered: the prompt whose chunks are amid the layers."""

    def __init__(self, limits: Limits, cache: SequenceCache, prefixes: PrefixCache, counts: Counts) -> None:
        self.waiting: deque[RequestState] = deque()
        self.reading: deque[RequestState] = deque()  # in turns
        self.answering: list[RequestState] = []
        self.layered: LayeredPrompt | None = None
        self.prefixes = prefixes
        self._limits = limits
        self._cache = cache
        self._counts = counts
        self._read_last = False  # whether the last step read a prompt
        self._layered_last = False  # whether the last step was a turn of `layered`

    @property
    def running(self) -> int:
        """Requests that have a slab."""
        return len(self.reading) + len(self.answering)

    @property
    def idle(self) -> bool:
        """Whether there are no requests."""
        return not (self.waiting or self.reading or self.answering)

    def at_work(self) -> dict[int, RequestState]:
        """Requests that have a slab, by the slab: a copy, which any thread may ask for."""
        return {row.slab: row for row in (*self.reading, *self.answering) if row.slab >= 0}

    def schedule(self) -> Turn:
        """What the next step runs."""
        answering = self._answers()
        failed = self._admit() if self.waiting and len(answering) == len(self.answering) else []
        answering, prompts = self._take_turns(answering)
        return Turn(answering, prompts, self.layered if self._layered_last else None, failed)

    def preempt(self, row: RequestState) -> None:
        """Takes its slab from a request, which waits as the first for another one."""
        self.forget_layers(row)
        (self.answering if row.is_read else self.reading).remove(row)
        disk, saved = self.prefixes.disk, None
        if disk is not None and row.replaying:
            saved = disk.saved(row.slab, row.contents.tokens)
        self.prefixes.close(row.slab)
        row.preempt(saved)
        self.waiting.appendleft(row)
        self._counts.preemptions += 1

    def has_read(self, row: RequestState) -> None:
        """A row of a prompt has run: other prompts have their turn, or its answer begins."""
        self.crop(row)
        self._requeue(row)

    def crop(self, row: RequestState) -> None:
        """Crops the slab to the tokens that the request has: guesses were wrong, or a replayed part had more."""
        if self._cache.length(row.slab) > row.length:
            self._cache.crop(row.slab, row.length)

    def finish(self, row: RequestState) -> None:
        """An answer has ended: its slab is left to the prefix cache."""
        self.answering.remove(row)
        self.crop(row)
        self.prefixes.leave(row.slab, row.contents)

    def drop(self, number: int, failed: bool = False) -> bool:
        """Takes a request out wherever it is; whether there was one. failed: a step may have ended amid it, so that its
        slab is of no use."""
        for rows in (self.waiting, self.reading, self.answering):
            for row in [each for each in rows if each.number == number]:
                self.forget_layers(row)
                rows.remove(row)
                if row.slab >= 0 and (failed or row.stored is not None):  # what the disk has given is counted nowhere
                    self.prefixes.close(row.slab)
                elif row.slab >= 0:
                    self.prefixes.leave(row.slab, row.contents)
                return True
        return False

    def forget_layers(self, row: RequestState) -> None:
        """Where this prompt's chunks are amid the layers, they are not any more."""
        if self.layered is not None and self.layered.row is row:
            self.layered, self._layered_last = None, False

    def _answers(self) -> list[RequestState]:
        """Answers with KV memory for their next token. Without memory, the scheduler preempts the request that came
        last; if that is the answer itself, the answer waits until another request ends."""
        found: list[RequestState] = []
        for row in sorted(self.answering, key=_number):
            while row.slab >= 0 and row.length >= row.room and not self._grow(row):
                last = max((*self.reading, *self.answering), key=_number)
                if last is row:
                    return found
                self.preempt(last)
            if row.slab >= 0:
                found.append(row)
        return found

    def _grow(self, row: RequestState) -> bool:
        wanted = row.wanted(self._limits.context)
        if not self.prefixes.grow(row.slab, wanted):
            return False
        row.room = wanted
        return True

    def _admit(self) -> list[tuple[RequestState, Exception]]:
        """Admits waiting requests while there are rows and KV memory. Returns the requests whose admission failed."""
        failed: list[tuple[RequestState, Exception]] = []
        while self.waiting and self.running < self._limits.rows:
            row = self.waiting[0]
            wanted = row.wanted(self._limits.context)
            at_work = [(other.slab, other.contents) for other in (*self.reading, *self.answering)]
            try:
                if row.replaying:
                    opened = self.prefixes.reopen(row.before, row.saved, wanted, at_work)
                else:  # a prompt of which all tokens run is read from its beginning
                    ids = [] if row.request.prompt_logprobs or row.request.fresh else row.request.ids
                    opened = self.prefixes.open(ids, wanted, at_work, row.request.salt)
            except Exception as error:
                self.drop(row.number, failed=True)
                failed.append((row, error))
                continue
            if opened is None:
                break
            self.waiting.popleft()
            row.slab, row.contents, row.stored, row.room = opened.slab, opened.contents, opened.stored, wanted
            if not row.replaying:
                row.cached, row.began_at = row.length, time.perf_counter()
            self._queue(row)
        return failed

    def _take_turns(self, answering: list[RequestState]) -> tuple[list[RequestState], list[Prompt]]:
        """These answers or the next prompt, by turns; or both with more prompts, where experts are missing. All of that
        by turns with chunks that go layer by layer (`_layered_last`); only short prompts run between these (`BESIDE`).
        So an answer's next token waits for one turn of them at most."""
        layered, was_last = self.layered, self._layered_last
        reading = [row for row in self.reading if layered is None or self._runs_beside(row, layered)]
        self._layered_last = layered is not None and not (was_last and (answering or reading))
        if self._layered_last:
            return [], []
        if not reading or (self._read_last and answering):
            self._read_last = False
            return answering, []
        first = reading[0]
        joined = self._limits.joins and not first.runs_alone
        self._read_last = not joined
        if first.stored is not None:
            self._fill(first, first.stored)
            return [], []
        if self._limits.together > 1 and self._cache.kept(first.slab, first.length) < first.length:
            self.preempt(first)  # an interruption has overwritten what it would go on from
            return answering, []
        if layered is None and len(chunks := self._next_prompts(first)) > 1:
            if was_last and answering:
                return answering, []
            self._begin_layers(first, chunks)
            return [], []
        return (answering, self._that_fit(first, reading)) if joined else ([], [(first, self._next_prompt(first))])

    def _runs_beside(self, row: RequestState, layered: LayeredPrompt) -> bool:
        """Whether a prompt runs chunk by chunk between turns of another."""
        short = len(row.request.ids) - row.length <= BESIDE * self._limits.chunk
        return row is not layered.row and (short or len(self._next_prompts(row)) == 1)

    def _begin_layers(self, row: RequestState, chunks: list[Row]) -> None:
        """The next steps run chunks of a prompt layer by layer."""
        tokens = sum(len(chunk.tokens) for chunk in chunks)
        self.layered = LayeredPrompt(row, chunks, max(1, self._limits.layers * self._limits.chunk // tokens))
        self._layered_last = True

    def _that_fit(self, first: RequestState, reading: list[RequestState]) -> list[Prompt]:
        """The first of the prompts, and others whose next chunks fit into one chunk with its own."""
        found = [(first, self._next_prompt(first))]
        tokens = len(found[0][1].tokens)
        for row in reading:
            if row is first or row.runs_alone:
                continue
            part = self._next_prompt(row)
            if tokens + len(part.tokens) <= self._limits.chunk:
                found.append((row, part))
                tokens += len(part.tokens)
        return found

    def _next_prompt(self, row: RequestState) -> Row:
        scored = row.request.prompt_logprobs
        return row.next_prompt(self._limits.scored if scored else self._limits.chunk, self._limits.verified)

    def _next_prompts(self, row: RequestState) -> list[Row]:
        """What goes through a layer together."""
        return row.next_prompts(self._limits.chunk, self._limits.verified, self._limits.together)

    def _fill(self, row: RequestState, stored: StoredPrefix) -> None:
        """Reads some of a prefix from disk; after it other prompts have their turn."""
        disk = self.prefixes.disk
        if disk is not None and disk.fill(stored, row.slab):
            row.has_filled(stored)
            row.stored = None
            self.crop(row)
            if not row.replaying:
                row.cached = row.length
        self._requeue(row)

    def _requeue(self, row: RequestState) -> None:
        self.reading.remove(row)
        self._queue(row)

    def _queue(self, row: RequestState) -> None:
        (self.answering if row.is_read else self.reading).append(row)
