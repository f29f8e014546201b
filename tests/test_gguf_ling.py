"""GGUF files of Ling 3.0: what their configs are beside the entries, and files of models that it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValue, GGUFValueType

import gguf_files
from gguf_files import kinds
from tiermoe.errors import ModelError
from tiermoe.model.hf.blueprint import inspect_model

FAMILY = "bailing_hybrid"
UINT32, FLOAT32, BOOL = GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.BOOL


def written(folder: Path, **entries: GGUFValue | None) -> tuple[Any, Path]:
    """transformers' config, and the file of a model with it."""
    model = gguf_files.model_of(FAMILY, kda_lower_bound=-3.3, routed_scaling_factor=1.7)
    own = {f"bailingmoe3.{key}": value for key, value in entries.items()}
    return model.config, gguf_files.write(folder / "model.gguf", model, FAMILY, kinds("q8_0"), **own)


def test_the_config_is_transformers(tmp_path: Path) -> None:
    wanted, file = written(tmp_path)
    found = inspect_model(file, "model", tmp_path / "store").config
    for name in (
        "layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim",
        "kda_safe_gate", "kda_lower_bound", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "num_local_experts", "n_shared_experts", "n_group", "topk_group", "moe_intermediate_size",
        "intermediate_size", "routed_scaling_factor", "norm_topk_prob", "rope_parameters",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(wanted, name), name


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kda.gate_lower_bound", None, "kda.gate_lower_bound is None, not a number below 0; download it again"),
        ("kda.gate_lower_bound", (5.0, FLOAT32), "kda.gate_lower_bound is 5.0, not a number below 0"),
        ("kda.safe_gate", (False, BOOL), "or no bound of its decays .*, and every Ling 3.0 has both; download it"),
        ("kda.head_dim", None, "says nothing of bailingmoe3.kda.head_dim; convert the"),
        ("kda.head_dim", (8, UINT32), "has the shape .*, by the file's entries it has"),
        ("expert_gating_func", (1, UINT32), r"has no sigmoid router \(expert_gating_func\)"),
        ("expert_gating_func", None, "says nothing of bailingmoe3.expert_gating_func"),
        ("attention.q_lora_rank", (8, UINT32), "leads to queries by two matrices .*; choose a file of another model"),
        ("rope.dimension_sections", (4, UINT32), "a model that reads pictures .*; choose a file of a model that reads"),
    ],
)
def test_entries_that_no_model_has(key: str, value: Any, message: str, tmp_path: Path) -> None:
    entry = None if value is None else GGUFValue(*value)
    with pytest.raises(ModelError, match=message):
        inspect_model(written(tmp_path, **{key: entry})[1], "model", tmp_path / "store")
