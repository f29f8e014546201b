"""Models in GGUF files run where they lie: logits and tokens are those of transformers' eager model with the weights
that the gguf package dequantises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gguf_files
from gguf_engines import eager_greedy, engine_of, greedy, logits_of
from gguf_files import kinds
from parity import tokens

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
