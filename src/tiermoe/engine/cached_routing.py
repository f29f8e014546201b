"""Routers' choices moved towards the experts that are here (`CachePrior`), or replaced by what was predicted
(`as_predicted`), before a layer's experts are asked for. The scores of all experts are needed, which decoders of our
own know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tiermoe.engine.forward_context import INSTEAD, ForwardContext
from tiermoe.errors import ConfigError
from tiermoe.model.decoder import Decoder
from tiermoe.model.routers import Router
from tiermoe.offload.policies.routing import CachePrior, as_predicted

Route = Callable[[Router, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A layer's router and hidden (T, H) → weights (T, K) and experts (T, K)."""


class CachedRouting:
    """The choices of MoE layer `index` in the pass that runs."""

    def __init__(self, index: int, context: ForwardContext) -> None:
        self._index = index
        self._context = context

    def __call__(self, router: Router, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden (T, H) → weights (T, K) and experts (T, K): the router's own where nothing is displaced, and for
        prompts; else its weights of the experts that run."""
        weights, index = router.route(hidden)
        prior = self._context.scheduler.prior
        if self._context.phase != "decode" or prior is None or self._index < prior.untouched:
            return weights, index
        own = index.tolist()
        here = self._here(own, prior.always)
        if all(here(expert) for row in own for expert in row[prior.always :]):
            return weights, index
        scores, shares = router.scores(hidden)
        chosen = [self._moved(prior, *each, here) for each in zip(own, scores.tolist(), shares.tolist(), strict=True)]
        rows = [row for row, taken in enumerate(chosen) if taken != own[row]]
        if rows:
            index = torch.tensor(chosen)
            weights[rows] = router.weights_of(shares[rows], index[rows]).to(weights.dtype)
        return weights, index

    def _here(self, own: Sequence[Sequence[int]], always: int) -> Callable[[int], bool]:
        """Whether an expert is here, or comes anyway for one of several tokens."""
        coming = {expert for row in own for expert in row[:always]}
        resident = self._context.scheduler.is_resident(self._index)
        return lambda expert: expert in coming or resident(expert)

    def _moved(
        self,
        prior: CachePrior,
        own: Sequence[int],
        scores: Sequence[float],
        shares: Sequence[float],
        here: Callable[[int], bool],
    ) -> list[int]:
        """One token's experts, counted where they are others than its `own`."""
        taken, moved = prior.choose(self._index, own, scores, shares, here)
        counts = self._context.scheduler.loader.counts
        counts.displaced += sum(expert != before for expert, before in zip(taken, own, strict=True))
        counts.moved_weight += moved
        return taken


class PredictedRouting:
    """The choices of MoE layer `index` in the pass that runs, where tokens go on with what was predicted."""

    def __init__(self, index: int, context: ForwardContext) -> None:
        self._index = index
        self._context = context

    def __call__(self, router: Router, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden (T, H) → weights (T, K) and experts (T, K): in decode, of the predicted experts those that the router
        scores highest, with its weights of them; its own where nothing was predicted, and for prompts."""
        weights, index = router.route(hidden)
        scheduler = self._context.scheduler
        predicted = scheduler.predicted(self._index) if self._context.phase == "decode" else []
        if not predicted:
            return weights, index
        scores, shares = router.scores(hidden)
        chosen = []
        for own, row in zip(index.tolist(), scores.tolist(), strict=True):
            chosen.append(as_predicted(own, sorted(predicted, key=row.__getitem__, reverse=True)))
            scheduler.loader.counts.displaced += len({*chosen[-1]}.difference(own))
        index = torch.tensor(chosen)
        return router.weights_of(shares, index).to(weights.dtype), index


def routes(context: ForwardContext, decoder: Any, layers: int) -> list[Route | None]:
    """What chooses the experts of each of a decoder's MoE layers; None: its router alone. ConfigError where scores
    are not known."""
    scheduler = context.scheduler
    moves = scheduler.moves_choices
    if not moves:
        return [None] * layers
    if not isinstance(decoder, Decoder) or not all(router.ranks for router in filter(None, decoder.routers)):
        raise ConfigError(
            f"{moves} needs the scores of all experts, which this model's decoder does not give; use --set "
            f"{INSTEAD[moves]}, or a preset without it"
        )
    kind = PredictedRouting if scheduler.substitutes else CachedRouting
    return [kind(index, context) for index in range(layers)]
