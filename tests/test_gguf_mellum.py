"""GGUF files of Mellum 2: windows, rotary embeddings, and files that contradict themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValue, GGUFValueType

import gguf_files
from gguf_files import kinds
from tiermoe.errors import ModelError
from tiermoe.model.hf.blueprint import inspect_model

FAMILY = "mellum"
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
WINDOWED = {"rope_type": "default", "rope_theta": 1e4}


def written(folder: Path, full: dict[str, Any] = YARN, **entries: Any) -> tuple[Any, Path]:
    """transformers' config, and the file of a model with it. full: the rotary embedding of layers without a window."""
    rope = {"full_attention": full, "sliding_attention": WINDOWED}
    model = gguf_files.model_of(FAMILY, rope_parameters=rope)
    own = {f"{FAMILY}.{key}": value for key, value in entries.items()}
    return model.config, gguf_files.write(folder / "model.gguf", model, FAMILY, kinds("q8_0"), **own)


@pytest.mark.parametrize("factor", [{}, {"attention_factor": 1.5}])
def test_the_config_is_transformers(factor: dict[str, float], tmp_path: Path) -> None:
    wanted, file = written(tmp_path, YARN | factor)
    found = inspect_model(file, "model", tmp_path / "store").config
    for name in (
        "layer_types", "sliding_window", "rope_parameters", "num_experts", "num_experts_per_tok",
        "moe_intermediate_size", "norm_topk_prob", "head_dim", "tie_word_embeddings",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(wanted, name), name


def test_a_file_without_a_base_of_windows_has_the_other(tmp_path: Path) -> None:
    file = written(tmp_path, **{"rope.freq_base_swa": None})[1]
    rope = inspect_model(file, "model", tmp_path / "store").config.rope_parameters
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.sliding_window_pattern", None, "does not say which of its layers have a window"),
        ("expert_weights_scale", GGUFValue(2.0, GGUFValueType.FLOAT32), "scales its experts' weights by 2, which no"),
        ("rope.scaling.factor", None, "says nothing of mellum.rope.scaling.factor; convert the model again"),
    ],
)
def test_entries_that_no_model_has(key: str, value: GGUFValue | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        inspect_model(written(tmp_path, **{key: value})[1], "model", tmp_path / "store")
