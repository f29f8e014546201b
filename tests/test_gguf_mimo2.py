"""GGUF files of MiMo-V2-Flash: the window that is published, and files that contradict themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValue, GGUFValueType
from transformers import AutoConfig

import gguf_files
from gguf_files import kinds
from tiermoe.errors import ModelError
from tiermoe.model.hf.blueprint import inspect_model


def written(folder: Path, **entries: Any) -> Path:
    model = gguf_files.model_of("mimo_v2_flash")
    own = {f"mimo2__{key}": value for key, value in entries.items()}
    return gguf_files.write(folder / "model.gguf", model, "mimo_v2_flash", kinds("q8_0"), **own)


def whole(value: int) -> GGUFValue:
    return GGUFValue(value, GGUFValueType.UINT32)


def array(values: list[int]) -> GGUFValue:
    return GGUFValue(values, GGUFValueType.ARRAY, GGUFValueType.INT32)


def test_the_window_is_the_published_one(tmp_path: Path) -> None:
    """The converter copies the published number; transformers makes its own of it."""
    published = AutoConfig.for_model("mimo_v2_flash", sliding_window=128, sliding_window_size=128)
    file = written(tmp_path, attention__sliding_window=whole(128))
    assert inspect_model(file, "model", tmp_path / "store").config.sliding_window == published.sliding_window == 129


def test_the_rotary_embeddings_of_both_kinds_of_layers(tmp_path: Path) -> None:
    config = inspect_model(written(tmp_path), "model", tmp_path / "store").config
    wanted = gguf_files.model_of("mimo_v2_flash").config.rope_parameters
    for kind, rope in config.rope_parameters.items():
        assert rope["rope_theta"] == wanted[kind]["rope_theta"]
        rotated = [int(config.head_dim * each["partial_rotary_factor"]) for each in (rope, wanted[kind])]
        assert rotated[0] == rotated[1] < config.head_dim


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention__head_count_kv", array([1, 4, 1]), r"has \[4\] heads of keys in layers with a window and \[1\] in"),
        ("attention__head_count_kv", array([1, 2]), r"MiMo-V2-Flash twice as many as in others"),
        ("attention__head_count_kv", whole(2), r"has \[2\] heads of keys in layers with a window and \[2\] in others"),
        ("attention__sliding_window_pattern", array([0, 1]), "does not say which of its layers have a window"),
        ("attention__value_scale", None, "says nothing of mimo2.attention.value_scale; convert the model again"),
        ("attention__value_length", whole(15), "attn_qkv has 176 rows, which are not 96 of queries and some heads"),
        ("rope__scaling__type", GGUFValue("linear", GGUFValueType.STRING), "scales its rotary embedding"),
    ],
)
def test_entries_that_no_model_has(key: str, value: GGUFValue | None, message: str, tmp_path: Path) -> None:
    factor = GGUFValue(2.0, GGUFValueType.FLOAT32)
    with pytest.raises(ModelError, match=message):
        inspect_model(written(tmp_path, **{key: value}, rope__scaling__factor=factor), "model", tmp_path / "store")
