"""GGUF files of Phi-MoE: what their configs are beside the entries, and files that contradict themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValue, GGUFValueType

import gguf_files
import gguf_metadata
import gguf_phimoe
from gguf_files import kinds
from test_gguf_models import LONG
from tiermoe.errors import ModelError
from tiermoe.model.hf.blueprint import inspect_model

UINT32 = GGUFValueType.UINT32


def written(folder: Path, changes: dict[str, Any], **entries: GGUFValue | None) -> tuple[Any, Path]:
    """transformers' config, and the file of a model with it."""
    model = gguf_files.model_of("phimoe", **changes)
    own = {f"phimoe.{key}": value for key, value in entries.items()}
    return model.config, gguf_files.write(folder / "model.gguf", model, "phimoe", kinds("q8_0"), **own)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": LONG, "attention_bias": True, "lm_head_bias": True, "sliding_window": 9},
        {"sliding_window": None},
    ],
)
def test_the_config_is_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    wanted, file = written(tmp_path, changes)
    found = inspect_model(file, "model", tmp_path / "store").config
    for name in (
        "sliding_window", "attention_bias", "lm_head_bias", "num_local_experts", "num_experts_per_tok",
        "intermediate_size", "rope_parameters",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(wanted, name), name


def test_a_token_uses_two_experts(tmp_path: Path) -> None:
    file = written(tmp_path, {}, expert_used_count=GGUFValue(3, UINT32))[1]
    with pytest.raises(ModelError, match="a token uses 3 experts, and Phi-MoE's routers choose 2; download it again"):
        inspect_model(file, "model", tmp_path / "store")


def test_factors_without_the_length_that_they_begin_at(tmp_path: Path) -> None:
    file = written(tmp_path, {"rope_parameters": LONG}, rope__scaling__original_context_length=None)[1]
    with pytest.raises(ModelError, match=r"says nothing of phimoe\.rope\.scaling\.original_context_length; convert"):
        inspect_model(file, "model", tmp_path / "store")


@pytest.mark.parametrize(
    ("reach", "count", "message"),
    [
        ("long", 8, r"has one of rope_factors_short.weight and rope_factors_long.weight, and Phi-MoE both or none"),
        ("short", 5, r"rope_factors_short.weight is F32 of shape \(5,\), not F32 of 8 factors; download it again"),
    ],
)
def test_factors_that_no_model_has(
    reach: str, count: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = gguf_phimoe.phimoe_metadata

    def with_factors(writer: Any, config: dict[str, Any]) -> None:
        own(writer, config)
        writer.add_tensor(f"rope_factors_{reach}.weight", np.ones(count, dtype=np.float32))

    monkeypatch.setitem(gguf_metadata.MORE, "phimoe", with_factors)
    with pytest.raises(ModelError, match=message):
        inspect_model(written(tmp_path, {})[1], "model", tmp_path / "store")
