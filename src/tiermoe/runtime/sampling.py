"""How tokens are chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiermoe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; top_p, top_k (0: all tokens) and seed matter above it."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max-tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise ConfigError(f"top-k must be 0 (all tokens) or more, got {self.top_k}")
