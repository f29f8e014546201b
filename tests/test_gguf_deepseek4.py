"""GGUF files of DeepSeek-V4 that contradict themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValue, GGUFValueType

import gguf_files
from gguf_files import kinds
from tiermoe.errors import ModelError
from tiermoe.model.hf.blueprint import inspect_model


def array(values: list[Any], of: GGUFValueType) -> GGUFValue:
    return GGUFValue(values, GGUFValueType.ARRAY, of)


WHOLE, DECIMAL = GGUFValueType.INT32, GGUFValueType.FLOAT32


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.compress_ratios", array([8], WHOLE), "does not say how many positions each of 3 layers compresses"),
        ("attention.compress_ratios", array([8, -4, 0], WHOLE), "does not say how many positions"),
        ("attention.compress_ratios", array([8, 16, 0], WHOLE), "compresses 8 or 16 positions into an entry"),
        ("swiglu_clamp_exp", array([0.5, 0.5, 1.0], DECIMAL), "does not limit the gate of all experts by one number"),
        ("expert_gating_func", GGUFValue(1, GGUFValueType.UINT32), "score by function 1, which no DeepSeek-V4 does"),
        ("hyper_connection.count", GGUFValue(0, GGUFValueType.UINT32), "a whole number of at least 1"),
    ],
)
def test_entries_that_no_model_has(key: str, value: GGUFValue, message: str, tmp_path: Path) -> None:
    model = gguf_files.model_of("deepseek_v4")
    file = gguf_files.write(tmp_path / "model.gguf", model, "deepseek_v4", kinds("q8_0"), **{f"deepseek4.{key}": value})
    with pytest.raises(ModelError, match=message):
        inspect_model(file, "model", tmp_path / "store")


def test_only_tables_are_whole_numbers(tmp_path: Path) -> None:
    model = gguf_files.model_of("qwen3_moe")
    file = gguf_files.write(tmp_path / "model.gguf", model, "qwen3_moe", lambda _: "i32")
    with pytest.raises(ModelError, match="is stored as I32, in which only tables of experts are"):
        inspect_model(file, "model", tmp_path / "store")
