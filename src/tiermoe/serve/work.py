"""One request at work: what is to be run of it next, and what its tokens say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tiermoe.batch import Kind, Row, decode, prompt, verify
from tiermoe.generation.sampling import Sampler, log_probabilities
from tiermoe.serve.detokenize import Detokenizer
from tiermoe.serve.held import Held
from tiermoe.serve.prefix_disk import Stored
from tiermoe.serve.request import Piece, Request, TokenLogprob
from tiermoe.serve.scoring import next_part, prompt_scores

AHEAD = 256
"""Tokens of an answer that memory is set aside for at a time."""


@dataclass(slots=True)
class Work:
    """held: what lies in the slab. past: what did when it was put back amid its answer. answer: tokens that were
    chosen; the last one has not run. room: tokens that the slab has memory for. stored: a beginning that is being read
    into the slab from disk. cached: tokens of the prompt that did not have to be read. scores: of the prompt's tokens,
    until they are told."""

    number: int
    request: Request
    sampler: Sampler
    text: Detokenizer
    slab: int = -1
    room: int = 0
    stored: Stored | None = None
    held: Held = field(default_factory=Held)
    past: Held = field(default_factory=Held)
    answer: list[int] = field(default_factory=list)
    cached: int = 0
    scores: list[TokenLogprob] = field(default_factory=list)

    @property
    def again(self) -> bool:
        """Whether it was put back amid its answer: what has run of it before runs again and is told to nobody."""
        return bool(self.answer)

    @property
    def length(self) -> int:
        """Tokens that are held."""
        return len(self.held.tokens)

    @property
    def is_read(self) -> bool:
        """Whether all has run that comes before the token that is to be chosen next, or that was chosen last."""
        return self.length >= len(self.request.ids) + max(len(self.answer) - 1, 0)

    @property
    def scored(self) -> bool:
        """Whether the tokens of the next part of its prompt are all to be scored."""
        return self.request.prompt_logprobs and not self.again

    @property
    def by_itself(self) -> bool:
        """Whether its next part joins no other rows."""
        generated = self.again and self.past.ran(self.length)[0].how is Kind.DECODE
        return self.stored is not None or self.request.prompt_logprobs or generated

    def wanted(self, context: int) -> int:
        """Tokens to set memory aside for: those that there are, and some of an answer."""
        there = max(len(self.request.ids) + len(self.answer), self.length + 1)
        asked = min(there + AHEAD, len(self.request.ids) + self.request.sampling.max_tokens, context)
        return max(asked, self.past.reach)

    def next_prompt(self, chunk: int, at_once: int) -> Row:
        """The next part of what is to be read, `chunk` tokens of the prompt at the most. What runs again does so in the
        parts in which it ran. An answer's own tokens are verified ones then, `at_once` in a step: they get the bits
        that each had alone."""
        if not self.again:
            return prompt(self.slab, next_part(self.request, self.length, chunk), self.length)
        part, first = self.past.ran(self.length)
        if part.how is Kind.PROMPT and first == self.length:
            return prompt(self.slab, self.past.whole(part, first), first)
        rest = self.past.tokens[self.length : first + part.count]
        if part.how is Kind.DECODE:
            return verify(self.slab, self.length, rest[:at_once])
        return prompt(self.slab, rest[:chunk], self.length)  # of a file that is gone

    def next_answer(self) -> Row:
        """The token that was chosen last."""
        return decode(self.slab, self.length, self.answer[-1])

    def has_read(self, row: Row, logits: Tensor) -> None:
        """`next_prompt` has run; logits (n, vocabulary) of its last token, or of all where they are scored."""
        if self.scored:
            self.scores += prompt_scores(self.request, logits, self.length)
        self.held.add(row.tokens, Kind.PROMPT if row.kind is Kind.PROMPT else Kind.DECODE)
        self._forget_beyond(row.first)

    def has_filled(self, stored: Stored) -> None:
        """What lay on disk is in the slab, as far as it could be read."""
        ids = self.past.whole(*self.past.ran(0)) if self.again else self.request.ids
        self.held.add(ids[: stored.length], stored)
        if self.again:
            self._forget_beyond(0)

    def _forget_beyond(self, first: int) -> None:
        """Of a part that ran again, from position `first` on, no more is held than was."""
        if self.again:
            part, begin = self.past.ran(first)
            self.held = self.held.beginning(begin + part.count)

    def put_back(self) -> None:
        """It has lost its slab; what it said stays said."""
        if not self.again:
            self.scores = []
        elif self.length > len(self.past.tokens):
            self.past = self.held
        self.slab, self.room, self.stored, self.held = -1, 0, None, Held()

    def choose(self, logits: Tensor, ends: set[int], context: int) -> Piece:
        """The next token of the answer, by the logits (vocabulary) of the one before. ends: tokens that end it.
        context: most tokens with the prompt."""
        request, told = self.request, tuple[TokenLogprob, ...]()
        grammar = request.grammar
        if grammar is not None:
            logits = grammar.restrict(logits)
        token = self.sampler.choose(logits, self.held.tokens, len(self.answer))
        if request.logprobs is not None:
            told = (TokenLogprob(token, *log_probabilities(logits, token, request.logprobs)),)
        self.answer.append(token)
        if grammar is not None:
            grammar.accept(token)
        ended = token in ends
        text = "" if ended else self.text.add(token)
        full = len(self.answer) >= request.sampling.max_tokens or self.length + 1 >= context
        whole = grammar is not None and grammar.ended
        finish = "stop" if ended or whole or self.text.stopped_by else "length" if full else None
        if finish is not None:
            text += self.text.end()
            finish = "stop" if self.text.stopped_by else finish
        scored, self.scores = tuple(self.scores), []
        return Piece(self.number, text, (token,), told, finish, None, self.cached, self.text.stopped_by, scored)


def work_on(number: int, request: Request, tokenizer: Any, penalty: float | None) -> Work:
    """A request that nothing has been done for. penalty: as `Sampler` takes it."""
    text = Detokenizer(tokenizer, request.stops, request.special)
    return Work(number, request, Sampler(request.sampling, penalty), text)
