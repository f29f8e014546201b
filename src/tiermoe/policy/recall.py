"""How right a prediction is, and what guessing would reach."""

from __future__ import annotations

from collections.abc import Collection


def recall(named: Collection[int], chosen: Collection[int]) -> float:
    """Share (0 to 1) of the experts that the router chose that a prediction had named. ValueError where none was
    chosen."""
    if not chosen:
        raise ValueError("recall needs at least one chosen expert")
    named = set(named)
    return sum(expert in named for expert in chosen) / len(chosen)


def baseline_uniform(k: int, e: int) -> float:
    """Expected recall of K experts named at random of E."""
    return k / e
