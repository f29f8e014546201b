"""Models in GGUF files run where they lie: logits and tokens are those of transformers' eager model with the weights
that the gguf package dequantises."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import gguf_files
from gguf_files import kinds
from parity import tokens
from tiermoe.batch import Batch, prompt
from tiermoe.config import settings
from tiermoe.engine.load import start
from tiermoe.generation.sequence import Sequence
from tiermoe.model.blueprint import inspect_model

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
        "beta_slow": 1.0, "factor": 4.0}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "gpt_oss": ("gpt_oss", {"rope_parameters": {**YARN, "truncate": False}}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
}


def engine_of(file: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The engine of a file, computing in `dtype`."""
    asked = settings(threads=1, **options)
    blueprint = inspect_model(file, str(file), asked.store)
    if dtype != blueprint.dtype:
        blueprint = dataclasses.replace(blueprint, dtype=dtype, known=None)
    return start(blueprint, asked)


def logits_of(engine: Any, ids: list[int]) -> torch.Tensor:
    cache = engine.steps.new_cache(1, len(ids))
    found: torch.Tensor = engine.step(Batch((prompt(cache.open(), ids),)), cache, every=True)
    return found


def greedy(engine: Any, ids: list[int], count: int) -> list[int]:
    sequence = Sequence(engine, engine.steps.new_cache(1, len(ids) + count))
    found = [int(sequence.read(ids).argmax())]
    while len(found) < count:
        found.append(int(sequence.add(found[-1]).argmax()))
    return found


def eager_greedy(model: Any, ids: list[int], count: int) -> list[int]:
    found, cache, given = [], None, ids
    with torch.no_grad():
        while len(found) < count:
            output = model(torch.tensor([given]), past_key_values=cache, use_cache=True)
            found.append(int(output.logits[0, -1].argmax()))
            cache, given = output.past_key_values, found[-1:]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_tokens_are_those_of_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    model = gguf_files.model_of(family, **changes)
    file = gguf_files.write(tmp_path / "model.gguf", model, family, kinds("q8_0", "q5_0", "q4_0"))
    engine = engine_of(file, store=tmp_path / "store")
    ids = tokens(1, 40)[0].tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    found = logits_of(engine, ids)
    assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max()
    assert greedy(engine, ids[:16], 64) == eager_greedy(model, ids[:16], 64)
    engine.close()
