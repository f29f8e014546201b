"""Which experts run: MoBiLE's little pass over half of them, and when it is enough."""

from __future__ import annotations

from collections.abc import Sequence


def little(weights: Sequence[float]) -> list[int]:
    """Of a token's K experts, the positions of the K/2 (rounded up, which is ours) that run in the little pass: those
    of the largest weights, of equals the earlier; in the order given."""
    ranked = sorted(range(len(weights)), key=lambda position: -weights[position])
    return sorted(ranked[: (len(weights) + 1) // 2])


def is_confident(probability: float, gamma: float) -> bool:
    """Whether the little pass's token is kept: its probability, the largest of the output softmax, is above gamma."""
    return probability > gamma


def speedup(t_little: float, t_big: float, fallback_ratio: float, t: float) -> float:
    """Expected speedup over passes of `t` seconds with all K: 1 / (T_little/T + r T_big/T) (MoBiLE, equation 1)."""
    return t / (t_little + fallback_ratio * t_big)
