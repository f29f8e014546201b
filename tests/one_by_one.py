"""What tokens get that are decoded one after the other, with nobody beside them."""

from __future__ import annotations

from typing import Any

import torch

from tiermoe.batch import Batch, decode, prompt


def alone(engine: Any, ids: list[int], read: int) -> torch.Tensor:
    """Logits (len(ids) - read, vocabulary) after each token beyond the first `read`, decoded one by one."""
    cache = engine.new_cache()
    slab = cache.open()
    engine.step(Batch((prompt(slab, ids[:read]),)), cache)
    return torch.cat([engine.step(Batch((decode(slab, at, ids[at]),)), cache) for at in range(read, len(ids))])
