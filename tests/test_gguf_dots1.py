"""GGUF files of dots.llm1: what their configs are beside the entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValue, GGUFValueType

import gguf_files
from gguf_files import kinds
from tiermoe.errors import ModelError
from tiermoe.model.hf.blueprint import inspect_model

GATING = "dots1.expert_gating_func"


def written(folder: Path, **entries: GGUFValue | None) -> tuple[Any, Path]:
    """transformers' config, and the file of a model with it."""
    model = gguf_files.model_of("dots1", routed_scaling_factor=1.7, n_shared_experts=2)
    return model.config, gguf_files.write(folder / "model.gguf", model, "dots1", kinds("q8_0"), **entries)


@pytest.mark.parametrize("entries", [{}, {GATING: None}])
def test_the_config_is_transformers(entries: dict[str, None], tmp_path: Path) -> None:
    """Older files say nothing of how routers score."""
    wanted, file = written(tmp_path, **entries)
    found = inspect_model(file, "model", tmp_path / "store").config
    for name in (
        "layer_types", "sliding_window", "first_k_dense_replace", "n_routed_experts", "n_shared_experts", "n_group",
        "topk_group", "moe_intermediate_size", "intermediate_size", "routed_scaling_factor", "norm_topk_prob",
        "attention_bias",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(wanted, name), name


def test_a_softmax_router_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, **{GATING: GGUFValue(1, GGUFValueType.UINT32)})[1]
    with pytest.raises(ModelError, match=r"has no sigmoid router, which every dots\.llm1 has; download it again"):
        inspect_model(file, "model", tmp_path / "store")
