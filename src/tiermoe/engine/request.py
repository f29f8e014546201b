"""Requests: what is asked (`Request`), how far it has come (`RequestState`), and the pieces of its answer (`Piece`)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tiermoe.batch import Kind, Row, prompt, verify
from tiermoe.engine.detokenize import Detokenizer
from tiermoe.engine.sampling import Grammar, Sampler, Sampling, log_probabilities
from tiermoe.engine.speculation import Drafter
from tiermoe.model.cache.prefix import SlabContents
from tiermoe.model.cache.prefix_disk import StoredPrefix
from tiermoe.model.tokenizer import Tokenizer


class Thinking(Protocol):
    """Reader of an answer's text."""

    @property
    def inside(self) -> bool:
        """Whether a thought is under way."""

    def add(self, text: str) -> object: ...


class ThoughtBudget:
    """Budget of the thoughts in one answer. most: their tokens. end: ids of the tokens that end a thought. thinking:
    reads the answer."""

    def __init__(self, most: int, end: Sequence[int], thinking: Thinking) -> None:
        self._left = most
        self._end = end
        self._thinking = thinking
        self._forced = deque[int]()  # to come
        self._check(thinking.inside)

    @property
    def forced(self) -> int | None:
        """The token that must come next; None: any may."""
        return self._forced[0] if self._forced else None

    def add(self, text: str) -> None:
        """Goes on after one more token. text: what is certain of the answer's text with it."""
        if self._forced:
            self._forced.popleft()
        before = self._thinking.inside
        self._left -= before
        self._thinking.add(text)
        self._check(self._thinking.inside and not before)

    def _check(self, begun: bool) -> None:
        """Forces the end where the budget ends now, or had ended before a thought has begun."""
        if (self._thinking.inside and self._left == 0) or (begun and self._left < 0):
            self._forced.extend(self._end)


AHEAD = 256
"""Tokens of an answer that memory is reserved for at a time."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be answered."""

    ids: list[int]  # token ids of the prompt
    sampling: Sampling  # `max_tokens` bounds the answer
    stops: tuple[str, ...] = ()  # strings that end the answer
    logprobs: int | None = None  # log probabilities of so many of the likeliest tokens at each place; None: none
    grammar: Grammar | None = None  # what the answer must follow
    budget: ThoughtBudget | None = None  # of its thoughts
    prompt_logprobs: bool = False  # log probabilities of the prompt's tokens too; then all of it is read
    salt: str = ""  # prefixes are shared with requests of the same one
    fresh: bool = False  # all of the prompt is read, whatever prefix of it earlier requests have left
    special: frozenset[int] = frozenset()  # special tokens that are part of the text
    progress: bool = False  # a piece for each chunk of the prompt, too


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a token, and the likeliest tokens in its place."""

    token: int
    logprob: float | None  # None: the first token of a prompt
    top: list[tuple[int, float]]  # (token, log probability), falling


@dataclass(frozen=True, slots=True)
class Timings:
    """What an answer has taken so far."""

    read: int = 0  # tokens of the prompt that ran; the others were cached
    read_s: float = 0.0  # seconds from the prompt's first turn until the first token was chosen
    tokens: int = 0  # of the answer
    answer_s: float = 0.0  # seconds from the first token to the last one
    drafted: int = 0  # draft tokens that were verified
    accepted: int = 0  # of these, those that were right


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step adds to an answer, or how far it has read the prompt."""

    number: int  # of the request
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None  # in the last piece: 'stop', 'length' or 'error'
    error: Exception | None = None
    cached: int = 0  # tokens of the prompt that did not have to be read
    stopped_by: str | None = None  # the stop string that ended the answer
    prompt: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens, in the first piece, where they are asked for
    timings: Timings = Timings()
    read: int | None = None  # `RequestState.read` of its prompt; None: the piece is of the answer


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


class RequestState:
    """One request in the loop: what runs of it next, and what its tokens say.

    A preempted request has lost its KV slab and keeps its emitted text. What has run of it runs again later
    (`replaying`) in the steps in which it ran, so that no bit changes. number: the request's, in the loop. penalty:
    the model's repetition penalty."""

    def __init__(self, number: int, request: Request, tokenizer: Tokenizer, penalty: float | None) -> None:
        self.number = number
        self.request = request
        self.sampler = Sampler(request.sampling, penalty, tokenizer)
        self.text = Detokenizer(tokenizer, request.stops, request.special)
        self.slab = -1  # of the KV cache; -1: none
        self.room = 0  # tokens that memory is reserved for
        self.contents = SlabContents(salt=request.salt)  # of the slab
        self.before = SlabContents(salt=request.salt)  # of the slab that it lost amid its answer
        self.saved: StoredPrefix | None = None  # what of these is on disk
        self.stored: StoredPrefix | None = None  # a prefix that is being read into the slab from disk
        self.answer: list[int] = []  # chosen tokens; the last one has not run
        self.cached = 0  # tokens of the prompt that did not have to be read
        self.under_way = 0  # tokens that take as much computing as chunks have taken that are amid the layers
        self.drafter: Drafter | None = None
        self.drafted = self.accepted = 0  # draft tokens that were verified, and those that were right
        self.began_at = self.first_at = time.perf_counter()  # when its prompt and its answer began
        self.scores: list[TokenLogprob] = []  # of the prompt's tokens, until they are emitted

    @property
    def replaying(self) -> bool:
        """Whether it was preempted amid its answer. What is read then emits nothing."""
        return bool(self.answer)

    @property
    def length(self) -> int:
        """Tokens in the slab."""
        return len(self.contents.tokens)

    @property
    def read(self) -> int:
        """Tokens that have run; of chunks that are amid the layers, as many as take as much computing."""
        return self.length + self.under_way

    @property
    def is_read(self) -> bool:
        """Whether everything has run that comes before the token that is chosen next, or that was chosen last."""
        return self.length >= len(self.request.ids) + max(len(self.answer) - 1, 0)

    @property
    def scored(self) -> bool:
        """Whether the next step scores all its tokens of the prompt."""
        return self.request.prompt_logprobs and not self.replaying

    @property
    def runs_alone(self) -> bool:
        """Whether its next step has no other rows."""
        generated = self.replaying and self.before.part_at(self.length)[0].source is Kind.DECODE
        return self.stored is not None or self.request.prompt_logprobs or generated

    def wanted(self, context: int) -> int:
        """Tokens to reserve memory for: those that there are, and some of an answer. context: most of a request."""
        there = max(len(self.request.ids) + len(self.answer), self.length + 1)
        asked = min(there + AHEAD, len(self.request.ids) + self.request.sampling.max_tokens, context)
        return max(asked, self.before.written)

    def next_prompt(self, chunk: int, at_once: int) -> Row:
        """The next row to be read, of at most `chunk` tokens of the prompt.

        A replayed request runs in the parts in which it ran. Tokens of its answer are VERIFY rows of `at_once` tokens
        then, which get the bits that each had alone."""
        if not self.replaying:
            # The last token of a scored prompt runs alone: nothing scores what follows it. So the others run as for one
            # who only scores; a step of another length may round otherwise.
            end = len(self.request.ids) - self.request.prompt_logprobs
            end = max(min(self.length + chunk, end), self.length + 1)
            return prompt(self.slab, self.request.ids[self.length : end], self.length)
        part, first = self.before.part_at(self.length)
        if part.source is Kind.PROMPT and first == self.length:
            return prompt(self.slab, self.before.step_tokens(part, first), first)
        rest = self.before.tokens[self.length : first + part.count]
        if part.source is Kind.DECODE:
            return verify(self.slab, self.length, rest[:at_once])
        return prompt(self.slab, rest[:chunk], self.length)  # of a file that is gone

    def next_prompts(self, chunk: int, at_once: int, most: int) -> list[Row]:
        """`next_prompt` and the chunks of the prompt after it, at most `most` in all; of a step that runs alone, or
        that ran before, `next_prompt` only."""
        rows = [self.next_prompt(chunk, at_once)]
        if not (self.runs_alone or self.replaying):
            ids = self.request.ids
            rows += [prompt(self.slab, ids[at : at + chunk], at) for at in range(rows[0].end, len(ids), chunk)]
        return rows[:most]

    def next_answer(self, guesses: Sequence[int] = ()) -> Row:
        """The row that decodes the token chosen last, or verifies draft tokens after it."""
        return Row(self.slab, self.length, (self.answer[-1], *guesses), Kind.VERIFY if guesses else Kind.DECODE)

    def has_read(self, row: Row, logits: Tensor) -> None:
        """Records that `next_prompt` has run. logits (n, vocabulary): of its last token, or of all where they are
        scored."""
        self.under_way = 0
        if self.scored:
            self._score(logits)
        self.contents.add(row.tokens, Kind.PROMPT if row.kind is Kind.PROMPT else Kind.DECODE)
        self._crop_replayed(row.first)

    def has_filled(self, stored: StoredPrefix) -> None:
        """Records that the slab holds a prefix from disk, as far as it could be read."""
        if stored.checksums:
            self.contents = self.before.prefix(self.before.resumable(stored.length))
            return
        ids = self.before.step_tokens(*self.before.part_at(0)) if self.replaying else self.request.ids
        self.contents.add(ids[: stored.length], stored)
        self._crop_replayed(0)

    def preempt(self, saved: StoredPrefix | None) -> None:
        """Takes the freed slab from the request; its emitted text is kept. saved: what of the slab is on disk."""
        if not self.replaying:
            self.scores = []
        elif self.length > len(self.before.tokens):
            self.before = self.contents
        if saved is not None and (self.saved is None or saved.length > self.saved.length):
            self.saved = saved
        self.slab, self.room, self.stored, self.under_way = -1, 0, None, 0
        self.contents = SlabContents(salt=self.request.salt)

    def choose(self, logits: Tensor, ends: frozenset[int], context: int) -> Piece:
        """Chooses the next token of the answer, from the logits (vocabulary) of the one before, on any device.

        ends: tokens that end the answer. context: most tokens of prompt and answer."""
        request, grammar, budget = self.request, self.request.grammar, self.request.budget
        logits = logits.cpu()  # once: what chooses of them reads them many times
        if grammar is not None:
            logits = grammar.restrict(logits)
        token = None if budget is None else budget.forced
        if token is None:
            token = self.sampler.choose(logits, self.contents.tokens, len(self.answer), ends)
        logprobs: tuple[TokenLogprob, ...] = ()
        if request.logprobs is not None:
            logprobs = (TokenLogprob(token, *log_probabilities(logits, token, request.logprobs)),)
        now = time.perf_counter()
        if not self.answer:
            self.first_at = now
        self.answer.append(token)
        if grammar is not None:
            grammar.accept(token)
        ended = token in ends
        text = "" if ended else self.text.add(token)
        if budget is not None:
            budget.add(text)
        finish = None
        if ended or self.text.stopped_by or (grammar is not None and grammar.ended):
            finish = "stop"
        elif len(self.answer) >= request.sampling.max_tokens or len(self.contents.tokens) + 1 >= context:
            finish = "length"
        if finish is not None:
            text += self.text.end()
            finish = "stop" if self.text.stopped_by else finish
        scored, self.scores = tuple(self.scores), []
        timings = Timings(
            len(request.ids) - self.cached, self.first_at - self.began_at, len(self.answer), now - self.first_at,
            self.drafted, self.accepted,
        )  # fmt: skip
        return Piece(
            self.number, text, (token,), logprobs, finish, cached=self.cached, stopped_by=self.text.stopped_by,
            prompt=scored, timings=timings,
        )  # fmt: skip

    def _score(self, logits: Tensor) -> None:
        """Scores the prompt's tokens after those of the slab, from the logits (n, vocabulary) of the tokens before
        them. The prompt's first token, which nothing scores, comes with those that follow it."""
        first, ids = self.length, self.request.ids
        if first == 0:
            self.scores.append(TokenLogprob(ids[0], None, []))
        for each, token in zip(logits.cpu(), ids[first + 1 : first + 1 + len(logits)], strict=False):
            self.scores.append(TokenLogprob(token, *log_probabilities(each, token, self.request.logprobs or 0)))

    def _crop_replayed(self, first: int) -> None:
        """Forgets what a replayed part, from position `first` on, has beyond the tokens that were held of it."""
        if self.replaying:
            part, begin = self.before.part_at(first)
            self.contents = self.contents.prefix(begin + part.count)
