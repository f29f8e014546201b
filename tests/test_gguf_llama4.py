"""GGUF files of Llama 4: what their configs are beside the entries, and files that contradict themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValue, GGUFValueType

import gguf_files
from gguf_files import kinds
from gguf_llama4 import LLAMA3
from tiermoe.errors import ModelError
from tiermoe.model.hf.blueprint import inspect_model


def written(folder: Path, changes: dict[str, Any], **entries: Any) -> tuple[Any, Path]:
    """transformers' config, and the file of a model with it."""
    model = gguf_files.model_of("llama4_text", **changes)
    return model.config, gguf_files.write(folder / "model.gguf", model, "llama4_text", kinds("q8_0"), **entries)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": LLAMA3},
        {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0, "factor": 8.0}, "head_dim": 64},
        {"num_local_experts": 128, "use_qk_norm": False},
    ],
)
def test_the_config_is_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    wanted, file = written(tmp_path, changes)
    found = inspect_model(file, "model", tmp_path / "store").config
    for name in (
        "rope_parameters", "attention_chunk_size", "attn_temperature_tuning", "floor_scale", "attn_scale",
        "no_rope_layers", "layer_types", "moe_layers", "use_qk_norm", "intermediate_size", "intermediate_size_mlp",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(wanted, name), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": 0.5}, "and Llama 4 those of waves over 8,192 positions by one number of at least 1"),
        ({"factor": 8.0, "original_max_position_embeddings": 512}, "divides the frequencies of its rotary embedding"),
    ],
)
def test_factors_that_no_llama_4_has(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, file = written(tmp_path, {"rope_parameters": {**LLAMA3, **changes}})
    with pytest.raises(ModelError, match=message):
        inspect_model(file, "model", tmp_path / "store")


def test_factors_of_another_head(tmp_path: Path) -> None:
    columns = GGUFValue(32, GGUFValueType.UINT32)
    _, file = written(tmp_path, {"rope_parameters": LLAMA3}, llama4__attention__key_length=columns)
    with pytest.raises(ModelError, match=r"rope_freqs.weight is F32 of shape \(8,\), not F32 of 16 factors"):
        inspect_model(file, "model", tmp_path / "store")


def test_a_model_without_chunks(tmp_path: Path) -> None:
    _, file = written(tmp_path, {}, llama4__attention__sliding_window=GGUFValue(0, GGUFValueType.UINT32))
    with pytest.raises(ModelError, match="has no chunks of positions"):
        inspect_model(file, "model", tmp_path / "store")
