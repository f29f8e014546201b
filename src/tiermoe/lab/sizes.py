"""Sizes of the models that papers run, in weights: replays take them, and rates of the papers' machines follow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one model."""

    expert: float
    dense: float  # of a MoE layer and what runs beside it for each token


MIXTRAL, DEEPSEEK_MOE = Sizes(176.2e6, 41.9e6), Sizes(8.65e6, 34.1e6)
QWEN_MOE, ST_BASE_8 = Sizes(8.65e6, 51.4e6), Sizes(4.72e6, 15.9e6)
"""Mixtral 8x7B, DeepSeekMoE 16B, Qwen1.5-MoE and ST-base-8. Shared experts are among what runs for each token; so is,
in ST-base-8, a sixth of the other layers and of the vocabulary."""
