"""Continuous batching: requests join and leave a running batch at any step.

A step is one call of the engine: a chunk of one prompt, or a token of every answer, by turns where there are both. So a
long prompt delays the others by a chunk. Where experts are missing, a step has both, and more prompts as far as they
fit into a chunk: it reads each expert once. No request's tokens depend on what else runs: prompts are computed apart,
and tokens that are generated together have the bits that each has alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor

from tiermoe.batch import Batch, decode, prompt
from tiermoe.errors import PromptError
from tiermoe.generation.sampling import Sampler, log_probabilities
from tiermoe.serve.detokenize import Detokenizer
from tiermoe.serve.grammar import Grammar
from tiermoe.serve.prefix_disk import PrefixDisk, Stored
from tiermoe.serve.prefixes import Prefixes
from tiermoe.serve.request import Piece, Request, TokenLogprob
from tiermoe.serve.scoring import next_part, prompt_scores, use_of


@dataclass(slots=True)
class _Row:
    """A request at work. held: tokens whose keys and values lie in the slab. stored: a beginning that is being read
    into it from disk."""

    number: int
    request: Request
    sampler: Sampler
    text: Detokenizer
    grammar: Grammar | None = None
    slab: int = -1
    stored: Stored | None = None
    held: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    cached: int = 0
    prompt: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class Counts:
    """What has been done since the beginning. cached_tokens: of prompts, found in what earlier requests left. aborted:
    requests whose clients left. refused: requests that came to a full queue, or to a server that was about to end."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    failed: int = 0
    aborted: int = 0
    refused: int = 0


class Batcher:
    """Runs up to `rows` requests at once over an engine, each of up to `context` tokens, in the order in which they
    come: one that waits for memory (`MemoryPlan.kv_memory`) keeps those behind it waiting, however short. ends: tokens
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
        self.rows = rows
        self.context: int = min(engine.plan.context, engine.longest_context or engine.plan.context)
        self._engine = engine
        self._chunk: int = engine.settings.chunk
        self._scored = use_of(engine.config.vocab_size, self._chunk).scored
        self._tokenizer = tokenizer
        self._ends = ends
        self._penalty = penalty
        self._cache = engine.new_cache(rows, self.context)
        self.disk = disk(self._cache) if disk is not None else None
        self._prefixes = Prefixes(self._cache, rows, engine.plan.kv_memory, self.disk)
        self._waiting: deque[_Row] = deque()
        self._reading: deque[_Row] = deque()
        self._answering: list[_Row] = []
        self._numbers = count(1)
        self._read_last = False
        # lossy rules look at all that runs at once, and transformers' code runs row by row
        missing = engine.plan.slots < engine.plan.all_slots
        self._joins = missing and not engine.lossy and engine.steps.decoder.rows_together

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._reading) + len(self._answering)

    @property
    def kv_taken(self) -> int:
        """Bytes of keys and values that are set aside, for requests at work and for what others have left; 0 where
        transformers' code keeps them."""
        return self._prefixes.taken

    @property
    def idle(self) -> bool:
        return not (self._waiting or self.running)

    def check(self, request: Request) -> None:
        """PromptError where the prompt is empty or leaves no room for an answer."""
        if not request.ids:
            raise PromptError("the prompt has no tokens")
        if len(request.ids) >= self.context:
            raise PromptError(
                f"the prompt has {len(request.ids):,} tokens, there is room for {self.context:,} with the answer; "
                f"shorten it, or start the server with a larger --context"
            )

    def add(self, request: Request) -> int:
        """Queues a request; its number is in every `Piece` of its answer. PromptError as `check` raises it."""
        self.check(request)
        number = next(self._numbers)
        row = _Row(
            number,
            request,
            Sampler(request.sampling, self._penalty),
            Detokenizer(self._tokenizer, request.stops, request.special),
            request.grammar() if request.grammar else None,
        )
        self._waiting.append(row)
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
        pieces = list(self._admit())
        if not self._reading or (self._read_last and self._answering):
            self._read_last = False
            return [*pieces, *self._run(list(self._answering), [])]
        first = self._reading[0]
        joined = self._joins and first.stored is None and not first.request.prompt_logprobs
        self._read_last = not joined
        if first.stored is not None:
            self._fill(first)
            return pieces
        if joined:
            return [*pieces, *self._run(list(self._answering), self._that_fit(first))]
        return [*pieces, *self._run([], [first])]

    def _admit(self) -> Iterator[Piece]:
        while self._waiting and self.running < self.rows:
            row = self._waiting[0]
            request = row.request
            ids = [] if request.prompt_logprobs else request.ids
            tokens = min(len(request.ids) + request.sampling.max_tokens, self.context)
            try:
                begun = self._prefixes.begin(ids, tokens, self._at_work())
            except Exception as error:
                yield from self._failed([row], error)
                continue
            if begun is None:
                return
            self._waiting.popleft()
            row.slab, row.stored = begun.slab, begun.stored
            self._begin_after(row, begun.length)
            self._reading.append(row)

    def _at_work(self) -> list[tuple[int, list[int]]]:
        return [(row.slab, row.held) for row in (*self._reading, *self._answering)]

    def _begin_after(self, row: _Row, length: int) -> None:
        """So many tokens of a prompt lie in the row's slab already."""
        row.held = row.request.ids[:length]
        row.cached = length
        self.counts.cached_tokens += length

    def _fill(self, row: _Row) -> None:
        """Some of what lies on disk of a prompt; after it other prompts have their turn."""
        if row.stored is not None and self.disk is not None and self.disk.fill(row.stored, row.slab):
            self._begin_after(row, row.stored.length)
            row.stored = None
        self._reading.rotate(-1)

    def _that_fit(self, first: _Row) -> list[_Row]:
        """The prompt that is the first to be read, and others whose next chunks fit into one with its."""
        found, tokens = [first], len(self._next_part(first))
        for row in self._reading:
            size = len(self._next_part(row))
            alone = row is first or row.stored is not None or row.request.prompt_logprobs
            if not alone and tokens + size <= self._chunk:
                found.append(row)
                tokens += size
        return found

    def _next_part(self, row: _Row) -> list[int]:
        every = row.request.prompt_logprobs
        return next_part(row.request, len(row.held), self._scored if every else self._chunk)

    def _run(self, answering: list[_Row], prompts: list[_Row]) -> Iterator[Piece]:
        """A token of each answer, and the next chunks of prompts; after them other prompts have their turn. One that is
        scored comes alone."""
        rows = [decode(row.slab, len(row.held), row.answer[-1]) for row in answering]
        rows += [prompt(row.slab, self._next_part(row), len(row.held)) for row in prompts]
        if not rows:
            return
        every = bool(prompts) and prompts[0].request.prompt_logprobs
        try:
            logits = self._engine.step(Batch(tuple(rows), apart=True), self._cache, every)
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
            row.held.append(row.answer[-1])
            yield from self._chosen(row, its)
        for row, its in zip(prompts, [logits] if every else logits[len(answering) :, None], strict=True):
            yield from self._has_read(row, its)

    def _has_read(self, row: _Row, logits: Tensor) -> Iterator[Piece]:
        """The next chunk of a prompt has run; logits (n, vocabulary) of its last token, or of all where it is
        scored."""
        part, first = self._next_part(row), len(row.held)
        self.counts.prompt_tokens += len(part)
        row.held = row.held + part
        if row.request.prompt_logprobs:
            row.prompt += prompt_scores(row.request, logits, first)
        self._reading.remove(row)
        if len(row.held) < len(row.request.ids):
            self._reading.append(row)
            return
        self._answering.append(row)
        self._prefixes.read(row.slab, row.held)
        yield from self._chosen(row, logits[-1])

    def _chosen(self, row: _Row, logits: Tensor) -> Iterator[Piece]:
        try:
            yield self._next(row, logits)
        except Exception as error:  # a grammar or a tokenizer that fails is no reason for the others to end
            yield from self._failed([row], error)

    def _next(self, row: _Row, logits: Tensor) -> Piece:
        """The next token of an answer, by the logits of the one before."""
        request = row.request
        told: tuple[TokenLogprob, ...] = ()
        if row.grammar is not None:
            logits = row.grammar.restrict(logits)
        token = row.sampler.choose(logits, row.held, len(row.answer))
        if request.logprobs is not None:
            told = (TokenLogprob(token, *log_probabilities(logits, token, request.logprobs)),)
        row.answer.append(token)
        self.counts.generated_tokens += 1
        if row.grammar is not None:
            row.grammar.accept(token)
        ended = token in self._ends
        text = "" if ended else row.text.add(token)
        full = len(row.answer) >= request.sampling.max_tokens or len(row.held) + 1 >= self.context
        whole = row.grammar is not None and row.grammar.ended
        finish = "stop" if ended or whole or row.text.stopped_by else "length" if full else None
        if finish is not None:
            text += row.text.end()
            finish = "stop" if row.text.stopped_by else finish
            self._answering.remove(row)
            self._prefixes.leave(row.slab, row.held)
        scored, row.prompt = tuple(row.prompt), []
        return Piece(row.number, text, (token,), told, finish, None, row.cached, row.text.stopped_by, scored)

    def _failed(self, rows: list[_Row], error: Exception) -> Iterator[Piece]:
        for row in rows:
            self._drop(row.number, failed=True)
            self.counts.failed += 1
            yield Piece(row.number, finish="error", error=error, cached=row.cached)
