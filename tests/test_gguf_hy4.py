"""GGUF files of Hunyuan 4 that contradict themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFValue, GGUFValueType

import gguf_files
from gguf_files import kinds
from tiermoe.errors import ModelError
from tiermoe.model.hf.blueprint import inspect_model


def number(value: int) -> GGUFValue:
    return GGUFValue(value, GGUFValueType.UINT32)


def flags(*values: bool) -> GGUFValue:
    return GGUFValue(list(values), GGUFValueType.ARRAY, GGUFValueType.BOOL)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.indexer.types", None, "does not say which of its 3 layers have an indexer"),
        ("attention.indexer.types", flags(True, False), "does not say which of its 3 layers"),
        ("attention.indexer.types", flags(False, True, True), "has no indexer in its first layer, which every"),
        ("attention.indexer.key_length", number(24), "indexer.attn_q_b of 256 rows has no heads of 24, of which 8 are"),
        ("rope.dimension_count", number(7), "has no heads of 24, of which 7 are rotated"),
        ("swiglu_clamp_exp", None, "does not limit the gate of all experts by one number"),
        ("expert_gating_func", number(1), "routers that score by no sigmoid, which every Hunyuan 4 does"),
    ],
)
def test_entries_that_no_model_has(key: str, value: GGUFValue | None, message: str, tmp_path: Path) -> None:
    model = gguf_files.model_of("hy_v4")
    file = gguf_files.write(tmp_path / "model.gguf", model, "hy_v4", kinds("q8_0"), **{f"hy_v4.{key}": value})
    with pytest.raises(ModelError, match=message):
        inspect_model(file, "model", tmp_path / "store")
