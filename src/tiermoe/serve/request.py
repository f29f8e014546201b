"""What the batch is asked, and what it tells: requests, and the pieces of their answers."""

from __future__ import annotations

from dataclasses import dataclass

from tiermoe.generation.sampling import Sampling
from tiermoe.serve.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be answered: token ids of the prompt, how tokens are chosen (`sampling.max_tokens` at most), strings
    that end the answer. logprobs: of so many of the likeliest tokens at each place; None: none are told.
    grammar: what the answer must follow. prompt_logprobs: those of the prompt's tokens are told as well; then
    all of it is read. special: special tokens are told as text."""

    ids: list[int]
    sampling: Sampling
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    grammar: Grammar | None = None
    prompt_logprobs: bool = False
    special: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of an answer, its log probability, and the likeliest tokens in its place with theirs. The first token of
    a prompt has none."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step adds to an answer. finish: 'stop', 'length' or 'error' in the last piece. cached: tokens of the
    prompt that did not have to be read. stopped_by: the stop string that ended it. prompt: of the prompt's tokens, in
    the first piece, where that is asked for."""

    number: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    error: Exception | None = None
    cached: int = 0
    stopped_by: str | None = None
    prompt: tuple[TokenLogprob, ...] = ()
