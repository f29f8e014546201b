"""Which experts run, and where: MoBiLE's little pass and when it is enough, AdapMoE's adaptive gating, Cache-Prior's
choices moved towards cached experts, and which of a layer's misses the CPU computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tiermoe.errors import ConfigError


def little_k(k: int, count: int | None = None) -> int:
    """How many of a token's k experts run in the little pass: `count`, at most all; None: K/2, rounded up (ours)."""
    return (k + 1) // 2 if count is None else min(count, k)


def little(weights: Sequence[float], count: int | None = None) -> list[int]:
    """Positions of the `little_k` experts of a token's K that run in the little pass: those of the largest weights, of
    equals the earlier. In the order given."""
    ranked = sorted(range(len(weights)), key=lambda position: -weights[position])
    return sorted(ranked[: little_k(len(weights), count)])


def require_little(routing: str, count: int | None, top_k: Sequence[int]) -> None:
    """ConfigError if a little pass of `count` experts (`little_k`) would leave no expert of any layer out. top_k:
    per layer."""
    if max(top_k) < 2:
        raise ConfigError(
            f"routing={routing} runs some of a token's experts, this model uses one; "
            f"use another preset or --set routing=all"
        )
    if count is not None and count >= max(top_k):
        raise ConfigError(f"little={count} leaves no expert out: this model uses {max(top_k)} for a token; name fewer")


@dataclass(frozen=True, slots=True)
class AdaptiveGating:
    """Fewer experts for tokens that hardly need the last ones (AdapMoE): those of the largest weights run, the fewest
    for which the share of the token's gate weight that is left out, times the layer's sensitivity, is at most
    `threshold`. For K = 2 this is the paper's rule, with sqrt(T) and the root of a layer's sensitivity: it leaves the
    second expert out if (1 - alpha)^2 times the sensitivity is at most T. sensitivity: of each MoE layer, or one of
    all."""

    threshold: float
    sensitivity: float | tuple[float, ...]

    def kept(self, layer: int, weights: Sequence[float]) -> list[int]:
        """Positions of the experts of a token that run, in the order given; of equal weights the earlier."""
        of_layer = self.sensitivity[layer] if isinstance(self.sensitivity, tuple) else self.sensitivity
        most = self.threshold * math.fsum(weights)
        ranked = sorted(range(len(weights)), key=lambda position: -weights[position])
        left = 0.0
        while len(ranked) > 1 and (left := left + weights[ranked[-1]]) * of_layer <= most:
            ranked.pop()
        return sorted(ranked)


def require_adaptive(gating: AdaptiveGating, top_k: Sequence[int]) -> None:
    """ConfigError if there is nothing to leave out, or a sensitivity for another number of layers. top_k: per layer."""
    if max(top_k) < 2:
        raise ConfigError(
            "routing=adaptive leaves out some of a token's experts, this model uses one; use another preset or "
            "--set routing=all"
        )
    if isinstance(gating.sensitivity, tuple) and len(gating.sensitivity) != len(top_k):
        raise ConfigError(
            f"sensitivity has {len(gating.sensitivity)} numbers and the model {len(top_k)} MoE layers; give one for "
            f"each, or one for all"
        )


def is_confident(probability: float, gamma: float) -> bool:
    """Whether the little pass's token is kept: its probability, the largest of the output softmax, is above gamma."""
    return probability > gamma


def speedup(t_little: float, t_big: float, fallback_ratio: float, t: float) -> float:
    """Expected speedup over passes of `t` seconds with all K: 1 / (T_little/T + r T_big/T) (MoBiLE, equation 1)."""
    return t / (t_little + fallback_ratio * t_big)


def as_predicted(own: Sequence[int], predicted: Sequence[int]) -> list[int]:
    """The experts of a token that goes on with the prediction (CORM, section 4.2): its `own` that were `predicted`,
    then the first others of those, as many as it uses; if they are too few, the first of its own. Own ones have the
    router's largest scores, so these are the K that it scores highest if `predicted` has them in that order."""
    kept = [expert for expert in own if expert in predicted]
    others = [expert for expert in predicted if expert not in own]
    rest = [expert for expert in own if expert not in predicted]
    return [*kept, *others, *rest][: len(own)]


@dataclass(slots=True)
class CachePrior:
    """Moves the choices of decoded tokens towards cached experts (Cache-Prior, arXiv 2412.00099, section 3): the score
    of each cached expert gains `strength` times the mean spread of the layer's scores before the K best are taken. A
    spread is the largest less the smallest score of a token; the mean is over the tokens so far that lacked experts."""

    strength: float
    always: int  # so many of a token's first experts stay, whatever is cached
    untouched: int = 0  # in so many first MoE layers, where a choice weighs most, all experts stay (ours)
    most_moved: float = 1.0  # share of a token's gate weight that may be moved; a move beyond it is not made (ours)
    _spreads: dict[int, tuple[int, float]] = field(default_factory=dict)  # layer → tokens, mean

    def choose(
        self,
        layer: int,
        chosen: Sequence[int],
        scores: Sequence[float],
        weights: Sequence[float],
        cached: Callable[[int], bool],
    ) -> tuple[list[int], float]:
        """A token's experts instead of `chosen`, the router's K by falling score, each in the place of the expert that
        it displaces; and the share of the token's gate weight that is moved. scores: of all experts, minus infinity for
        those that cannot be chosen. weights: gate weights of all experts before they are scaled to a sum."""
        taken = list(chosen)
        if layer < self.untouched:
            return taken, 0.0
        absent = [place for place in range(len(taken) - 1, self.always - 1, -1) if not cached(taken[place])]
        if not absent:
            return taken, 0.0
        bonus = self.strength * self._spread(layer, scores)
        least, own = scores[taken[absent[0]]] - bonus, set(chosen)
        others = [
            expert for expert, score in enumerate(scores) if score > least and expert not in own and cached(expert)
        ]
        others.sort(key=lambda expert: -scores[expert])
        total, moved = math.fsum(weights[expert] for expert in chosen), 0.0
        for place, other in zip(absent, others, strict=False):
            share = (weights[taken[place]] - weights[other]) / total if total else 0.0
            if scores[other] + bonus <= scores[taken[place]] or moved + share > self.most_moved:
                break
            taken[place] = other
            moved += share
        return taken, moved

    def _spread(self, layer: int, scores: Sequence[float]) -> float:
        """The layer's mean spread, this token's included."""
        tokens, mean = self._spreads.get(layer, (0, 0.0))
        spread = max(scores) - min(score for score in scores if score > -math.inf)
        tokens += 1
        mean += (spread - mean) / tokens
        self._spreads[layer] = tokens, mean
        return mean


_NEWEST = 0.1  # weight of the newest time in an average


class MissCosts(NamedTuple):
    """Seconds of one missing expert, as measured so far; None: not yet."""

    load_s: float | None  # loaded over the link
    cpu_s: float | None  # computed on the CPU


def averaged(average: float | None, seconds: float) -> float:
    """The average with one more time, in which the last ten or so count. average: None before the first time."""
    return seconds if average is None else average + (seconds - average) * _NEWEST


def misses_on_cpu(misses: int, costs: MissCosts) -> int:
    """How many of `misses` experts the CPU computes, so that both ways, side by side, end soonest; of equal numbers
    the least. A way that has not been measured gets one expert."""
    load_s, cpu_s = costs
    if cpu_s is None:
        return min(misses, 1)
    if load_s is None:
        return max(0, misses - 1)
    return min(range(misses + 1), key=lambda on_cpu: max((misses - on_cpu) * load_s, on_cpu * cpu_s))
