"""Which experts run: MoBiLE's little pass over half of them, and when it is enough."""

from __future__ import annotations

from collections.abc import Sequence


def half(k: int) -> int:
    """Experts of the little pass: K/2, rounded up (the rounding is ours)."""
    return (k + 1) // 2


def little(
    experts: Sequence[Sequence[int]], weights: Sequence[Sequence[float]], renormalise: bool
) -> tuple[list[list[int]], list[list[float]]]:
    """Of each token's K experts the K/2 with the largest weights, in the order given (ties: the earlier), with their
    weights. `renormalise`: scaled to the sum of all K, as a model does that normalises over the chosen."""
    kept_experts, kept_weights = [], []
    for chosen, gates in zip(experts, weights, strict=True):
        ranked = sorted(range(len(chosen)), key=lambda index: -gates[index])
        kept = sorted(ranked[: half(len(chosen))])
        remaining = sum(gates[index] for index in kept)
        scale = sum(gates) / remaining if renormalise and remaining else 1.0
        kept_experts.append([chosen[index] for index in kept])
        kept_weights.append([gates[index] * scale for index in kept])
    return kept_experts, kept_weights


def is_confident(probability: float, gamma: float) -> bool:
    """Whether the little pass's token is kept: its probability, the largest of the output softmax, is above gamma."""
    return probability > gamma


def speedup(t_little: float, t_big: float, fallback_ratio: float, t: float) -> float:
    """Expected speedup over passes of `t` seconds with all K: 1 / (T_little/T + r T_big/T) (MoBiLE, equation 1)."""
    return t / (t_little + fallback_ratio * t_big)
