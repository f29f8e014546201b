"""GGUF files of GraniteMoE with sliding windows: layers without positions, and files that contradict themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValue, GGUFValueType

import gguf_files
from gguf_files import kinds
from tiermoe.errors import ModelError
from tiermoe.model.hf.blueprint import inspect_model

FAMILY = "granitemoe_swa"


def written(folder: Path, **entries: Any) -> Path:
    model = gguf_files.model_of(FAMILY)
    own = {f"granite_swa.{key}": value for key, value in entries.items()}
    return gguf_files.write(folder / "model.gguf", model, FAMILY, kinds("q8_0"), **own)


@pytest.mark.parametrize(
    ("pattern", "bases"),
    [
        (GGUFValue([True, False, True], GGUFValueType.ARRAY, GGUFValueType.BOOL), [1e4, 0, 1e4]),
        (None, [1e4, 1e4, 1e4]),  # llama.cpp rotates all of them
    ],
)
def test_layers_without_positions(pattern: GGUFValue | None, bases: list[float], tmp_path: Path) -> None:
    file = written(tmp_path, **{"attention.rope_pattern": pattern})
    assert inspect_model(file, "model", tmp_path / "store").config.layer_rope_theta == bases


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.rope_pattern", [True], "does not say which of its layers have a rotary embedding"),
        ("attention.sliding_window_pattern", None, "does not say which of its layers have a window"),
        ("attention.sliding_window", None, "says nothing of granite_swa.attention.sliding_window"),
        ("logit_scale", None, "says nothing of granite_swa.logit_scale"),
    ],
)
def test_entries_that_no_model_has(key: str, value: list[bool] | None, message: str, tmp_path: Path) -> None:
    entry = None if value is None else GGUFValue(value, GGUFValueType.ARRAY, GGUFValueType.BOOL)
    with pytest.raises(ModelError, match=message):
        inspect_model(written(tmp_path, **{key: entry}), "model", tmp_path / "store")
