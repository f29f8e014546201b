"""MoBiLE's gamma for one model: the fewest fallbacks within a loss, or the least loss within a share of fallbacks.

Both are measured on what the model itself writes, with all its experts and at temperature 1. Of such text the loss
estimates how far the distributions lie apart, and the fallbacks are those of generating: of a text by others the model
is less sure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from tiermoe.engine.engine import Engine
from tiermoe.engine.fallback import ConfidentDecoding
from tiermoe.errors import ConfigError
from tiermoe.generation.sampling import Sampler, Sampling
from tiermoe.generation.sequence import Sequence as Growing
from tiermoe.generation.sequence import end_tokens
from tiermoe.measure.scoring import log_probabilities
from tiermoe.measure.tasks import LEAST_ITEMS, relative_loss
from tiermoe.systems.edgemoe import Loss

GAMMAS = tuple(step / 20 for step in range(21))
"""That are tried: from no fallback (0) to one for every token (1)."""

_LEAST_TOKENS = 8  # of an answer: a shorter one says nothing


@dataclass(frozen=True, slots=True)
class Gamma:
    """`ratio`: of the judged text's tokens that fell back; `loss`: there, in perplexity against all experts. `tokens`:
    that were generated, of both halves. `tried`: gamma → share of fallbacks and loss, on the half that was searched."""

    gamma: float
    ratio: float
    loss: Loss
    tokens: int
    tried: dict[float, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model wrote after a prompt. `nll`: of its tokens, in nats, all experts running."""

    prompt: list[int]
    tokens: list[int]
    nll: list[float]


@dataclass(frozen=True, slots=True)
class Scored:
    """Answers read again at a gamma: the share of their tokens that fell back, and the loss."""

    ratio: float
    loss: Loss


Reached = Callable[[Scored], bool]
"""Whether what a gamma gives is what was asked for."""


def within_loss(tolerated: float) -> tuple[Reached, Reached]:
    """For the search, and for the judgement, which counts the standard error: a loss of at most `tolerated`."""
    return (lambda found: found.loss.value <= tolerated), (lambda found: found.loss.within(tolerated))


def find_gamma(
    engine: Engine, ids: torch.Tensor, prompt: int, tolerated: float, progress: Callable[[int, int], None]
) -> Gamma:
    """The least gamma whose loss on the even sequences of `ids` (n, length) is within `tolerated`, and on the odd ones
    with its standard error: each begins with its first `prompt` tokens and is written to its end by the model.
    engine: with routing=confident. ConfigError for fewer than four sequences, or where hardly anything is written."""
    return _found(engine, ids, prompt, progress, *within_loss(tolerated), least=True)


def find_gamma_for(
    engine: Engine, ids: torch.Tensor, prompt: int, ratio: float, progress: Callable[[int, int], None]
) -> Gamma:
    """The same for fallbacks: the largest gamma at which at most the share `ratio` of the tokens fall back, on the even
    sequences and on the odd ones."""

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
    """least: gammas from some one on reach it, and the first is wanted; else those up to some one, and the last."""
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

    order = list(GAMMAS if least else reversed(GAMMAS))  # the last one always reaches it
    first = _first(order, on_even)
    for gamma in order[first:]:
        found = scored(odd, gamma)
        if judged(found) or gamma == order[-1]:
            progress(steps, steps)
            tokens = sum(len(answer.tokens) for answer in (*even, *odd))
            return Gamma(gamma, found.ratio, found.loss, tokens, tried)
    raise AssertionError("the last gamma is always taken")


def _first(order: Sequence[float], reached: Callable[[float], bool]) -> int:
    """The place of the first that reaches it, where all behind it do; the last one need not be asked."""
    low, high = 0, len(order) - 1
    while low < high:
        middle = (low + high) // 2
        if reached(order[middle]):
            high = middle
        else:
            low = middle + 1
    return low


def written(engine: Engine, ids: torch.Tensor, prompt: int) -> list[Answer]:
    """What the model writes after the first `prompt` tokens of each sequence (n, length), until it is as long or ends;
    too short answers are left out."""
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
        text = Growing(engine, engine.new_cache(1, len(prompt) + most))
        logits = text.read(prompt)
        while len(answer.tokens) < most:
            token = sampler.choose(logits)
            if token in ends:
                break
            answer.tokens.append(token)
            answer.nll.append(_nll(logits, token))
            logits = text.add(token)
        text.close()
    return answer


@torch.inference_mode()
def scored_at(engine: Engine, answers: Sequence[Answer], gamma: float) -> Scored:
    """Answers fed again token by token, whatever the model would have written, with fallbacks at `gamma`."""
    confident = _confident(engine)
    differences = []
    with confident.at(gamma) as counted:
        for answer in answers:
            text = Growing(engine, engine.new_cache(1, len(answer.prompt) + len(answer.tokens)))
            logits, nll = text.read(answer.prompt), []
            for token in answer.tokens:
                nll.append(_nll(logits, token))
                logits = text.add(token)
            text.close()
            differences.append(fmean(nll) - fmean(answer.nll))
        return Scored(counted.fallback_ratio, relative_loss(differences))


def _nll(logits: torch.Tensor, token: int) -> float:
    return -float(log_probabilities(logits[None])[0, token])


def _confident(engine: Engine) -> ConfidentDecoding:
    assert engine.steps.confident is not None
    return engine.steps.confident


def _halves(answers: Sequence[Answer]) -> tuple[Sequence[Answer], Sequence[Answer]]:
    if len(answers) < LEAST_ITEMS:
        raise ConfigError(
            f"gamma is found on one half of what the model writes and judged on the other: {LEAST_ITEMS} answers of at "
            f"least {_LEAST_TOKENS} tokens are needed, there are {len(answers)}; raise --tokens, or lower --sequence"
        )
    return answers[::2], answers[1::2]
