"""Prompts whose tokens are scored (`echo` with `logprobs`): a step gives the logits of all its tokens, not the last."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from tiermoe.generation.sampling import log_probabilities
from tiermoe.serve.request import Request, TokenLogprob
from tiermoe.types import Use

SCORED_LOGITS_BYTES = 128 << 20
"""Most bytes of logits, as float32, that a step gives where all its tokens are scored."""


def scored_tokens(vocabulary: int) -> int:
    """Most tokens of such a step, by `SCORED_LOGITS_BYTES`; one at least."""
    return max(1, SCORED_LOGITS_BYTES // (4 * vocabulary))


def use_of(vocabulary: int, chunk: int) -> Use:
    """What the server's batch asks of a step at the most: it reads a chunk of prompts, and may score all its tokens."""
    return Use(prompts=1, scored=min(chunk, scored_tokens(vocabulary)))


def next_part(request: Request, first: int, most: int) -> list[int]:
    """The next tokens of a prompt, from `first` on. The last one of a prompt that is scored comes by itself: nothing
    scores what follows it. So the others are read as one reads them who only scores: a step of other length may round
    otherwise."""
    end = len(request.ids) - request.prompt_logprobs
    return request.ids[first : max(min(first + most, end), first + 1)]


def prompt_scores(request: Request, logits: Tensor, first: int) -> Iterator[TokenLogprob]:
    """Of the tokens of a prompt that follow those from `first` on, by the logits of these (tokens, vocabulary). The
    prompt's first token, which nothing scores, comes with those that follow it."""
    if first == 0:
        yield TokenLogprob(request.ids[0], None, [])
    following = request.ids[first + 1 : first + 1 + len(logits)]
    for its, token in zip(logits, following, strict=False):
        yield TokenLogprob(token, *log_probabilities(its, token, request.logprobs or 0))
