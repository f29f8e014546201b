"""Continuous batching: requests join and leave a running batch at any step.

A step is one call of the engine: a chunk of one prompt, or a token of every answer, by turns where there are both. So a
long prompt delays the others by a chunk. Where experts are missing, a step has both, and more prompts as far as they
fit into a chunk: it reads each expert once. No request's tokens depend on what else runs: prompts are computed apart,
and tokens that are generated together have the bits that each has alone.

Memory for keys and values is set aside for a prompt and the beginning of its answer, and for more as the answer grows.
Where it is used up, the request that came last is put back into the queue for those that came before it, and what has
run of it runs again later, in the parts in which it ran (`held.py`), those of another request's beginning included: no
bit of it changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor

from tiermoe.batch import Batch, Kind, Row
from tiermoe.decide.phase_costs import PhaseCosts
from tiermoe.errors import PromptError
from tiermoe.serve.prefix_disk import PrefixDisk
from tiermoe.serve.prefixes import Begun, Prefixes
from tiermoe.serve.request import Piece, Request
from tiermoe.serve.scoring import use_of
from tiermoe.serve.work import Work, work_on
from tiermoe.types import FEW_TOKENS


class TooLongError(PromptError):
    """A prompt that leaves no room for an answer."""


@dataclass(slots=True)
class Counts:
    """What has been done since the beginning. prompt_tokens: of prompts that are through, those that were read.
    cached_tokens: those that were found in what earlier requests left. aborted: requests whose clients left. refused:
    requests that came to a full queue, or to a server that was about to end. put_back: how often one lost its memory to
    those that came before it, and waited again."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    failed: int = 0
    aborted: int = 0
    refused: int = 0
    put_back: int = 0


class Batcher:
    """Runs up to `rows` requests at once over an engine, each of up to `context` tokens, in the order in which they
    come: one that waits for memory (`MemoryPlan.kv_memory`) keeps those behind it waiting, however short. `decoding`:
    what steps of answers alone have taken, where experts are missing. ends: tokens
    that end an answer. penalty: for repetition, as the model's generation config has it. disk: makes what keeps
    beginnings of prompts on disk, of the cache. Not for several threads."""

    def __init__(
        self,
        engine: Any,
        tokenizer: Any,
        ends: set[int],
        rows: int,
        penalty: float | None = None,
        disk: Callable[[Any], PrefixDisk] | None = None,
    ) -> None:
        self.counts = Counts()
        self.decoding = PhaseCosts()
        self.rows = rows
        self.context: int = min(engine.plan.context, engine.longest_context or engine.plan.context)
        self._engine = engine
        self._chunk: int = engine.settings.chunk
        self._vocabulary: int = engine.config.vocab_size
        self._scored = use_of(self._vocabulary, self._chunk).scored
        self._tokenizer = tokenizer
        self._ends = ends
        self._penalty = penalty
        self._cache = engine.new_cache(rows, self.context)
        self.disk = disk(self._cache) if disk is not None else None
        self._prefixes = Prefixes(self._cache, rows, engine.plan.kv_memory, self.disk)
        self._waiting: deque[Work] = deque()
        self._reading: deque[Work] = deque()
        self._answering: list[Work] = []
        self._numbers = count(1)
        self._read_last = False
        # lossy rules look at all that runs at once, and transformers' code runs row by row
        self._missing = engine.plan.slots < engine.plan.all_slots
        self._joins = self._missing and not engine.lossy and engine.steps.decoder.rows_together
        self._verified = FEW_TOKENS if engine.steps.decoder.verifies else 1

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._reading) + len(self._answering)

    @property
    def kv_taken(self) -> int:
        """Bytes of keys and values that are set aside, for requests at work and for what others have left."""
        return self._prefixes.taken

    @property
    def progress(self) -> tuple[int, int, int]:
        """Numbers of which one changes with every layer of a step, and with every byte that is read for it."""
        now = self._engine.snapshot()
        return now.counts.hits, now.counts.misses, now.bytes_read

    @property
    def idle(self) -> bool:
        return not (self._waiting or self.running)

    def check(self, request: Request) -> None:
        """PromptError where the prompt is empty or the model lacks a token of it, TooLongError where it leaves no room
        for an answer."""
        if not request.ids:
            raise PromptError("the prompt has no tokens")
        if (largest := max(request.ids)) >= self._vocabulary:
            raise PromptError(f"the model has {self._vocabulary:,} tokens, and the prompt has token {largest}")
        if len(request.ids) >= self.context:
            raise TooLongError(
                f"the prompt is too long: {len(request.ids):,} tokens, there is room for {self.context:,} with the "
                f"answer; shorten it, or start the server with a larger --context"
            )

    def add(self, request: Request) -> int:
        """Queues a request; its number is in every `Piece` of its answer. PromptError as `check` raises it."""
        self.check(request)
        number = next(self._numbers)
        self._waiting.append(work_on(number, request, self._tokenizer, self._penalty))
        self.counts.requests += 1
        return number

    def cancel(self, number: int) -> None:
        """Drops a request, whatever it is at; nothing where it is finished."""
        self.counts.aborted += self._drop(number)

    def _drop(self, number: int, failed: bool = False) -> bool:
        """Whether there was such a request. failed: a step may have ended amid it."""
        for rows in (self._waiting, self._reading, self._answering):
            for row in [each for each in rows if each.number == number]:
                rows.remove(row)
                if row.slab >= 0 and (failed or row.stored is not None):  # what the disk has given is counted nowhere
                    self._prefixes.close(row.slab)
                elif row.slab >= 0:
                    self._prefixes.leave(row.slab, row.held)
                return True
        return False

    def step(self) -> list[Piece]:
        """Runs the engine once. An error ends the request that it is found at, and no other: where several rows have
        run together, each runs again by itself."""
        answering = self._with_memory()
        pieces = list(self._admit()) if len(answering) == len(self._answering) else []
        if not self._reading or (self._read_last and answering):
            self._read_last = False
            return [*pieces, *self._run(answering, [])]
        first = self._reading[0]
        joined = self._joins and not first.by_itself
        self._read_last = not joined
        if first.stored is not None:
            self._fill(first)
            return pieces
        if joined:
            return [*pieces, *self._run(answering, self._that_fit(first))]
        return [*pieces, *self._run([], [first])]

    def _with_memory(self) -> list[Work]:
        """The answers whose next token there is memory for: the one that came last is put back for those that came
        before it, or waits until one of them has ended."""
        found: list[Work] = []
        for row in sorted(self._answering, key=lambda row: row.number):
            while row.slab >= 0 and not self._grows(row):
                last = max((*self._reading, *self._answering), key=lambda row: row.number)
                if last is row:
                    return found
                self._put_back(last)
            if row.slab >= 0:
                found.append(row)
        return found

    def _grows(self, row: Work) -> bool:
        if row.length < row.room:
            return True
        wanted = row.wanted(self.context)
        if not self._prefixes.grow(row.slab, wanted):
            return False
        row.room = wanted
        return True

    def _put_back(self, row: Work) -> None:
        (self._answering if row.is_read else self._reading).remove(row)
        self._prefixes.close(row.slab)
        row.put_back()
        self._waiting.appendleft(row)
        self.counts.put_back += 1

    def _admit(self) -> Iterator[Piece]:
        while self._waiting and self.running < self.rows:
            row = self._waiting[0]
            wanted = row.wanted(self.context)
            try:
                begun = self._begun(row, wanted)
            except Exception as error:
                yield from self._failed([row], error)
                continue
            if begun is None:
                return
            self._waiting.popleft()
            row.slab, row.held, row.stored, row.room = begun.slab, begun.held, begun.stored, wanted
            self._begins(row)
            (self._answering if row.is_read else self._reading).append(row)

    def _begun(self, row: Work, wanted: int) -> Begun | None:
        """A slab with the longest beginning that there is of it; of one whose prompt is scored, without."""
        at_work = [(other.slab, other.held) for other in (*self._reading, *self._answering)]
        if row.again:
            return self._prefixes.begin_again(row.past, wanted, at_work)
        ids = [] if row.request.prompt_logprobs else row.request.ids
        return self._prefixes.begin(ids, wanted, at_work)

    def _begins(self, row: Work) -> None:
        """What the row holds did not have to be read."""
        if not row.again:
            row.cached = row.length

    def _fill(self, row: Work) -> None:
        """Some of what lies on disk of a prompt; after it other prompts have their turn."""
        if row.stored is not None and self.disk is not None and self.disk.fill(row.stored, row.slab):
            row.has_filled(row.stored)
            self._crop(row)
            self._begins(row)
            row.stored = None
        self._reading.rotate(-1)

    def _crop(self, row: Work) -> None:
        """What came with a part that ran again, and was not held, is forgotten."""
        if self._cache.length(row.slab) > row.length:
            self._cache.crop(row.slab, row.length)

    def _that_fit(self, first: Work) -> list[Work]:
        """The prompt that is the first to be read, and others whose next chunks fit into one with its."""
        found, tokens = [first], len(self._next_prompt(first).tokens)
        for row in self._reading:
            if row is first or row.by_itself:
                continue
            size = len(self._next_prompt(row).tokens)
            if tokens + size <= self._chunk:
                found.append(row)
                tokens += size
        return found

    def _next_prompt(self, row: Work) -> Row:
        return row.next_prompt(self._scored if row.request.prompt_logprobs else self._chunk, self._verified)

    def _run(self, answering: list[Work], prompts: list[Work]) -> Iterator[Piece]:
        """A token of each answer, and the next chunks of prompts; after them other prompts have their turn. One that is
        scored comes alone."""
        parts = [self._next_prompt(row) for row in prompts]
        rows = (*(row.next_answer() for row in answering), *parts)
        if not rows:
            return
        every = bool(prompts) and prompts[0].scored
        try:
            logits = self._computed(rows, every)
        except Exception as error:
            if len(rows) == 1:
                yield from self._failed([*answering, *prompts], error)
                return
            for row in answering:  # one of them needs what cannot be had
                yield from self._run([row], [])
            for row in prompts:
                yield from self._run([], [row])
            return
        self.counts.steps += 1
        for row, its in zip(answering, logits, strict=False):
            row.held.add(row.answer[-1:], Kind.DECODE)
            yield from self._chosen(row, its)
        read = [logits] if every else logits[len(answering) :, None]
        for row, part, its in zip(prompts, parts, read, strict=True):
            yield from self._has_read(row, part, its)

    def _computed(self, rows: tuple[Row, ...], every: bool) -> Tensor:
        batch = Batch(rows, apart=True)
        timed = self._missing and batch.phase == "decode"
        with self.decoding.measured(self._engine.snapshot, len(rows)) if timed else nullcontext():
            logits: Tensor = self._engine.step(batch, self._cache, every)
        return logits

    def _has_read(self, row: Work, part: Row, logits: Tensor) -> Iterator[Piece]:
        """The next chunk of a prompt has run; logits (n, vocabulary) of its last token, or of all where it is
        scored."""
        row.has_read(part, logits)
        self._crop(row)
        self._reading.remove(row)
        (self._answering if row.is_read else self._reading).append(row)
        if row.is_read and not row.again:
            self.counts.cached_tokens += row.cached
            self.counts.prompt_tokens += row.length - row.cached
            self._prefixes.read(row.slab, row.held.tokens)
            yield from self._chosen(row, logits[-1])

    def _chosen(self, row: Work, logits: Tensor) -> Iterator[Piece]:
        try:
            piece = row.choose(logits, self._ends, self.context)
        except Exception as error:  # a grammar or a tokenizer that fails is no reason for the others to end
            yield from self._failed([row], error)
            return
        self.counts.generated_tokens += 1
        if piece.finish is not None:
            self._answering.remove(row)
            self._prefixes.leave(row.slab, row.held)
        yield piece

    def _failed(self, rows: list[Work], error: Exception) -> Iterator[Piece]:
        for row in rows:
            self._drop(row.number, failed=True)
            self.counts.failed += 1
            yield Piece(row.number, finish="error", error=error, cached=row.cached)
