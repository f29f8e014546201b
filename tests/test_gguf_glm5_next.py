"""GGUF files of GLM-5 Next: what their configs are beside the entries, and files that contradict themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValue, GGUFValueType

import gguf_files
from gguf_files import kinds
from tiermoe.errors import ModelError
from tiermoe.model.hf.blueprint import inspect_model

FAMILY = "glm5_next_text"
UINT32, FLOAT32, BOOLS = GGUFValueType.UINT32, GGUFValueType.FLOAT32, (GGUFValueType.ARRAY, GGUFValueType.BOOL)
CHANGES = {
    "linear_lower_bound": -2.5,
    "routed_scaling_factor": 1.7,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
    "indexer_types": ["full", "full", "shared"],
    "hc_eps": 1e-5,
}
FIELDS = (
    "layer_types", "mlp_layer_types", "indexer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim",
    "linear_lower_bound", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "index_n_heads", "index_head_dim", "index_topk", "index_kpool", "index_kpool_always_select_tail", "swiglu_limit",
    "hc_mult", "hc_sinkhorn_iters", "hc_eps", "routed_scaling_factor", "norm_topk_prob", "n_shared_experts",
)  # fmt: skip


def written(folder: Path, **entries: GGUFValue | None) -> tuple[Any, Path]:
    """transformers' config of the text part, and the file of a model with it."""
    model = gguf_files.model_of(FAMILY, **CHANGES)
    own = {f"glm5-next.{key}": value for key, value in entries.items()}
    return model.config.text_config, gguf_files.write(folder / "model.gguf", model, FAMILY, kinds("q8_0"), **own)


def test_the_config_is_transformers(tmp_path: Path) -> None:
    wanted, file = written(tmp_path)
    found = inspect_model(file, "model", tmp_path / "store").config
    for name in FIELDS:
        assert getattr(found, name) == getattr(wanted, name), name


@pytest.mark.parametrize(
    ("key", "field", "usual"),
    [
        ("kda.gate_lower_bound", "linear_lower_bound", None),
        ("attention.indexer.types", "indexer_types", ["full"] * 3),
        ("attention.indexer.kpool_select_tail", "index_kpool_always_select_tail", True),
    ],
)
def test_what_a_file_that_does_not_say_means(key: str, field: str, usual: Any, tmp_path: Path) -> None:
    """The converter leaves these out where the config has none, and llama.cpp's code says what then holds."""
    model = gguf_files.model_of(FAMILY, indexer_types=["full"] * 3, linear_lower_bound=None)
    file = gguf_files.write(tmp_path / "model.gguf", model, FAMILY, kinds("q8_0"), **{f"glm5-next.{key}": None})
    assert getattr(inspect_model(file, "model", tmp_path / "store").config, field) == usual


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "kda.gate_lower_bound",
            (2.0, FLOAT32),
            "kda.gate_lower_bound is 2.0, not a number below 0; download it again",
        ),
        ("attention.indexer.kpool", None, "says nothing of glm5-next.attention.indexer.kpool; convert the"),
        (
            "attention.indexer.kpool",
            (0, UINT32),
            "attention.indexer.kpool is 0, which is not a whole number of at least",
        ),
        ("attention.indexer.kpool", (4, UINT32), "index_kpool_compress_ape has the shape .*, by the file's entries"),
        ("attention.indexer.kpool", (3, UINT32), "index_topk .* must be divisible by index_kpool"),
        (
            "attention.indexer.types",
            ([True], *BOOLS),
            "does not say which of its 3 layers have an indexer; download it",
        ),
        ("expert_gating_func", (1, UINT32), "has no sigmoid router, which every GLM-5 Next has"),
        (
            "swiglu_clamp_exp",
            ([1.0, 2.0, 3.0], BOOLS[0], FLOAT32),
            "does not limit the gate of all experts by one number",
        ),
        ("hyper_connection.count", None, "says nothing of glm5-next.hyper_connection.count"),
        ("rope.dimension_count", (8, UINT32), "transformers .* refuses what .* NoPE"),
    ],
)
def test_entries_that_no_model_has(key: str, value: Any, message: str, tmp_path: Path) -> None:
    entry = None if value is None else GGUFValue(*value)
    with pytest.raises(ModelError, match=message):
        inspect_model(written(tmp_path, **{key: entry})[1], "model", tmp_path / "store")
