"""What predictions are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tiermoe.policy.prediction.paths import Paths

Future = Callable[[int], Sequence[int]]
"""Layer → the experts that it will choose in this pass (replay only)."""


class HashTable(Protocol):
    """The routing of one layer by the token alone."""

    def __getitem__(self, token_id: int, /) -> Sequence[int]:
        """The experts of a token."""


@dataclass(frozen=True, slots=True)
class PredictionContext:
    """What a prediction may be made from.

    `layers`: MoE layers of the model, the first `encoder_layers` of them in an encoder. `experts`, `top_k`: per layer.
    `paths`: of the calibration (`count_paths`). `frequencies`: (layer, expert) → share or number of the calibration's
    tokens. `hash_tables`: of the layers that are routed by the token. `future`: known in a replay alone."""

    layers: int
    experts: Sequence[int]
    top_k: Sequence[int]
    paths: Paths = field(default_factory=dict)
    frequencies: Mapping[tuple[int, int], float] = field(default_factory=dict)
    hash_tables: Mapping[int, HashTable] = field(default_factory=dict)
    future: Future | None = None
    encoder_layers: int = 0

    def most_frequent(self, layer: int) -> list[tuple[int, float]]:
        """Experts of `layer` that the calibration has seen, with their frequency, falling; ties: lower index first."""
        frequencies = ((expert, self.frequencies.get((layer, expert), 0.0)) for expert in range(self.experts[layer]))
        return sorted((seen for seen in frequencies if seen[1] > 0), key=lambda seen: -seen[1])
