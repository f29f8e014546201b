"""Nimble's prior, found by closing the loop: a text is decoded with the cache of the run deciding what stands in for
what, at rising strengths, until it costs too much."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tiermoe.decide.phase_costs import PhaseCosts
from tiermoe.decide.precision import Fixed, PrecisionContext
from tiermoe.engine.engine import Engine
from tiermoe.errors import ConfigError
from tiermoe.measure.evaluate import decode_window
from tiermoe.measure.scoring import mean_over_windows, score_tokens

STRENGTHS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6)
"""That are tried."""

TOLERATED = 0.01
"""Loss in perplexity."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a prior of some strength costs beside the exact preset on the same tokens: `loss` of perplexity with its
    standard error over sequences (None of one), and the share of the exact one's missed experts that are left."""

    strength: float
    loss: float
    error: float | None
    misses: float


@dataclass(frozen=True, slots=True)
class Found:
    """`tried`: on the sequences that the strength was chosen on, by rising strength. `judged`: it, on the others."""

    tried: Sequence[Cost]
    judged: Cost

    @property
    def strength(self) -> float:
        return self.judged.strength


class Trials:
    """Decodes sequences `ids` (n, length), the first `prompt` tokens of each read at once. The composition's other
    lossy parts are part of the cost."""

    def __init__(self, engine: Engine, ids: torch.Tensor, prompt: int) -> None:
        self._engine, self._ids, self._prompt = engine, ids, prompt
        shape = (ids.shape[1] - prompt, engine.config.vocab_size)
        self._logits = torch.empty(shape, dtype=engine.dtype)

    def exact(self) -> tuple[list[torch.Tensor], float]:
        """As `moved`, of the composition without its lossy parts."""
        top_k = [layer.top_k for layer in self._engine.store.layers]
        rule = Fixed(PrecisionContext(self._engine.settings.bits_used, top_k))
        with self._engine.scheduler.ruled_by(rule):
            return self.moved(0.0)

    def moved(self, strength: float) -> tuple[list[torch.Tensor], float]:
        """With a prior of this strength: the tokens' negative log-likelihoods (length - prompt,) of each sequence, and
        experts that a decoded token missed. The first sequence is decoded once more before, so that every strength
        begins with a cache of its own."""
        losses, decode = [], PhaseCosts()
        with self._engine.scheduler.moved_by(strength):
            self._decoded(self._ids[0], PhaseCosts())
            for ids in self._ids:
                losses.append(self._decoded(ids, decode))
        return losses, decode.counts.misses / decode.tokens

    def _decoded(self, ids: torch.Tensor, decode: PhaseCosts) -> torch.Tensor:
        decode_window(self._engine, ids[None], self._prompt, self._logits, PhaseCosts(), decode)
        return score_tokens(self._logits, ids[self._prompt :], None).nll


def find_prior(engine: Engine, ids: torch.Tensor, prompt: int, progress: Callable[[int, int], None]) -> Found:
    """The strongest prior that loses at most `TOLERATED` on every other sequence of `ids` (n, length), judged on those
    between them. ConfigError where nothing is ever missed, and where none is weak enough."""
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
    return Found(tried, judged)


def cost(strength: float, moved: tuple[list[torch.Tensor], float], base: tuple[list[torch.Tensor], float]) -> Cost:
    """What `moved` costs beside `base`, both as `Trials.moved` gives them: the same tokens."""
    ratio = mean_over_windows([ours - theirs for ours, theirs in zip(moved[0], base[0], strict=True)])
    loss = math.expm1(ratio.value)
    error = None if ratio.error is None else (1 + loss) * ratio.error
    return Cost(strength, loss, error, moved[1] / base[1])
