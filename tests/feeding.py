"""Tokens fed to an engine."""

from __future__ import annotations

from typing import Any

import torch

from tiermoe.batch import Batch, decode, prompt


def logits_of_steps(engine: Any, ids: list[int], first: int) -> torch.Tensor:
    """Logits (1 + len(ids) - first, vocabulary) of a prompt of the first tokens, then of each of the others alone."""
    cache = engine.new_cache()
    slab = cache.open()
    steps = [engine.step(Batch((prompt(slab, ids[:first]),)), cache)]
    steps += [engine.step(Batch((decode(slab, at, ids[at]),)), cache) for at in range(first, len(ids))]
    return torch.cat(steps)
