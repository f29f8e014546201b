"""A sampling field."""

from __future__ import annotations

from torch import Tensor

from tiermoe.engine.sampling import Truncation


class EpsilonCutoff(Truncation):
    """Tokens of at least this probability, and the likeliest. Hewitt et al., "Truncation Sampling as Language Model
    Desmoothing", 2022."""

    off, least, largest = 0, 0, 1

    def kept(self, probabilities: Tensor, value: float, top_k: int) -> Tensor:
        likeliest = probabilities == probabilities.max()
        return probabilities.where(likeliest | (probabilities >= value), 0)
