"""How tokens are chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tiermoe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; top_p, top_k (0: all tokens), min_p (share of the likeliest
    token's probability that a token must have) and seed matter above it. presence_penalty is taken from the logits of
    tokens that the answer has, frequency_penalty once for each time; logit_bias is added to a token's logit. Ends of an
    answer and the penalty for repetition are those of the model's generation_config.json."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max-tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise ConfigError(f"top-k must be 0 (all tokens) or more, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min-p must be from 0 to 1, got {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ConfigError(f"{name.replace('_', '-')} must be from -2 to 2, got {getattr(self, name)}")


def sampling_for(config: Any, named: Mapping[str, Any], otherwise: Sampling) -> Sampling:
    """How a model's tokens are chosen: as `named`, else as the model's generation config says where it samples at all,
    else as `otherwise`. config: transformers' GenerationConfig or None; named: fields of `Sampling`. ConfigError where
    a value that is named would do nothing."""
    said = otherwise
    if config is not None and config.do_sample:
        said = replace(  # what the file leaves out restricts nothing
            otherwise,
            temperature=1.0 if config.temperature is None else config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=0 if config.top_k is None else config.top_k,
        )
    sampling = replace(said, **named)
    idle = [name.replace("_", "-") for name in ("top_p", "top_k") if name in named]
    if idle and sampling.temperature == 0:
        raise ConfigError(
            f"{' and '.join(idle)} would do nothing: at temperature 0 the likeliest token is taken; name a temperature "
            f"above 0 beside it"
        )
    return sampling
