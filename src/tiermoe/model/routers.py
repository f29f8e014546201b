"""Routers: which experts a token uses, and with which weights. A rule a family; all are a matrix and a choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.kernels import router as native

Routing = tuple[Tensor, Tensor, Tensor]
"""logits (T, E), weights (T, K) and experts (T, K) of T tokens."""

_SCORINGS = {
    "softmax": native.Scoring.SOFTMAX, "chosen": native.Scoring.CHOSEN, "sigmoid": native.Scoring.SIGMOID,
    "sqrtsoftplus": native.Scoring.SQRT_SOFTPLUS,
}  # fmt: skip
_ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda logits: logits.float().sigmoid(),
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt().float(),
}
"""Scorings by which a logit's score, float32, depends on no other logit."""


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How a router's logits become a choice of experts and their weights."""

    top_k: int  # experts that a token uses
    scores: str = "softmax"
    """'softmax' over all experts, 'chosen' (softmax over the chosen experts alone), 'sigmoid', 'sqrtsoftplus' (the root
    of softplus: DeepSeek-V4), or 'sparsemixer' (two experts, each with its share among the experts close to it:
    Phi-MoE)."""
    normalise: bool = False  # a token's weights sum to 1
    epsilon: float = 0.0  # is added to the sum that they are divided by
    wide: bool = False  # logits are float32
    rounded: bool = True  # weights are in the model's dtype, not float32
    groups: int = 1  # of the experts, of which a token can choose from
    kept_groups: int = 1  # so many, by the sum of a group's two best scores
    best_of_group: bool = False  # by a group's best score
    corrects_logits: bool = False  # the correction is added to logits, not to scores (Kolibri)
    scale: float = 1.0  # of the weights
    jitter: float = 0.0  # sparsemixer's distance


def _check_groups(rule: RouterRule, experts: int) -> None:
    groups, kept = rule.groups, rule.kept_groups
    size = experts // groups if groups > 0 and experts % groups == 0 else 0
    judged = 1 if groups == 1 or rule.best_of_group else 2
    if not (1 <= kept <= groups and size >= judged and 1 <= rule.top_k <= kept * size):
        raise ModelError(
            f"no router chooses {rule.top_k} of {experts} experts from {kept} of {groups} groups; the model's config "
            f"is damaged: download it again"
        )


class Router:
    """A matrix and a rule. batch_invariant: what a token gets does not depend on the other tokens of a call: its logits
    are the native kernels'.

    weight (E, H), bias (E) of the logits, correction (E) of the scores by which experts are chosen; None: without.
    prepared: hidden states → the router's input; expert_scale (E): of the weights of each expert (Gemma 4).
    native: the router for the native kernels; None if they do not take it.
    ModelError if there are too few experts, or groups of them, for the rule."""

    def __init__(
        self,
        weight: Tensor,
        rule: RouterRule,
        bias: Tensor | None = None,
        correction: Tensor | None = None,
        prepared: Callable[[Tensor], Tensor] | None = None,
        expert_scale: Tensor | None = None,
    ) -> None:
        self.weight, self.rule, self.bias, self.correction = weight, rule, bias, correction
        _check_groups(rule, weight.shape[0])
        self._prepared, self._expert_scale = prepared, expert_scale
        self._form = self._native_form()
        self.native = self._form if prepared is None and expert_scale is None else None
        self._by_kernel = native.takes(weight) and bias is None and not rule.wide  # logits alone
        self.batch_invariant = self._form is not None or (self._by_kernel and rule.scores == "sparsemixer")

    @property
    def top_k(self) -> int:
        return self.rule.top_k

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden (T, H) → weights (T, K) and experts (T, K)."""
        hidden = self._input(hidden)
        if self._form is not None and hidden.dtype == torch.bfloat16:
            weights, experts = native.route(self._form, hidden.contiguous())
            return self._scaled(weights, experts), experts
        weights, experts = self._choose(self._logits(hidden))
        if self.rule.scale != 1:
            weights = weights * self.rule.scale
        return self._scaled(weights.to(hidden.dtype) if self.rule.rounded else weights, experts), experts

    def __call__(self, hidden: Tensor) -> Routing:
        """logits, weights and experts, as transformers' routers give them."""
        return self._logits(self._input(hidden)), *self.route(hidden)

    @property
    def ranks(self) -> bool:
        """Whether one score each decides between experts, so that `scores` has an answer: not in sparsemixer."""
        return self.rule.scores != "sparsemixer"

    def scores(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden (T, H) → the scores by which experts are ranked, minus infinity for experts that cannot be chosen, and
        their gate weights before they are scaled to a sum: float32 (T, E) each."""
        logits = self._logits(self._input(hidden))
        shares = self._shares(logits)
        ranked = self._corrected(logits, shares)
        if self.rule.groups > 1:
            ranked = self._within_groups(ranked, float("-inf"))
        if self.rule.scores not in _ALONE and self.correction is None:  # the same order, spread as the router has it
            ranked = logits.float().masked_fill(ranked.isneginf(), float("-inf"))
        return ranked, shares

    def weights_of(self, shares: Tensor, experts: Tensor) -> Tensor:
        """The weights (T, K) of experts (T, K), whoever has chosen them; shares: as `scores` gives them."""
        weights = shares.gather(1, experts)
        if self.rule.normalise or self.rule.scores == "chosen":
            weights = weights / (weights.sum(dim=-1, keepdim=True) + max(1e-20, self.rule.epsilon))
        return self._scaled(weights * self.rule.scale, experts)

    def weigh(self, hidden: Tensor, experts: Tensor) -> Tensor:
        """The weights (T, K) of experts (T, K) for hidden (T, H), whoever has chosen them."""
        weights = self.weights_of(self.scores(hidden)[1], experts)
        return weights.to(hidden.dtype) if self.rule.rounded else weights

    def _input(self, hidden: Tensor) -> Tensor:
        return hidden if self._prepared is None else self._prepared(hidden)

    def _scaled(self, weights: Tensor, experts: Tensor) -> Tensor:
        return weights if self._expert_scale is None else weights * self._expert_scale[experts]

    def _native_form(self) -> native.Router | None:
        rule = self.rule
        if rule.scores not in _SCORINGS:
            return None
        wide = self.weight.dtype == torch.float32 and rule.wide and self.weight.device.type == "cpu"
        form = native.Router(
            native.in_parts(self.weight) if wide else self.weight,
            rule.top_k,
            _SCORINGS[rule.scores],
            bias=self.bias,
            correction=None if self.correction is None else self.correction.float(),
            corrects_logits=rule.corrects_logits,
            groups=rule.groups,
            kept=rule.kept_groups,
            judges=1 if rule.best_of_group else 2,
            exact_logits=rule.wide,
            normalise=rule.normalise,
            epsilon=rule.epsilon,
            scale=rule.scale,
            dtype=torch.bfloat16 if rule.rounded else torch.float32,
        )
        return form if form.suits() else None

    def _logits(self, hidden: Tensor) -> Tensor:
        if self._by_kernel and hidden.dtype == torch.bfloat16:
            return native.products_of(self.weight, hidden.contiguous()).to(hidden.dtype)
        if self.rule.wide:
            return F.linear(hidden.float(), self.weight.float(), None if self.bias is None else self.bias.float())
        return F.linear(hidden, self.weight, self.bias)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rule = self.rule
        if rule.scores == "sparsemixer":
            return _sparsemixer(logits, rule.jitter)
        if rule.scores == "chosen":
            best, experts = torch.topk(logits, rule.top_k, dim=-1)
            return torch.softmax(best, dim=-1), experts
        scores = self._shares(logits)
        ranked = self._corrected(logits, scores)
        if rule.scores in _ALONE and self.correction is None and rule.groups == 1:
            ranked = logits  # in the same order, and apart where scores round to 1
        if rule.groups > 1:
            ranked = self._within_groups(ranked, 0.0 if rule.best_of_group else float("-inf"))
        experts = torch.topk(ranked, rule.top_k, dim=-1)[1]
        weights = scores.gather(1, experts)
        if rule.normalise:
            total = weights.sum(dim=-1, keepdim=True)
            weights = weights / (total + rule.epsilon if rule.epsilon else total)
        return weights, experts

    def _shares(self, logits: Tensor) -> Tensor:
        """The scores of logits (T, E), float32."""
        alone = _ALONE.get(self.rule.scores)
        return torch.softmax(logits, -1, dtype=torch.float) if alone is None else alone(logits)

    def _corrected(self, logits: Tensor, scores: Tensor) -> Tensor:
        """What experts are ranked by, (T, E)."""
        if self.correction is None:
            return scores
        return (logits.float() if self.rule.corrects_logits else scores) + self.correction

    def _within_groups(self, ranked: Tensor, out_of_reach: float) -> Tensor:
        """Scores (T, E) with `out_of_reach` for those outside of the kept groups."""
        rule = self.rule
        grouped = ranked.view(-1, rule.groups, ranked.shape[-1] // rule.groups)
        best = grouped.amax(-1) if rule.best_of_group else grouped.topk(2, dim=-1)[0].sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, best.topk(rule.kept_groups, dim=-1)[1], True)
        return grouped.masked_fill(~kept[..., None], out_of_reach).view_as(ranked)


def _sparsemixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Phi-MoE's choice of two experts: each with its share among the experts close to it, the first left out for the
    second."""
    weights, experts, left = [], [], logits
    for _ in range(2):
        best, chosen = left.max(dim=-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * jitter
        weights.append(torch.softmax(left.masked_fill(far, float("-inf")), dim=-1).gather(-1, chosen))
        experts.append(chosen)
        left = left.scatter(-1, chosen, float("-inf"))
    return torch.cat(weights, -1), torch.cat(experts, -1)
