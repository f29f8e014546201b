"""Request loop: schedule, run, postprocess (continuous batching). `run` and `chat` are this loop with one request, the
server is this loop with many.

A step is one call of the engine; `request_scheduler` says of what. No request's tokens depend on what else runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import cast

from torch import Tensor

from tiermoe.batch import Batch, Kind, Row
from tiermoe.engine.engine import Engine
from tiermoe.engine.request import Counts, Piece, Request, RequestState
from tiermoe.engine.request_scheduler import LayeredPrompt, Limits, Prompt, RequestScheduler
from tiermoe.engine.speculation import MOST, CachedSequence, DraftRequest, Speculation
from tiermoe.errors import LoadError, PromptError
from tiermoe.metrics import PhaseMetrics
from tiermoe.model.cache.kv import KVCache
from tiermoe.model.cache.prefix import PrefixCache
from tiermoe.model.cache.prefix_disk import PrefixDisk
from tiermoe.model.decoder import Decoder
from tiermoe.model.tokenizer import Tokenizer
from tiermoe.types import FEW_TOKENS, Use

SCORED_LOGITS_BYTES = 128 << 20
"""Most bytes of logits, as float32, of a step that scores all its tokens."""


def scored_tokens(vocabulary: int) -> int:
    """Most tokens of a step that scores all of them, at least one."""
    return max(1, SCORED_LOGITS_BYTES // (4 * vocabulary))


def use_of(vocabulary: int, chunk: int) -> Use:
    """What the loop asks of a step at most: a chunk of prompts, of which all tokens may be scored."""
    return Use(prompts=1, scored=min(chunk, scored_tokens(vocabulary)))


class TooLongError(PromptError):
    """A prompt that leaves no room for an answer."""


class RequestLoop:
    """Runs up to `rows` requests at once over an engine, with `MemoryPlan.kv_memory`. Not for several threads.

    ends: tokens that end an answer; None: those of the model's generation config. disk: makes the prefix cache on disk
    from the KV cache. times_decoding: whether `decoding` is measured where experts are missing. speculation: which
    guesses are verified, where the engine is exact and verifies several tokens in a step; None: none."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        rows: int = 1,
        ends: frozenset[int] | None = None,
        disk: Callable[[KVCache], PrefixDisk] | None = None,
        times_decoding: bool = False,
        speculation: Speculation | None = None,
    ) -> None:
        config = engine.generation_config
        self.counts = Counts()
        self.decoding = PhaseMetrics()  # costs of the steps of answers alone
        self.rows = rows
        self.context: int = min(engine.plan.context, engine.longest_context or engine.plan.context)
        self._engine = engine
        self._vocabulary: int = engine.config.vocab_size
        self._tokenizer = tokenizer
        self._ends = engine.ends if ends is None else ends
        self._penalty: float | None = getattr(config, "repetition_penalty", None)
        self._cache = engine.new_cache(rows, self.context)
        self._kv = cast(KVCache, self._cache)  # of our own decoders, which alone have files, guesses and layers apart
        self.disk = disk(self._kv) if disk is not None else None
        self._numbers = count(1)
        missing = engine.plan.slots < engine.plan.all_slots
        self._timed = missing and times_decoding
        verified, together = FEW_TOKENS if engine.decoder.can_verify_draft else 1, engine.plan.prompt_chunks
        if speculation is not None and (engine.composition.lossy or not engine.decoder.can_verify_draft):
            speculation = None
        self._speculation = speculation
        self._limits = Limits(
            rows=rows,
            context=self.context,
            chunk=engine.settings.chunk,
            scored=use_of(self._vocabulary, engine.settings.chunk).scored,
            verified=verified,
            together=together,
            layers=len(cast(Decoder, engine.decoder).layers) if together > 1 else 0,
            # lossy rules look at all that runs at once, and transformers' code runs row by row
            joins=missing and not engine.lossy and engine.decoder.rows_together,
        )
        prefixes = PrefixCache(self._cache, rows, engine.plan.kv_memory, self.disk)
        self.scheduler = RequestScheduler(self._limits, self._cache, prefixes, self.counts)

    @property
    def progress(self) -> tuple[int, int, int]:
        """Numbers that change with every layer of a step, and with every byte that is read for it."""
        now = self._engine.snapshot()
        return now.counts.hits, now.counts.misses, now.bytes_read

    def check(self, request: Request) -> None:
        """PromptError if the prompt is empty or the model lacks a token of it, TooLongError if it leaves no room
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
        self.scheduler.waiting.append(RequestState(number, request, self._tokenizer, self._penalty))
        self.counts.requests += 1
        return number

    def cancel(self, number: int) -> None:
        """Drops a request wherever it is; nothing if it has finished."""
        self.counts.aborted += self.scheduler.drop(number)

    def step(self) -> list[Piece]:
        """Runs the engine once and returns what it adds to answers. An error ends the request that caused it and no
        other: where several rows have run together, each runs again by itself."""
        pieces: list[Piece] = []
        turn = self.scheduler.schedule()
        for row, error in turn.failed:
            self._fail(row, error, pieces)
        if turn.layered is not None:
            self._run_layers(turn.layered, pieces)
        elif turn.answering or turn.prompts:
            self._run(turn.answering, turn.prompts, pieces)
        return pieces

    def _run_layers(self, layered: LayeredPrompt, pieces: list[Piece]) -> None:
        """Runs some layers of the chunks that go layer by layer. pieces: takes what their prompt adds."""
        row, chunks = layered.row, layered.chunks
        if layered.turns is None:
            batch = Batch(tuple(chunks))
            layered.turns = self._engine.step_by_layers(batch, self._kv, layered.layers)
        self.scheduler.layered = None  # an interruption leaves none
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
        self.scheduler.layered = layered
        row.under_way = (chunks[-1].end - row.length) * layered.done // self._limits.layers
        if row.request.progress:
            pieces.append(Piece(row.number, read=row.read, cached=row.cached))

    def _run(
        self,
        answering: Sequence[RequestState],
        prompts: Sequence[Prompt],
        pieces: list[Piece],
        guess: bool = True,
    ) -> None:
        """Runs one step: a decode or verify row of each answer, and a row of each prompt. A prompt whose tokens are all
        scored is the only row. pieces: takes the new pieces."""
        began = time.perf_counter()
        speculation = self._speculation if answering and not prompts else None
        guesses = self._guesses(answering, speculation) if speculation is not None and guess else [[]] * len(answering)
        guessed = sum(map(len, guesses))
        rows = (*map(RequestState.next_answer, answering, guesses), *(part for _, part in prompts))
        every = guessed > 0 or any(row.scored for row, _ in prompts)
        batch = Batch(rows)
        before = self._engine.snapshot() if self._timed and batch.phase == "decode" else None
        try:
            logits: Tensor = self._engine.step(batch, self._cache, every)
        except Exception as error:
            if guessed:  # an answer does not fail by what was guessed of it
                self._run(answering, prompts, pieces, guess=False)
                return
            if len(rows) == 1:
                self._fail([*answering, *(row for row, _ in prompts)][0], error, pieces)
                return
            for row in answering:  # one of them needs what cannot be had
                self._run([row], [], pieces, guess=False)
            for each in prompts:
                self._run([], [each], pieces)
            return
        after = self._engine.snapshot() if before is not None else None
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
        if speculation is not None:  # taking wrong guesses back takes time too
            speculation.record(len(answering), guessed, given, time.perf_counter() - began)
        read = [logits] if prompts and every else logits[len(answering) :, None] if prompts else []
        for (row, part), own_logits in zip(prompts, read, strict=True):
            self._has_read(row, [part], own_logits, pieces)

    def _guesses(self, answering: Sequence[RequestState], speculation: Speculation) -> list[list[int]]:
        """Guesses at the answers' next tokens that are worth verifying in a step of all of them."""
        try:
            found = speculation.drafts([self._draft_request(row, speculation, len(answering)) for row in answering])
        except LoadError:  # an answer does not fail by what was guessed of it
            return [[]] * len(answering)
        return [
            guesses if guesses and self._kv.can_crop(row.slab, row.length, 1 + len(guesses)) else []
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
        most = max(0, min(MOST, FEW_TOKENS // rows - 1, left - 1, room, self._limits.chunk - 1))
        place = CachedSequence(self._kv, row.slab, length)
        return DraftRequest(row.drafter, request.ids, row.answer, most, rows, place)

    def _answer(self, row: RequestState, guesses: list[int], logits: Tensor, pieces: list[Piece]) -> int:
        """Adds the tokens of an answer that a step gave, and returns their number: one, and those after right guesses.
        Wrong ones are taken back. logits (1 + len(guesses), vocabulary)."""
        given = 0
        for guess, each in zip((*guesses, None), logits, strict=True):
            row.contents.add(row.answer[-1:], Kind.DECODE)
            row.accepted += given > 0  # this token ran since it was the guess
            given += 1
            if self._choose(row, each, pieces):
                return given
            if row.answer[-1] != guess:
                break
        self.scheduler.crop(row)
        return given

    def _has_read(self, row: RequestState, parts: list[Row], logits: Tensor, pieces: list[Piece]) -> None:
        """Records chunks of a prompt. logits (n, vocabulary): as `RequestState.has_read` takes them."""
        for part in parts:
            row.has_read(part, logits)
        self.scheduler.has_read(row)
        if row.replaying:
            return
        if row.request.progress:
            pieces.append(Piece(row.number, read=row.read, cached=row.cached))
        self.scheduler.prefixes.prompt_read(row.slab, row.contents, row.is_read)
        if row.is_read:
            self.counts.cached_tokens += row.cached
            self.counts.prompt_tokens += row.length - row.cached
            self._choose(row, logits[-1], pieces)

    def _choose(self, row: RequestState, logits: Tensor, pieces: list[Piece]) -> bool:
        """Adds the next token of an answer; a finished request leaves its slab to the prefix cache. Returns whether it
        has finished or failed."""
        try:
            piece = row.choose(logits, self._ends, self.context)
        except Exception as error:  # a grammar or a tokenizer that fails is no reason for the others to end
            self._fail(row, error, pieces)
            return True
        self.counts.generated_tokens += 1
        pieces.append(piece)
        if piece.finish is not None:
            self.scheduler.finish(row)
        return piece.finish is not None

    def _fail(self, row: RequestState, error: Exception, pieces: list[Piece]) -> None:
        self.scheduler.drop(row.number, failed=True)
        self.counts.failed += 1
        pieces.append(Piece(row.number, finish="error", error=error, cached=row.cached))
