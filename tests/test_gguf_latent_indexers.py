"""GGUF files of GLM-5 and DeepSeek-V3.2: which layers have an indexer, and files that contradict themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFValue, GGUFValueType

import gguf_files
from gguf_engines import engine_of, logits_of
from gguf_files import kinds
from parity import close, tokens
from tiermoe.errors import ModelError
from tiermoe.model.hf.blueprint import inspect_model

FAMILIES = ("glm_moe_dsa", "deepseek_v32")
FULL, SHARED = "full", "shared"


def written(folder: Path, family: str, model: Any, **entries: Any) -> Path:
    own = {f"{gguf_files.called(family)}.{key}": value for key, value in entries.items()}
    return gguf_files.write(folder / "model.gguf", model, family, kinds("q8_0"), **own)


def types(*full: bool) -> GGUFValue:
    return GGUFValue(list(full), GGUFValueType.ARRAY, GGUFValueType.BOOL)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_is_transformers(family: str, tmp_path: Path) -> None:
    model = gguf_files.model_of(family)
    found = inspect_model(written(tmp_path, family, model), "model", tmp_path / "store").config
    for name in (
        "model_type", "index_n_heads", "index_head_dim", "index_topk", "mlp_layer_types", "layer_types", "n_group",
        "topk_group", "routed_scaling_factor", "norm_topk_prob", "rope_parameters", "q_lora_rank", "qk_nope_head_dim",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(model.config, name), name
    assert getattr(found, "indexer_types", None) == getattr(model.config, "indexer_types", None)


@pytest.mark.parametrize(
    ("context", "kinds_"),
    [
        (202_752, [FULL] * 8),  # GLM-5 and 5.1
        (1_048_576, [FULL, FULL, FULL, SHARED, SHARED, SHARED, FULL, SHARED]),  # GLM-5.2
    ],
)
def test_layers_of_files_that_do_not_say_which_have_an_indexer(context: int, kinds_: list[str], tmp_path: Path) -> None:
    """As they are published: by converters that did not write it."""
    model = gguf_files.model_of(
        "glm_moe_dsa", num_hidden_layers=8, indexer_types=kinds_, max_position_embeddings=context
    )
    file = written(tmp_path, "glm_moe_dsa", model, **{"attention.indexer.types": None})
    assert inspect_model(file, "model", tmp_path / "store").config.indexer_types == kinds_


def test_copies_of_an_indexer_in_layers_that_share_are_not_read(tmp_path: Path) -> None:
    """As published files of GLM-5.2 have them."""
    every = gguf_files.model_of("glm_moe_dsa", indexer_types=[FULL] * 3)
    file = written(tmp_path, "glm_moe_dsa", every, **{"attention.indexer.types": types(True, False, True)})
    model = gguf_files.model_of("glm_moe_dsa", indexer_types=[FULL, SHARED, FULL])
    model.load_state_dict({name: every.state_dict()[name] for name in model.state_dict()})
    assert len(model.state_dict()) == len(every.state_dict()) - 5
    ids = tokens(1, 40)[0].tolist()
    engine = engine_of(file, store=tmp_path / "store")
    found = logits_of(engine, ids)
    engine.close()
    with torch.no_grad():
        assert close(found, model(torch.tensor([ids])).logits[0])
        assert not close(found, every(torch.tensor([ids])).logits[0])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.indexer.top_k", None, r"says nothing of [\w-]+.attention.indexer.top_k; convert the model again"),
        ("attention.indexer.head_count", 0, "indexer.head_count is 0, which is not a whole number of at least 1"),
        ("attention.indexer.key_length", 8, r"indexer.\w+.weight has the shape .*, by the file's entries it has"),
        ("attention.q_lora_rank", None, r"says nothing of [\w-]+.attention.q_lora_rank"),
        ("expert_gating_func", 1, r"routers that score by function 1, not by sigmoid \(2\); download it again"),
    ],
)
def test_entries_that_no_model_has(family: str, key: str, value: int | None, message: str, tmp_path: Path) -> None:
    entry = None if value is None else GGUFValue(value, GGUFValueType.UINT32)
    file = written(tmp_path, family, gguf_files.model_of(family), **{key: entry})
    with pytest.raises(ModelError, match=message):
        inspect_model(file, "model", tmp_path / "store")


@pytest.mark.parametrize("value", [types(True, False), GGUFValue(1, GGUFValueType.UINT32)])
def test_types_of_fewer_layers(value: GGUFValue, tmp_path: Path) -> None:
    file = written(tmp_path, "glm_moe_dsa", gguf_files.model_of("glm_moe_dsa"), **{"attention.indexer.types": value})
    with pytest.raises(ModelError, match="does not say which of its 3 layers have an indexer; download it again"):
        inspect_model(file, "model", tmp_path / "store")


def test_a_layer_without_its_indexer(tmp_path: Path) -> None:
    """As files of converters that are older than the indexer in llama.cpp."""
    model = gguf_files.model_of("glm_moe_dsa", indexer_types=[FULL, SHARED, FULL])
    file = written(tmp_path, "glm_moe_dsa", model, **{"attention.indexer.types": types(True, True, True)})
    with pytest.raises(ModelError, match=r"has no tensor blk.1.indexer.proj.weight; convert the model again"):
        inspect_model(file, "model", tmp_path / "store")
