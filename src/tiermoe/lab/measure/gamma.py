"""MoBiLE's gamma for one model: the fewest fallbacks within a loss, or the least loss within a share of fallbacks.

Both are measured on text that the model itself writes, with all experts and at temperature 1. On such text the loss
estimates how far the distributions lie apart, and the fallbacks are those of generating: the model is less sure of a
text by others.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from tiermoe.engine.engine import Engine
from tiermoe.engine.rerouting import ConfidentDecoding
from tiermoe.engine.sampling import Sampler, Sampling, end_tokens
from tiermoe.errors import ConfigError
from tiermoe.lab.measure.scoring import total_nll
from tiermoe.lab.measure.tasks import LEAST_ITEMS, relative_loss
from tiermoe.lab.measure.texts import Feed
from tiermoe.lab.papers.edgemoe import RelativeLoss

GAMMAS = tuple(step / 20 for step in range(21))
"""Gammas that are tried: from no fallback (0) to one for every token (1)."""

_LEAST_TOKENS = 8  # of an answer: a shorter one says nothing


@dataclass(frozen=True, slots=True)
class Gamma:
    """The gamma that was found, judged on the half of the text that was not searched."""

    gamma: float
    ratio: float  # share of the judged tokens that fell back
    loss: RelativeLoss  # of perplexity there, against all experts
    tokens: int  # that were generated, of both halves
    tried: dict[float, tuple[float, float]]  # gamma → share of fallbacks and loss, on the searched half


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model wrote after a prompt."""

    prompt: list[int]
    tokens: list[int]
    nll: list[float]  # of the tokens, in nats, all experts running


@dataclass(frozen=True, slots=True)
class Scored:
    """Answers read again at a gamma."""

    ratio: float  # share of their tokens that fell back
    loss: RelativeLoss


Reached = Callable[[Scored], bool]
"""Whether a gamma reaches the goal."""


def within_loss(tolerated: float) -> tuple[Reached, Reached]:
    """A loss of at most `tolerated`: for the search, and for the judgement, which counts the standard error."""
    return (lambda found: found.loss.value <= tolerated), (lambda found: found.loss.within(tolerated))


def find_gamma(
    engine: Engine, ids: torch.Tensor, prompt: int, tolerated: float, progress: Callable[[int, int], None]
) -> Gamma:
    """The least gamma whose loss on the even sequences of `ids` (n, length) is within `tolerated`, and on the odd ones
    with the standard error added. The model writes each sequence to its end after the first `prompt` tokens. engine:
    with routing=confident. ConfigError for fewer than four sequences, or where hardly anything is written."""
    return _found(engine, ids, prompt, progress, *within_loss(tolerated), least=True)


def find_gamma_for(
    engine: Engine, ids: torch.Tensor, prompt: int, ratio: float, progress: Callable[[int, int], None]
) -> Gamma:
    """The largest gamma at which at most the share `ratio` of the tokens fall back, on the even sequences and on the
    odd ones; otherwise as `find_gamma`."""

    def reached(found: Scored) -> bool:
        return found.ratio <= ratio

    return _found(engine, ids, prompt, progress, reached, reached, least=False)


def _found(
    engine: Engine,
    ids: torch.Tensor,
    prompt: int,
    progress: Callable[[int, int], None],
    searched: Reached,
    judged: Reached,
    least: bool,
) -> Gamma:
    """The first gamma that reaches the goal on both halves. least: gammas from some one on reach it, and the smallest
    is wanted; else gammas up to some one do, and the largest is wanted."""
    even, odd = _halves(written(engine, ids, prompt))
    steps, done = math.ceil(math.log2(len(GAMMAS))) + len(GAMMAS), 0
    tried: dict[float, tuple[float, float]] = {}

    def scored(answers: Sequence[Answer], gamma: float) -> Scored:
        nonlocal done
        done += 1
        progress(done, steps)
        return scored_at(engine, answers, gamma)

    def on_even(gamma: float) -> bool:
        found = scored(even, gamma)
        tried[gamma] = found.ratio, found.loss.value
        return searched(found)

    order = list(GAMMAS if least else reversed(GAMMAS))  # the last one always reaches the goal and is not tried
    first = bisect_left(order, True, hi=len(order) - 1, key=on_even)
    for gamma in order[first:]:
        found = scored(odd, gamma)
        if judged(found) or gamma == order[-1]:
            progress(steps, steps)
            tokens = sum(len(answer.tokens) for answer in (*even, *odd))
            return Gamma(gamma, found.ratio, found.loss, tokens, tried)
    raise AssertionError("the last gamma is always taken")


def written(engine: Engine, ids: torch.Tensor, prompt: int) -> list[Answer]:
    """The model's answers after the first `prompt` tokens of each sequence (n, length), up to the sequence's length or
    an end token; too short answers are left out."""
    ends = end_tokens(engine.generation_config)
    answers = []
    for number, row in enumerate(ids.tolist()):
        answer = _written(engine, row[:prompt], len(row) - prompt, number, ends)
        if len(answer.tokens) >= _LEAST_TOKENS:
            answers.append(answer)
    return answers


@torch.inference_mode()
def _written(engine: Engine, prompt: list[int], most: int, seed: int, ends: set[int]) -> Answer:
    sampler = Sampler(Sampling(temperature=1.0, seed=seed))
    answer = Answer(prompt, [], [])
    with _confident(engine).at(1.0):  # every token falls back: all experts
        feed = Feed(engine, torch.tensor(prompt), len(prompt), most)
        logits = feed.prompt()
        while len(answer.tokens) < most:
            token = sampler.choose(logits)
            if token in ends:
                break
            answer.tokens.append(token)
            answer.nll.append(_nll(logits, token))
            logits = feed.add(token)
    return answer


@torch.inference_mode()
def scored_at(engine: Engine, answers: Sequence[Answer], gamma: float) -> Scored:
    """Answers fed to the model again, token by token, with fallbacks at `gamma`."""
    confident = _confident(engine)
    differences = []
    with confident.at(gamma) as counted:
        for answer in answers:
            feed = Feed(engine, torch.tensor([*answer.prompt, *answer.tokens]), len(answer.prompt))
            logits, nll = feed.prompt(), []
            for position, token in enumerate(answer.tokens, len(answer.prompt)):
                nll.append(_nll(logits, token))
                logits = feed.token(position)
            differences.append(fmean(nll) - fmean(answer.nll))
        return Scored(counted.fallback_ratio, relative_loss(differences))


def _nll(logits: torch.Tensor, token: int) -> float:
    return total_nll(logits[None], torch.tensor([token]))


def _confident(engine: Engine) -> ConfidentDecoding:
    assert engine.confident is not None
    return engine.confident


def _halves(answers: Sequence[Answer]) -> tuple[Sequence[Answer], Sequence[Answer]]:
    if len(answers) < LEAST_ITEMS:
        raise ConfigError(
            f"gamma is found on one half of what the model writes and judged on the other: {LEAST_ITEMS} answers of at "
            f"least {_LEAST_TOKENS} tokens are needed, there are {len(answers)}; raise --tokens, or lower --sequence"
        )
    return answers[::2], answers[1::2]
