"""Request loop: schedule, run, postprocess (continuous batching). `run` and `chat` are this loop with one request, the
server is this loop with many.

A step is one call of the engine: a chunk of one prompt, or a token of every answer, by turns where there are both. So a
long prompt delays the others by a chunk. Where experts are missing, a step has both, and more prompts as far as they
fit into a chunk: it reads each expert once. Chunks of a long prompt go through a layer together there, and a step is so
many layers of them as compute as much as a chunk does (`_Layered`), by turns with answers and short prompts. No
request's tokens depend on what else runs: a ragged batch computes each prompt separately, and tokens that are generated
together have the bits that each has alone.

KV memory is reserved for a prompt and the beginning of its answer, and for more as the answer grows. Where it ends, the
request that came last is preempted for those that came before it. Preempted requests run again later, in the steps in
which they ran (`prefix_cache.SlabContents`): no bit of them changes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import Any

from torch import Tensor

from tiermoe.batch import Batch, Kind, Row
from tiermoe.engine.request import Piece, Request, RequestState
from tiermoe.engine.sampling import end_tokens
from tiermoe.engine.speculation import MOST, DraftRequest, Place, Speculation
from tiermoe.errors import LoadError, PromptError
from tiermoe.metrics import PhaseMetrics
from tiermoe.model.prefix_cache import PrefixCache
from tiermoe.model.prefix_files import PrefixDisk, StoredPrefix
from tiermoe.types import FEW_TOKENS, Use

SCORED_LOGITS_BYTES = 128 << 20
"""Most bytes of logits, as float32, of a step that scores all its tokens."""


def scored_tokens(vocabulary: int) -> int:
    """Most tokens of a step that scores all of them, at least one."""
    return max(1, SCORED_LOGITS_BYTES // (4 * vocabulary))


def use_of(vocabulary: int, chunk: int) -> Use:
    """What the loop asks of a step at most: a chunk of prompts, of which all tokens may be scored."""
    return Use(prompts=1, scored=min(chunk, scored_tokens(vocabulary)))


BESIDE = 4
"""Most chunks of a prompt that runs chunk by chunk beside one whose chunks go through the layers together. It reads its
experts so many times at most, and does not wait for the other's."""

_number = attrgetter("number")


class TooLongError(PromptError):
    """A prompt that leaves no room for an answer."""


@dataclass(slots=True)
class Counts:
    """Counters of a loop since its start."""

    requests: int = 0
    prompt_tokens: int = 0  # read, of prompts that are through
    cached_tokens: int = 0  # found in what earlier requests left, of the same prompts
    generated_tokens: int = 0
    steps: int = 0
    guessed_tokens: int = 0  # verified guesses at answers' next tokens
    right_guesses: int = 0
    failed: int = 0
    aborted: int = 0  # requests whose clients left
    refused: int = 0  # requests that came to a full queue, or to a server that was about to end
    preemptions: int = 0


@dataclass(slots=True)
class _Layered:
    """Chunks of a prompt on their way through the layers."""

    row: RequestState
    chunks: list[Row]
    turns: Iterator[Tensor | None]  # `Engine.step_by_layers`
    layers: int  # of each turn
    done: int = 0  # layers that have run


class RequestLoop:
    """Runs up to `rows` requests at once over an engine, in the order in which they come: one that waits for KV memory
    (`MemoryPlan.kv_memory`) keeps those behind it waiting, however short. Not for several threads.

    ends: tokens that end an answer; None: those of the model's generation config. disk: makes the prefix cache on disk
    from the KV cache. times_decoding: whether `decoding` is measured where experts are missing. speculation: which
    guesses at answers' next tokens are verified, where the engine is exact and verifies several at once; None: none."""

    def __init__(
        self,
        engine: Any,
        tokenizer: Any,
        rows: int = 1,
        ends: set[int] | None = None,
        disk: Callable[[Any], PrefixDisk] | None = None,
        times_decoding: bool = False,
        speculation: Speculation | None = None,
    ) -> None:
        config = engine.generation_config
        self.counts = Counts()
        self.decoding = PhaseMetrics()  # costs of the steps of answers alone
        self.rows = rows
        self.context: int = min(engine.plan.context, engine.longest_context or engine.plan.context)
        self._engine = engine
        self._chunk: int = engine.settings.chunk
        self._vocabulary: int = engine.config.vocab_size
        self._scored = use_of(self._vocabulary, self._chunk).scored
        self._tokenizer = tokenizer
        self._ends = end_tokens(config) if ends is None else ends
        self._penalty: float | None = getattr(config, "repetition_penalty", None)
        self._cache = engine.new_cache(rows, self.context)
        self.disk = disk(self._cache) if disk is not None else None
        self._prefixes = PrefixCache(self._cache, rows, engine.plan.kv_memory, self.disk)
        self._waiting: deque[RequestState] = deque()
        self._reading: deque[RequestState] = deque()  # their prompts, in turns
        self._answering: list[RequestState] = []
        self._numbers = count(1)
        self._read_last = False  # whether the last step read a prompt
        missing = engine.plan.slots < engine.plan.all_slots
        self._timed = missing and times_decoding
        # lossy rules look at all that runs at once, and transformers' code runs row by row
        self._joins = missing and not engine.lossy and engine.decoder.rows_together
        self._verified = FEW_TOKENS if engine.decoder.can_verify_draft else 1
        # tokens that are verified by themselves have the bits of an answer that is alone
        verifies = self._verified > 1 and (rows == 1 or engine.decoder.batch_invariant)
        self._speculation = speculation if verifies and speculation and not engine.composition.lossy else None
        self._together: int = engine.plan.prompt_chunks
        self._layered: _Layered | None = None  # of a row in `_reading`
        self._layered_last = False  # whether the last step was a turn of it

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._reading) + len(self._answering)

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._reading or self._answering)

    @property
    def kv_taken(self) -> int:
        """Bytes of keys and values reserved for requests at work and for what finished ones left."""
        return self._prefixes.reserved

    def at_work(self) -> dict[int, RequestState]:
        """Requests at work by their slab, below `rows`: a copy, which any thread may ask for."""
        return {row.slab: row for row in (*self._reading, *self._answering) if row.slab >= 0}

    @property
    def progress(self) -> tuple[int, int, int]:
        """Numbers that change with every layer of a step, and with every byte that is read for it."""
        now = self._engine.snapshot()
        return now.counts.hits, now.counts.misses, now.bytes_read

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
        """Queues a request and returns its number, which every `Piece` of its answer has. PromptError as `check`."""
        self.check(request)
        number = next(self._numbers)
        self._waiting.append(RequestState(number, request, self._tokenizer, self._penalty))
        self.counts.requests += 1
        return number

    def cancel(self, number: int) -> None:
        """Drops a request wherever it is; nothing where it has finished."""
        self.counts.aborted += self._drop(number)

    def step(self) -> list[Piece]:
        """Runs the engine once and returns what it adds to answers. An error ends the request that caused it and no
        other: where several rows have run together, each runs again by itself."""
        pieces: list[Piece] = []
        answering, prompts = self._schedule(pieces)
        if self._layered_last:
            self._run_layers(pieces)
        elif answering or prompts:
            self._run(answering, prompts, pieces)
        return pieces

    def _schedule(self, pieces: list[Piece]) -> tuple[list[RequestState], list[RequestState]]:
        """Answers and prompts that run in the next step. pieces: takes the errors of requests that could not begin.

        Of the answers, those with memory for their next token. Where there is none, the request that came last is
        preempted for those that came before it, or waits until one of them has ended."""
        answering: list[RequestState] = []
        for row in sorted(self._answering, key=_number):
            while row.slab >= 0 and len(row.contents.tokens) >= row.room and not self._grow(row):
                last = max((*self._reading, *self._answering), key=_number)
                if last is row:
                    return self._take_turns(answering)
                self._preempt(last)
            if row.slab >= 0:
                answering.append(row)
        if self._waiting and len(answering) == len(self._answering):
            self._admit(pieces)
        return self._take_turns(answering)

    def _take_turns(self, answering: list[RequestState]) -> tuple[list[RequestState], list[RequestState]]:
        """These answers or the next prompt, by turns; or both with more prompts, where experts are missing. All of that
        by turns with chunks that go layer by layer (`_layered_last`), beside which only short prompts run (`BESIDE`).
        So an answer's next token waits for one turn of them at most."""
        layered, was_last = self._layered, self._layered_last
        reading = [row for row in self._reading if layered is None or self._runs_beside(row, layered)]
        self._layered_last = layered is not None and not (was_last and (answering or reading))
        if self._layered_last:
            return [], []
        if not reading or (self._read_last and answering):
            self._read_last = False
            return answering, []
        first = reading[0]
        joined = self._joins and not first.runs_alone
        self._read_last = not joined
        if first.stored is not None:
            self._fill(first, first.stored)
            return [], []
        if self._together > 1 and self._cache.kept(first.slab, first.length) < first.length:
            self._preempt(first)  # an interruption has overwritten what it would go on from
            return answering, []
        if layered is None and len(chunks := self._next_prompts(first)) > 1:
            if was_last and answering:
                return answering, []
            self._begin_layers(first, chunks)
            return [], []
        return (answering, self._that_fit(first, reading)) if joined else ([], [first])

    def _runs_beside(self, row: RequestState, layered: _Layered) -> bool:
        """Whether a prompt runs chunk by chunk between turns of another."""
        short = len(row.request.ids) - row.length <= BESIDE * self._chunk
        return row is not layered.row and (short or len(self._next_prompts(row)) == 1)

    def _begin_layers(self, row: RequestState, chunks: list[Row]) -> None:
        """The next steps run chunks of a prompt layer by layer."""
        batch = Batch(tuple(chunks), ragged=True)
        layers = max(1, len(self._engine.decoder.layers) * self._chunk // len(batch.tokens))
        self._layered = _Layered(row, chunks, self._engine.step_by_layers(batch, self._cache, layers), layers)
        self._layered_last = True

    def _grow(self, row: RequestState) -> bool:
        wanted = row.wanted(self.context)
        if not self._prefixes.grow(row.slab, wanted):
            return False
        row.room = wanted
        return True

    def _preempt(self, row: RequestState) -> None:
        self._forget_layers(row)
        (self._answering if row.is_read else self._reading).remove(row)
        saved = None
        if self.disk is not None and row.replaying:
            saved = self.disk.saved(row.slab, row.contents.tokens)
        self._prefixes.close(row.slab)
        row.preempt(saved)
        self._waiting.appendleft(row)
        self.counts.preemptions += 1

    def _admit(self, pieces: list[Piece]) -> None:
        """Gives slabs to waiting requests, as far as there are rows and memory."""
        while self._waiting and self.running < self.rows:
            row = self._waiting[0]
            wanted = row.wanted(self.context)
            at_work = [(other.slab, other.contents) for other in (*self._reading, *self._answering)]
            try:
                if row.replaying:
                    opened = self._prefixes.reopen(row.before, row.saved, wanted, at_work)
                else:  # a prompt of which all tokens run is read from its beginning
                    ids = [] if row.request.reads_all else row.request.ids
                    opened = self._prefixes.open(ids, wanted, at_work)
            except Exception as error:
                self._fail(row, error, pieces)
                continue
            if opened is None:
                return
            self._waiting.popleft()
            row.slab, row.contents, row.stored, row.room = opened.slab, opened.contents, opened.stored, wanted
            if not row.replaying:
                row.cached, row.began_at = row.length, time.perf_counter()
            (self._answering if row.is_read else self._reading).append(row)

    def _fill(self, row: RequestState, stored: StoredPrefix) -> None:
        """Reads some of a prefix from disk; after it other prompts have their turn."""
        if self.disk is not None and self.disk.fill(stored, row.slab):
            row.has_filled(stored)
            row.stored = None
            self._crop(row)
            if not row.replaying:
                row.cached = row.length
        self._reading.remove(row)
        (self._answering if row.is_read else self._reading).append(row)

    def _that_fit(self, first: RequestState, reading: list[RequestState]) -> list[RequestState]:
        """The first of the prompts, and others whose next chunks fit into one chunk with its own."""
        found, tokens = [first], len(self._next_prompt(first).tokens)
        for row in reading:
            if row is first or row.runs_alone:
                continue
            size = len(self._next_prompt(row).tokens)
            if tokens + size <= self._chunk:
                found.append(row)
                tokens += size
        return found

    def _next_prompt(self, row: RequestState) -> Row:
        return row.next_prompt(self._scored if row.request.prompt_logprobs else self._chunk, self._verified)

    def _next_prompts(self, row: RequestState) -> list[Row]:
        """What goes through a layer together."""
        return row.next_prompts(self._chunk, self._verified, self._together)

    def _run_layers(self, pieces: list[Piece]) -> None:
        """Runs some layers of the chunks that go layer by layer. pieces: takes what their prompt adds."""
        layered, self._layered = self._layered, None  # an interruption leaves none
        assert layered is not None
        row, chunks = layered.row, layered.chunks
        try:
            logits = next(layered.turns)
        except Exception as error:
            self._fail(row, error, pieces)
            return
        self.counts.steps += 1
        if logits is not None:
            self._has_read(row, chunks, logits, pieces)
            return
        layered.done += layered.layers
        self._layered = layered
        row.under_way = (chunks[-1].end - row.length) * layered.done // len(self._engine.decoder.layers)
        if row.request.progress:
            pieces.append(Piece(row.number, read=row.read, cached=row.cached))

    def _forget_layers(self, row: RequestState) -> None:
        """A row that goes layer by layer leaves."""
        if self._layered is not None and self._layered.row is row:
            self._layered, self._layered_last = None, False

    def _run(
        self, answering: list[RequestState], prompts: list[RequestState], pieces: list[Piece], guess: bool = True
    ) -> None:
        """Runs a token of each answer, with guesses at the next ones, and the next chunk of each prompt (one of
        which all tokens run comes alone). pieces: takes what they add."""
        began = time.perf_counter()
        parts = list(map(self._next_prompt, prompts))
        speculation = self._speculation if answering and not parts else None
        guesses = self._guesses(answering, speculation) if speculation is not None and guess else [[]] * len(answering)
        guessed = sum(map(len, guesses))
        rows = (*map(RequestState.next_answer, answering, guesses), *parts)
        embeds = bool(prompts) and prompts[0].request.embeds
        every = guessed > 0 or embeds or (bool(prompts) and prompts[0].scored)
        batch = Batch(rows, ragged=len(rows) > 1)
        before = self._engine.snapshot() if self._timed and batch.phase == "decode" else None
        try:
            logits: Tensor
            if embeds:
                logits = self._engine.hidden_states(batch, self._cache)
            else:
                logits = self._engine.step(batch, self._cache, every)
        except Exception as error:
            if guessed:  # an answer does not fail by what was guessed of it
                self._run(answering, prompts, pieces, guess=False)
                return
            if len(rows) == 1:
                self._fail((*answering, *prompts)[0], error, pieces)
                return
            for row in answering:  # one of them needs what cannot be had
                self._run([row], [], pieces, guess=False)
            for row in prompts:
                self._run([], [row], pieces)
            return
        seconds, after = time.perf_counter() - began, self._engine.snapshot() if before is not None else None
        self.counts.steps += 1
        given, at = 0, 0
        for row, own in zip(answering, guesses, strict=True):
            row.drafted += len(own)
            given += self._answer(row, own, logits[at : at + 1 + len(own)], pieces)
            at += 1 + len(own)
        if before is not None and after is not None:
            self.decoding.add(after.since(before), given)
        self.counts.guessed_tokens += guessed
        self.counts.right_guesses += given - len(answering)
        if speculation is not None:
            speculation.record(len(answering), guessed, given, seconds)
        read = [logits] if prompts and every else logits[len(answering) :, None] if prompts else []
        for row, part, each in zip(prompts, parts, read, strict=True):
            self._has_read(row, [part], each, pieces)

    def _guesses(self, answering: list[RequestState], speculation: Speculation) -> list[list[int]]:
        """Guesses at the answers' next tokens that are worth verifying in a step of all of them."""
        try:
            found = speculation.drafts([self._draft_request(row, speculation, len(answering)) for row in answering])
        except LoadError:  # an answer does not fail by what was guessed of it
            return [[]] * len(answering)
        return [
            guesses if guesses and self._cache.can_crop(row.slab, row.length, 1 + len(guesses)) else []
            for row, guesses in zip(answering, found, strict=True)
        ]

    def _draft_request(self, row: RequestState, speculation: Speculation, rows: int) -> DraftRequest:
        """The draft request of an answer in a step of `rows` answers. Its guesses end with the answer, with its memory
        and with what one step verifies."""
        if row.drafter is None:
            row.drafter = speculation.drafter()
        request, length = row.request, row.length
        left = request.sampling.max_tokens - len(row.answer)
        room = min(row.room - 1, self.context - 2) - length
        most = max(0, min(MOST, FEW_TOKENS // rows - 1, left - 1, room, self._chunk - 1))
        place = Place(self._cache, row.slab, length)
        return DraftRequest(row.drafter, request.ids, row.answer, most, rows, place)

    def _answer(self, row: RequestState, guesses: list[int], logits: Tensor, pieces: list[Piece]) -> int:
        """Adds the tokens of an answer that a step gave, and returns their number: one, and those behind right guesses.
        The next step writes over wrong ones. logits (1 + len(guesses), vocabulary)."""
        given = 0
        for guess, each in zip((*guesses, None), logits, strict=True):
            row.contents.add(row.answer[-1:], Kind.DECODE)
            row.accepted += given > 0  # this token ran since it was the guess
            given += 1
            if self._choose(row, each, pieces) or row.answer[-1] != guess:
                break
        return given

    def _has_read(self, row: RequestState, parts: list[Row], logits: Tensor, pieces: list[Piece]) -> None:
        """Records chunks of a prompt. logits (n, vocabulary): as `RequestState.has_read` takes them."""
        for part in parts:
            row.has_read(part, logits)
        self._crop(row)
        self._reading.remove(row)  # after it other prompts have their turn
        (self._answering if row.is_read else self._reading).append(row)
        if row.replaying:
            return
        if row.request.progress:
            pieces.append(Piece(row.number, read=row.read, cached=row.cached))
        self._prefixes.prompt_read(row.slab, row.contents.tokens, row.is_read)
        if row.is_read:
            self.counts.cached_tokens += row.cached
            self.counts.prompt_tokens += row.length - row.cached
            if row.request.embeds:
                self._finish(row, row.embed(), pieces)
            else:
                self._choose(row, logits[-1], pieces)

    def _crop(self, row: RequestState) -> None:
        """Crops the slab to the tokens that the request has: a replayed part may have had more."""
        if self._cache.length(row.slab) > row.length:
            self._cache.crop(row.slab, row.length)

    def _choose(self, row: RequestState, logits: Tensor, pieces: list[Piece]) -> bool:
        """Adds the next token of an answer; a finished request leaves its slab to the prefix cache. Returns whether it
        has finished or failed."""
        try:
            piece = row.choose(logits, self._ends, self.context)
        except Exception as error:  # a grammar or a tokenizer that fails is no reason for the others to end
            self._fail(row, error, pieces)
            return True
        self.counts.generated_tokens += 1
        if piece.finish is None:
            pieces.append(piece)
            return False
        self._finish(row, piece, pieces)
        return True

    def _finish(self, row: RequestState, piece: Piece, pieces: list[Piece]) -> None:
        self._answering.remove(row)
        self._prefixes.leave(row.slab, row.contents)
        pieces.append(piece)

    def _fail(self, row: RequestState, error: Exception, pieces: list[Piece]) -> None:
        self._drop(row.number, failed=True)
        self.counts.failed += 1
        pieces.append(Piece(row.number, finish="error", error=error, cached=row.cached))

    def _drop(self, number: int, failed: bool = False) -> bool:
        """Takes a request out of the loop; whether there was one. failed: a step may have ended amid it, so that its
        slab is of no use."""
        for rows in (self._waiting, self._reading, self._answering):
            for row in [each for each in rows if each.number == number]:
                self._forget_layers(row)
                rows.remove(row)
                if row.slab >= 0 and (failed or row.stored is not None):  # what the disk has given is counted nowhere
                    self._prefixes.close(row.slab)
                elif row.slab >= 0:
                    self._prefixes.leave(row.slab, row.contents)
                return True
        return False
