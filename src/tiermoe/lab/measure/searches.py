"""Settings that are searched on a running engine: MoBiLE's gamma, Nimble's prior, Fate's share of low experts.

Gamma: the fewest fallbacks within a loss, or the least loss within a share of fallbacks. Both are measured on text that
the model itself writes, with all experts and at temperature 1. On such text the loss estimates how far the
distributions lie apart, and the fallbacks are those of generating: the model is less sure of a text by others.

The prior closes the loop: a text is decoded at rising strengths, the cache of the run deciding which expert stands in
for which, until the loss is too large.
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
from tiermoe.lab.measure.evaluate import feed_window, prompt_logits
from tiermoe.lab.measure.scoring import mean_over_windows, score_tokens, total_nll
from tiermoe.lab.measure.tasks import LEAST_ITEMS, relative_loss
from tiermoe.lab.measure.texts import Feed
from tiermoe.lab.papers.edgemoe import RelativeLoss
from tiermoe.metrics import Metrics
from tiermoe.model.prepare_store import Progress
from tiermoe.offload.policies.precision import Fixed, Popularity, PrecisionContext

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
            token = sampler.choose(logits.cpu())
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


STRENGTHS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6)
"""Strengths that are tried."""

TOLERATED = 0.01
"""Loss in perplexity that the prior may cost, and that Fate's share stays below (section 4.5)."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a prior of some strength costs beside the exact preset on the same tokens."""

    strength: float
    loss: float  # of perplexity, relative
    error: float | None  # standard error of the loss over sequences; None of one sequence
    misses: float  # share of the exact preset's missed experts that are left


@dataclass(frozen=True, slots=True)
class Prior:
    """The strongest prior within the tolerated loss."""

    tried: Sequence[Cost]  # on the sequences that it was chosen on, by rising strength
    judged: Cost  # on the other sequences

    @property
    def strength(self) -> float:
        return self.judged.strength


class Trials:
    """Decodes sequences `ids` (n, length) at several strengths, the first `prompt` tokens of each read at once. The
    other lossy parts of the composition are part of the cost."""

    def __init__(self, engine: Engine, ids: torch.Tensor, prompt: int) -> None:
        self._engine, self._ids, self._prompt = engine, ids, prompt
        shape = (ids.shape[1] - prompt, engine.config.vocab_size)
        self._logits = torch.empty(shape, dtype=engine.dtype)

    def exact(self) -> tuple[list[torch.Tensor], float]:
        """As `moved`, without the composition's lossy parts."""
        top_k = [layer.top_k for layer in self._engine.store.layers]
        rule = Fixed(PrecisionContext(self._engine.settings.bits_used, top_k))
        with self._engine.scheduler.ruled_by(rule):
            return self.moved(0.0)

    def moved(self, strength: float) -> tuple[list[torch.Tensor], float]:
        """Decodes with a prior of `strength` → negative log-likelihoods (length - prompt,) of each sequence's tokens,
        and experts that a decoded token missed. The first sequence is decoded twice, so that every strength begins with
        a cache of its own."""
        metrics = Metrics()
        with self._engine.scheduler.moved_by(strength):
            self._nll(self._ids[0], Metrics())
            losses = [self._nll(ids, metrics) for ids in self._ids]
        return losses, metrics.decode.counts.misses / metrics.decode.tokens

    def _nll(self, ids: torch.Tensor, metrics: Metrics) -> torch.Tensor:
        feed_window(self._engine, ids, self._prompt, self._logits, metrics)
        return score_tokens(self._logits, ids[self._prompt :], None).nll


def find_prior(engine: Engine, ids: torch.Tensor, prompt: int, progress: Callable[[int, int], None]) -> Prior:
    """The strongest prior that loses at most `TOLERATED` on the even sequences of `ids` (n, length), judged on the odd
    ones. ConfigError where no expert is ever missed, and where no prior is weak enough."""
    chosen_on, judged_on = Trials(engine, ids[::2], prompt), Trials(engine, ids[1::2], prompt)
    base = chosen_on.exact()
    if base[1] == 0:
        raise ConfigError(
            "every expert fits this memory, so none ever stands in for another; calibrate with the --memory that "
            "nimble will run in"
        )
    tried: list[Cost] = []
    for done, strength in enumerate(STRENGTHS, 1):
        tried.append(cost(strength, chosen_on.moved(strength), base))
        progress(done, len(STRENGTHS) + 1)
        if tried[-1].loss > TOLERATED:
            break
    fitting = [each.strength for each in tried if each.loss <= TOLERATED]
    if not fitting:
        raise ConfigError(
            f"even the weakest prior ({STRENGTHS[0]:g}) costs {tried[0].loss:.2%} of perplexity; use the preset default"
        )
    judged = cost(fitting[-1], judged_on.moved(fitting[-1]), judged_on.exact())
    progress(len(STRENGTHS) + 1, len(STRENGTHS) + 1)
    return Prior(tried, judged)


def cost(strength: float, moved: tuple[list[torch.Tensor], float], base: tuple[list[torch.Tensor], float]) -> Cost:
    """What `moved` costs beside `base`, both of the same tokens and as `Trials.moved` returns them."""
    ratio = mean_over_windows([ours - theirs for ours, theirs in zip(moved[0], base[0], strict=True)])
    loss = math.expm1(ratio.value)
    error = None if ratio.error is None else (1 + loss) * ratio.error
    return Cost(strength, loss, error, moved[1] / base[1])


SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
"""Shares of the active experts that are tried at low precision (Fate)."""


@torch.inference_mode()
def popularity_losses(
    engine: Engine, ids: torch.Tensor, low_bits: int, progress: Progress
) -> list[tuple[float, float]]:
    """(share, loss in perplexity) of each of `SHARES` in order, up to the first that loses `TOLERATED`: each sequence
    of `ids` (n, length) in one prefill pass, against all experts at high precision. The engine must have both
    precisions, and room for one layer's K experts alone: a cached high copy would serve a demand for a low one and hide
    the loss."""
    top_k = [layer.top_k for layer in engine.store.layers]
    losses: list[tuple[float, float]] = []
    base = 0.0
    for done, share in enumerate((0.0, *SHARES), 1):
        context = PrecisionContext(engine.settings.bits_used, top_k)
        with engine.scheduler.ruled_by(Popularity(context, low_bits=low_bits, low_popularity=share)):
            nll = _mean_nll(engine, ids)
        if not share:
            base = nll
        else:
            losses.append((share, math.expm1(nll - base)))
        progress("lowering unpopular experts", done, 1 + len(SHARES))
        if losses and losses[-1][1] >= TOLERATED:
            break
    progress("lowering unpopular experts", 1 + len(SHARES), 1 + len(SHARES))
    return losses


def _mean_nll(engine: Engine, ids: torch.Tensor) -> float:
    found = [total_nll(prompt_logits(engine, row.tolist())[:-1].cpu(), row[1:]) for row in ids]
    return sum(found) / (len(ids) * (ids.shape[1] - 1))
