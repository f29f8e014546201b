"""Engines of GGUF files for tests, and what transformers' model is asked for beside them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from parity import close
from tiermoe.batch import Batch, prompt
from tiermoe.config import settings
from tiermoe.engine.load import start
from tiermoe.model.hf.blueprint import inspect_model


def engine_of(file: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The engine of a file, computing in `dtype`."""
    asked = settings(threads=1, **options)
    blueprint = inspect_model(file, str(file), asked.store)
    if dtype != blueprint.dtype:
        blueprint = dataclasses.replace(blueprint, dtype=dtype, known=None)
    return start(blueprint, asked)


def logits_of(engine: Any, ids: list[int]) -> torch.Tensor:
    cache = engine.new_cache(1, len(ids))
    found: torch.Tensor = engine.step(Batch((prompt(cache.open(), ids),)), cache, every=True)
    return found


def logits_in(file: Path, ids: list[int], dtype: torch.dtype = torch.float32, **options: Any) -> torch.Tensor:
    """`logits_of` an engine that is closed again."""
    engine = engine_of(file, dtype, **options)
    found = logits_of(engine, ids)
    engine.close()
    return found


def eager(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return found


def agree(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether logits are the same but for rounding: of blocks' scales, and of products of blocks."""
    if mine.dtype == torch.float32:
        return bool((mine - theirs).abs().max() <= 1e-3 * theirs.abs().max())
    return close(mine, theirs)


def eager_greedy(model: Any, ids: list[int], count: int) -> list[int]:
    found, cache, given = [], None, ids
    with torch.no_grad():
        while len(found) < count:
            output = model(torch.tensor([given]), past_key_values=cache, use_cache=True)
            found.append(int(output.logits[0, -1].argmax()))
            cache, given = output.past_key_values, found[-1:]
    return found
