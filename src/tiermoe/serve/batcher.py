"""Continuous batching: requests join and leave a running batch at any step.

A step is one call of the engine: a chunk of one prompt, or a token of every answer, by turns where there are both. So a
long prompt delays the others by a chunk, and no request's tokens depend on what else runs: prompts never share a call,
and tokens that are generated together have the bits that each has alone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor

from tiermoe.batch import Batch, decode, prompt
from tiermoe.errors import PromptError
from tiermoe.generation.sampling import Sampler, log_probabilities
from tiermoe.generation.sequence import shared
from tiermoe.serve.detokenize import Detokenizer
from tiermoe.serve.grammar import Grammar
from tiermoe.serve.request import Piece, Request, TokenLogprob
from tiermoe.serve.scoring import prompt_scores, scored_tokens


@dataclass(slots=True)
class _Row:
    """A request at work. held: tokens whose keys and values lie in the slab."""

    number: int
    request: Request
    sampler: Sampler
    text: Detokenizer
    grammar: Grammar | None = None
    slab: int = -1
    held: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    cached: int = 0
    prompt: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class Counts:
    """What has been done since the beginning. cached_tokens: of prompts, found in what earlier requests left."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    failed: int = 0


class Batcher:
    """Runs up to `rows` requests at once over an engine, each of up to `context` tokens. ends: tokens that end an
    answer. penalty: for repetition, as the model's generation config has it. Not for several threads.

    The keys and values of what is finished stay in their slab until another request needs it: a request begins with the
    longest beginning that any slab holds."""

    def __init__(self, engine: Any, tokenizer: Any, ends: set[int], rows: int, penalty: float | None = None) -> None:
        self.counts = Counts()
        self.rows = rows
        self.context: int = min(engine.plan.context, engine.longest_context or engine.plan.context)
        self._engine = engine
        self._chunk: int = engine.settings.chunk
        self._scored = min(self._chunk, scored_tokens(engine.config.vocab_size))
        self._tokenizer = tokenizer
        self._ends = ends
        self._penalty = penalty
        self._cache = engine.new_cache(rows, self.context)
        self._waiting: deque[_Row] = deque()
        self._reading: deque[_Row] = deque()
        self._answering: list[_Row] = []
        self._left: OrderedDict[int, list[int]] = OrderedDict()  # slab → tokens of a finished request, oldest first
        self._open = 0
        self._numbers = count(1)
        self._read_last = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._reading) + len(self._answering)

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
            Detokenizer(self._tokenizer, request.stops),
            request.grammar() if request.grammar else None,
        )
        self._waiting.append(row)
        self.counts.requests += 1
        return number

    def cancel(self, number: int) -> None:
        """Drops a request, whatever it is at; nothing where it is finished."""
        for rows in (self._waiting, self._reading, self._answering):
            for row in [each for each in rows if each.number == number]:
                rows.remove(row)
                if row.slab >= 0:
                    self._leave(row)

    def step(self) -> list[Piece]:
        """Runs the engine once. An error ends the request that it is found at, and no other: where several rows have
        run together, each runs again by itself."""
        pieces = list(self._admit())
        read = bool(self._reading) and not (self._read_last and self._answering)
        self._read_last = read
        if read:
            return [*pieces, *self._read(self._reading[0])]
        return [*pieces, *(self._answer(list(self._answering)) if self._answering else ())]

    def _admit(self) -> Iterator[Piece]:
        while self._waiting and self.running < self.rows:
            row = self._waiting.popleft()
            try:
                row.slab, row.held = self._slab_for([] if row.request.prompt_logprobs else row.request.ids)
            except Exception as error:
                yield from self._failed([row], error)
                continue
            row.cached = len(row.held)
            self.counts.cached_tokens += row.cached
            self._reading.append(row)

    def _slab_for(self, ids: list[int]) -> tuple[int, list[int]]:
        """A slab, and the beginning of `ids` that it holds: all but the last token at most."""
        at_work = [(row.slab, row.held) for row in (*self._reading, *self._answering)]
        held = ((slab, shared(tokens, ids[:-1])) for slab, tokens in (*at_work, *self._left.items()))
        length, slab = max(((self._cache.kept(slab, length), slab) for slab, length in held), default=(0, -1))
        free = self._open < self.rows
        mine = slab in self._left and (not free or length == len(self._left[slab]))
        if length and (mine or free) and (begun := self._begun(slab, length, mine)) is not None:
            return begun, ids[:length]
        if self._open == self.rows:
            oldest, _ = self._left.popitem(last=False)
            self._cache.close(oldest)
            self._open -= 1
        self._open += 1
        return self._cache.open(), []

    def _begun(self, slab: int, length: int, mine: bool) -> int | None:
        """A slab with the first `length` tokens of `slab`: itself where it is `mine`, else a fork. None where a sliding
        window cannot be wound back to them."""
        if mine:
            del self._left[slab]
        else:
            slab = self._cache.fork(slab)
            self._open += 1
        try:
            self._cache.crop(slab, length)
        except ValueError:
            self._cache.close(slab)
            self._open -= 1
            return None
        return slab

    def _read(self, row: _Row) -> Iterator[Piece]:
        """The next chunk of a prompt; after it other prompts have their turn."""
        first = len(row.held)
        every = row.request.prompt_logprobs
        part = row.request.ids[first : first + (self._scored if every else self._chunk)]
        try:
            logits = self._engine.step(Batch((prompt(row.slab, part, first),)), self._cache, every)
        except Exception as error:
            yield from self._failed([row], error)
            return
        self.counts.steps += 1
        self.counts.prompt_tokens += len(part)
        row.held = row.held + part
        if every:
            row.prompt += prompt_scores(row.request, logits, first)
        self._reading.popleft()
        if len(row.held) < len(row.request.ids):
            self._reading.append(row)
            return
        self._answering.append(row)
        yield from self._chosen(row, logits[-1])

    def _answer(self, rows: list[_Row]) -> Iterator[Piece]:
        """A token of each answer."""
        batch = Batch(tuple(decode(row.slab, len(row.held), row.answer[-1]) for row in rows))
        try:
            logits = self._engine.step(batch, self._cache)
        except Exception as error:
            if len(rows) == 1:
                yield from self._failed(rows, error)
            for row in rows if len(rows) > 1 else ():  # one of them needs what cannot be had
                yield from self._answer([row])
            return
        self.counts.steps += 1
        for row, its in zip(rows, logits, strict=True):
            row.held.append(row.answer[-1])
            yield from self._chosen(row, its)

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
            self._leave(row)
        scored, row.prompt = tuple(row.prompt), []
        return Piece(row.number, text, (token,), told, finish, None, row.cached, row.text.stopped_by, scored)

    def _failed(self, rows: list[_Row], error: Exception) -> Iterator[Piece]:
        for row in rows:
            self.cancel(row.number)
            self.counts.failed += 1
            yield Piece(row.number, finish="error", error=error, cached=row.cached)

    def _leave(self, row: _Row) -> None:
        """The row's keys and values stay until its slab is needed."""
        self._left[row.slab] = row.held[: self._cache.length(row.slab)]
