"""Nimble's prior, found by closing the loop: a text is decoded at rising strengths, the cache of the run deciding which
expert stands in for which, until the loss is too large."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tiermoe.engine.engine import Engine
from tiermoe.errors import ConfigError
from tiermoe.lab.measure.evaluate import feed_window
from tiermoe.lab.measure.scoring import mean_over_windows, score_tokens
from tiermoe.metrics import Metrics
from tiermoe.offload.policies.precision import Fixed, PrecisionContext

STRENGTHS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6)
"""Strengths that are tried."""

TOLERATED = 0.01
"""Loss in perplexity that the prior may cost."""


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
