"""GGUF files of Hunyuan 3: what their configs are beside the entries, and files that contradict themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValue, GGUFValueType

import gguf_files
from gguf_files import kinds
from tiermoe.errors import ModelError
from tiermoe.model.hf.blueprint import inspect_model

FAMILY = "hy_v3"


def written(folder: Path, changes: dict[str, Any] | None = None, **entries: Any) -> tuple[Any, Path]:
    """transformers' config, and the file of a model with it."""
    model = gguf_files.model_of(FAMILY, **(changes or {}))
    own = {f"{FAMILY}.{key}": value for key, value in entries.items()}
    return model.config, gguf_files.write(folder / "model.gguf", model, FAMILY, kinds("q8_0"), **own)


@pytest.mark.parametrize("gating", [True, False])
def test_the_config_is_transformers(gating: bool, tmp_path: Path) -> None:
    """llama.cpp, too, takes a file that says nothing of its routers' scores."""
    entries = {} if gating else {"expert_gating_func": None}
    layers = ["dense", "dense", "sparse"]
    wanted, file = written(tmp_path, {"num_shared_experts": 2, "mlp_layer_types": layers}, **entries)
    found = inspect_model(file, "model", tmp_path / "store").config
    for name in (
        "num_experts", "num_experts_per_tok", "num_shared_experts", "moe_intermediate_size", "intermediate_size",
        "mlp_layer_types", "router_scaling_factor", "attention_bias", "head_dim", "rope_parameters",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(wanted, name), name


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_gating_func", 1, "has no sigmoid router whose weights sum to 1, which every Hunyuan 3 has"),
        ("expert_weights_norm", None, "has no sigmoid router whose weights sum to 1"),
        ("expert_weights_scale", None, "says nothing of hy_v3.expert_weights_scale; convert the"),
    ],
)
def test_entries_that_no_model_has(key: str, value: int | None, message: str, tmp_path: Path) -> None:
    entry = None if value is None else GGUFValue(value, GGUFValueType.UINT32)
    with pytest.raises(ModelError, match=message):
        inspect_model(written(tmp_path, **{key: entry})[1], "model", tmp_path / "store")


def test_shared_experts_of_no_whole_number(tmp_path: Path) -> None:
    model = gguf_files.model_of(FAMILY)
    for layer in model.model.layers[1:]:
        shared = layer.mlp.shared_experts
        for name, size in (("gate_proj", (40, 64)), ("up_proj", (40, 64)), ("down_proj", (64, 40))):
            getattr(shared, name).weight.data = getattr(shared, name).weight.data.new_zeros(size)
    file = gguf_files.write(tmp_path / "model.gguf", model, FAMILY, kinds("q8_0"))
    with pytest.raises(ModelError, match="has 40 columns between the matrices of the shared experts and 32 between"):
        inspect_model(file, "model", tmp_path / "store")
