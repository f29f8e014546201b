"""GGUF files of MiniMax-M3: what their configs are beside the entries, and files that contradict themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import GGUFValue, GGUFValueType
from transformers import AutoConfig

import gguf_files
from gguf_files import kinds
from tiermoe.errors import ModelError
from tiermoe.model.hf.blueprint import inspect_model

FAMILY = "minimax_m3_vl_text"


def written(folder: Path, **entries: Any) -> tuple[Any, Path]:
    """transformers' config, and the file of a model with it."""
    model = gguf_files.model_of(FAMILY)
    own = {f"minimax-m3.{key}": value for key, value in entries.items()}
    return model.config, gguf_files.write(folder / "model.gguf", model, FAMILY, kinds("q8_0"), **own)


def without(file: Path, name: str) -> Path:
    """A file without one of its tensors."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(file.with_name("less.gguf"), "minimax-m3")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            of = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], of)
    for tensor in reader.tensors:
        if tensor.name != name:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.with_name("less.gguf")


def test_the_config_is_transformers(tmp_path: Path) -> None:
    wanted, file = written(tmp_path)
    found = inspect_model(file, "model", tmp_path / "store").config
    for name in (
        "layer_types", "mlp_layer_types", "index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks",
        "index_local_blocks", "intermediate_size", "dense_intermediate_size", "shared_intermediate_size",
        "routed_scaling_factor", "rope_parameters",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(wanted, name), name


def test_the_gate_is_the_published_one(tmp_path: Path) -> None:
    """No entry of the file has its numbers."""
    published = AutoConfig.for_model(FAMILY)
    found = inspect_model(written(tmp_path)[1], "model", tmp_path / "store").config
    assert (found.swiglu_limit, found.swiglu_alpha) == (published.swiglu_limit, published.swiglu_alpha)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.indexer.block_size", None, "says nothing of minimax-m3.attention.indexer.block_size; convert the"),
        ("attention.indexer.top_k", 0, "attention.indexer.top_k is 0, which is not a whole number of at least 1"),
        ("attention.indexer.key_length", 8, r"indexer.\w+.weight has the shape .*, by the file's entries it has"),
        ("expert_gating_func", 1, "has no sigmoid router whose weights sum to 1, which every MiniMax-M3 has"),
        ("expert_gating_func", None, "says nothing of minimax-m3.expert_gating_func"),
        ("expert_weights_norm", None, "has no sigmoid router whose weights sum to 1"),
        ("expert_weights_scale", None, "says nothing of minimax-m3.expert_weights_scale"),
    ],
)
def test_entries_that_no_model_has(key: str, value: int | None, message: str, tmp_path: Path) -> None:
    entry = None if value is None else GGUFValue(value, GGUFValueType.UINT32)
    with pytest.raises(ModelError, match=message):
        inspect_model(written(tmp_path, **{key: entry})[1], "model", tmp_path / "store")


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "q_norm", "k_norm"])
def test_a_layer_without_a_tensor_of_its_indexer(name: str, tmp_path: Path) -> None:
    """As files of converters that are older than the indexer in llama.cpp."""
    file = without(written(tmp_path)[1], f"blk.2.indexer.{name}.weight")
    with pytest.raises(ModelError, match=f"has no tensor blk.2.indexer.{name}.weight; convert the model again"):
        inspect_model(file, "model", tmp_path / "store")


def test_a_dense_block_without_its_gate(tmp_path: Path) -> None:
    file = without(written(tmp_path)[1], "blk.0.ffn_gate.weight")
    with pytest.raises(ModelError, match=r"ffn_gate and ffn_up of layer 0 have the shapes \[None, \(64, 64\)\]"):
        inspect_model(file, "model", tmp_path / "store")
