"""Rerouting: other experts than the router's, or fewer. Choices move towards experts that are here (`CachedRouting`),
are replaced by what was predicted (`PredictedRouting`), or are few until the next token is unsure
(`ConfidentDecoding`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from tiermoe.engine.forward_context import INSTEAD, ForwardContext
from tiermoe.errors import ConfigError
from tiermoe.kernels import graphs
from tiermoe.model.decoder import Decoder
from tiermoe.model.routers import Router
from tiermoe.offload.policies.routing import CachePrior, as_predicted, is_confident

Chosen = tuple[torch.Tensor, torch.Tensor]
"""Weights (T, K) and experts (T, K) of a part."""
Route = Callable[[Router, Sequence[torch.Tensor]], list[Chosen]]
"""A layer's router and the parts of a step, hidden (T, H) each → what each runs."""


def route(router: Router, parts: Sequence[torch.Tensor]) -> list[Chosen]:
    """The weights and the experts, (T, K) each, that a router chooses for each part (T, H)."""
    return [graphs.launch((id(router), "route", at), router.route, each) for at, each in enumerate(parts)]


class _Own(NamedTuple):
    """A part's weights and experts by its router, in main memory."""

    weights: torch.Tensor
    experts: torch.Tensor
    scored: Callable[[], Sequence[torch.Tensor]]
    """Scores and shares there (`Router.scores`)."""


def _read_back(
    context: ForwardContext, layer: int, router: Router, parts: Sequence[torch.Tensor], routed: Sequence[Chosen]
) -> list[_Own]:
    """`routed`, what a router chose for the parts, and its scores. A GPU computes them whether or not they are asked
    for: with the choices they are one copy, and the host waits once."""
    if parts[0].device.type == "cpu":
        return [_Own(*chosen, partial(router.scores, each)) for each, chosen in zip(parts, routed, strict=True)]
    scored = [graphs.launch((id(router), "scores", at), router.scores, each) for at, each in enumerate(parts)]
    found = context.read_back(
        layer, [tensor for own, other in zip(routed, scored, strict=True) for tensor in (*own, *other)]
    )
    fours = (found[at : at + 4] for at in range(0, len(found), 4))
    return [_Own(weights, experts, partial(list, scored)) for weights, experts, *scored in fours]


class CachedRouting:
    """The choices of MoE layer `index` in the pass that runs."""

    def __init__(self, index: int, context: ForwardContext) -> None:
        self._index = index
        self._context = context

    def __call__(self, router: Router, parts: Sequence[torch.Tensor]) -> list[Chosen]:
        """The router's own where nothing is displaced, and for prompts; else its weights of the experts that run. In
        main memory where a choice could move."""
        routed, prior = route(router, parts), self._context.scheduler.prior
        if self._context.phase != "decode" or prior is None or self._index < prior.untouched:
            return routed
        return [self._part(router, prior, own) for own in _read_back(self._context, self._index, router, parts, routed)]

    def _part(self, router: Router, prior: CachePrior, part: _Own) -> Chosen:
        weights, index = part.weights, part.experts
        own = index.tolist()
        here = self._here(own, prior.always)
        if all(here(expert) for row in own for expert in row[prior.always :]):
            return weights, index
        scores, shares = part.scored()
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

    def __call__(self, router: Router, parts: Sequence[torch.Tensor]) -> list[Chosen]:
        """In decode, of the predicted experts those that the router scores highest, with its weights of them, in main
        memory; its own where nothing was predicted, and for prompts."""
        routed, scheduler = route(router, parts), self._context.scheduler
        predicted = scheduler.predicted(self._index) if self._context.phase == "decode" else []
        if not predicted:
            return routed
        return [
            self._part(router, predicted, own) for own in _read_back(self._context, self._index, router, parts, routed)
        ]

    def _part(self, router: Router, predicted: list[int], part: _Own) -> Chosen:
        scores, shares = part.scored()
        chosen = []
        for own, row in zip(part.experts.tolist(), scores.tolist(), strict=True):
            chosen.append(as_predicted(own, sorted(predicted, key=row.__getitem__, reverse=True)))
            self._context.scheduler.loader.counts.displaced += len({*chosen[-1]}.difference(own))
        index = torch.tensor(chosen)
        return router.weights_of(shares, index).to(part.weights.dtype), index


def routes(context: ForwardContext, decoder: Any, layers: int) -> list[Route | None]:
    """What chooses the experts of each of a decoder's MoE layers; None: its router alone, or a table. ConfigError if
    scores are not known."""
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
    return [None if index in decoder.tables else kind(index, context) for index in range(layers)]


Output = TypeVar("Output")


class ConfidentDecoding:
    """Runs decode passes little first (MoBiLE, section III-A). `passes`: tokens decoded; `fallbacks`: those that ran
    again. gamma: a row whose likeliest next token has at most this probability falls back; 1 always does, and without
    one (None) every token keeps its little pass."""

    def __init__(self, context: ForwardContext, gamma: float | None) -> None:
        self.passes = 0
        self.fallbacks = 0
        self._context = context
        self._gamma = gamma

    @property
    def fallback_ratio(self) -> float:
        """Share of the decoded tokens that ran again."""
        return self.fallbacks / self.passes if self.passes else 0.0

    @contextmanager
    def at(self, gamma: float) -> Iterator[ConfidentDecoding]:
        """Decodes with another gamma, and counts that alone, until it is left."""
        before = self._gamma, self.passes, self.fallbacks
        self._gamma, self.passes, self.fallbacks = gamma, 0, 0
        try:
            yield self
        finally:
            self._gamma, self.passes, self.fallbacks = before

    def decode(
        self,
        run: Callable[[], Output],
        logits_of: Callable[[Output], torch.Tensor],
        undo: Callable[[], None] = lambda: None,
    ) -> Output:
        """The output of a decode pass that has begun. run: computes it; logits_of: (rows, ..., vocabulary) of what it
        returns, the last ones of each row; undo: puts back what the pass changed besides the positions it writes."""
        context = self._context
        little = self._run(run, [])
        logits = logits_of(little)
        rows = logits.shape[0]
        self.passes += rows
        unsure = self._unsure(logits)
        if not unsure:
            context.forecasts.little.clear()
            return little
        self.fallbacks += len(unsure)
        undo()
        context.scheduler.discard_pass()
        context.scheduler.begin_pass(rows, context.forecasts, context.phase)
        again = self._run(run, unsure)
        context.forecasts.little.clear()
        sure = [row for row in range(rows) if row not in set(unsure)]
        logits_of(again)[sure] = logits[sure]
        return again

    def _run(self, run: Callable[[], Output], unsure: list[int]) -> Output:
        with self._context.halved(unsure):
            return run()

    def _unsure(self, logits: torch.Tensor) -> list[int]:
        if self._gamma is None:
            return []
        last = logits if logits.ndim == 2 else logits[:, -1]
        likeliest = last.float().softmax(-1).amax(-1).tolist()
        return [row for row, probability in enumerate(likeliest) if not is_confident(probability, self._gamma)]


class SavedCache:
    """The state of a transformers cache before a pass. Growing caches make new tensors, static ones write in place at a
    position that is written again: the references and counters are enough."""

    def __init__(self, cache: Any) -> None:
        if cache is None or not hasattr(cache, "layers"):
            raise ConfigError(
                f"routing=confident decodes a token twice and needs a key/value cache that can be put back, not "
                f"{type(cache).__name__}; use --set routing=all"
            )
        self._states = [
            (layer, {name: _kept(name, value) for name, value in vars(layer).items()}) for layer in cache.layers
        ]

    def restore(self) -> None:
        for layer, state in self._states:
            vars(layer).clear()
            vars(layer).update(state)


def _kept(name: str, value: Any) -> Any:
    """Counters that are tensors change in place; keys and values do not (or only where they are written again)."""
    counter = isinstance(value, torch.Tensor) and name not in ("keys", "values")
    return value.clone() if counter else value
