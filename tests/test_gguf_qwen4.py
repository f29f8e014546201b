"""GGUF files of Qwen3.8: their configs, n-grams by the file's hashes from a table that stays in it, and files that
contradict themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFValue, GGUFValueType

import gguf_files
from gguf_engines import engine_of, logits_of
from gguf_files import kinds
from gguf_qwen4 import ARCHITECTURE, TABLE
from parity import tokens
from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile, open_gguf, read_whole
from tiermoe.model.gguf.checkpoint import config_of, open_checkpoint
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.stored_weights import EmbeddingOnDisk

FAMILY = "qwen4_exp_text"
END = 2  # of a text, by the model's config
PREFIX = "model.layers.0.ple.ple_embedding"


def written(folder: Path, changes: dict[str, Any] | None = None, **entries: Any) -> tuple[Any, Path]:
    """transformers' model, and its file."""
    model = gguf_files.model_of(FAMILY, **(changes or {}))
    own = {f"{ARCHITECTURE}.{key}": value for key, value in entries.items()}
    return model, gguf_files.write(folder / "model.gguf", model, FAMILY, kinds("q8_0", "q5_0", "q4_0"), **own)


def lacking(file: Path, name: str) -> GgufFile:
    """The headers of a file without one of its tensors."""
    opened = open_gguf(file)
    return replace(opened, tensors={each: tensor for each, tensor in opened.tensors.items() if each != name})


def test_the_config_is_transformers(tmp_path: Path) -> None:
    model, file = written(tmp_path)
    found = inspect_model(file, "model", tmp_path / "store").config
    for name in (
        "layer_types", "hc_count", "hc_lowrank", "indexer_n_heads", "indexer_kv_heads", "indexer_head_dim",
        "indexer_budget", "indexer_compress_ratio", "ple_layer_ids", "ple_embed_dim", "ple_conv_kernel_size",
        "ngram_size", "heads_per_ngram", "output_gate_type", "norm_topk_prob", "shared_expert_intermediate_size",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(model.config, name), name
    assert found.rope_parameters["partial_rotary_factor"] == 0.5


def test_hashes_are_the_files(tmp_path: Path) -> None:
    """By other seeds than transformers' own they are others; all 60 bits count."""
    model, file = written(tmp_path, {"seed": 77})
    checkpoint = open_checkpoint(open_gguf(file))
    state = model.state_dict()
    for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"):
        found = checkpoint.read(f"{PREFIX}.{name}")
        assert found.dtype == torch.int64
        assert torch.equal(found, state[f"{PREFIX}.{name}"])


def test_rows_of_the_table_are_read_from_the_file(shipped: Path, tmp_path: Path) -> None:
    """N-grams end where the model's texts do, which the tokenizer may call otherwise; their rows alone are read."""
    model = gguf_files.model_of(FAMILY)
    file = gguf_files.write(
        tmp_path / "model.gguf", model, FAMILY, kinds("q8_0", "q5_0", "q4_0"), vocabulary=shipped / "tokenizer.json"
    )
    headers = open_gguf(file)
    assert headers.tensors[TABLE] not in read_whole(headers)
    engine = engine_of(file, store=tmp_path / "store")
    assert inspect_model(file, "model", tmp_path / "store").config.eos_token_id == [END, 0]
    assert isinstance(engine.decoder.layers[0].ngrams.table.__self__, EmbeddingOnDisk)
    ids = tokens(1, 40)[0].tolist()
    for at in (3, 11, 12, 20):
        ids[at] = END
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    found = logits_of(engine, ids)
    engine.close()
    assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max()


def test_rows_of_a_plain_table(tmp_path: Path) -> None:
    model = gguf_files.model_of(FAMILY)
    file = gguf_files.write(tmp_path / "model.gguf", model, FAMILY, kinds("f32"))
    checkpoint = inspect_model(file, "model", tmp_path / "store").checkpoint
    table = EmbeddingOnDisk(checkpoint, [f"{PREFIX}.ngram_embedding.weight"], torch.float32)
    ids = torch.tensor([[3, 70, 3, 201]])
    assert torch.equal(table(ids), model.get_submodule(PREFIX).ngram_embedding(ids))


def whole(values: list[int]) -> GGUFValue:
    return GGUFValue(values, GGUFValueType.ARRAY, GGUFValueType.UINT64)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.compress_ratios", whole([0, 0, 0]), "how many positions a block has .* the converter writes 0"),
        ("attention.compress_ratios", whole([0, 4]), "does not say by one number above 0"),
        ("attention.compress_ratios", None, "compress_ratios: None"),
        ("attention.indexer.top_k", None, r"says nothing of qwen4exp\.attention\.indexer\.top_k"),
        ("hyper_connection.count", GGUFValue(1, GGUFValueType.UINT32), "a whole number of at least 2"),
        ("hyper_connection.low_rank", None, r"says nothing of qwen4exp\.hyper_connection\.low_rank"),
        ("ple.layers", whole([0, 2]), r"n-gram features in the layers \[0, 2\]"),
        ("ple.layers", whole([3]), r"in the layers \[3\], and llama\.cpp's converter writes those of one of 3 layers"),
        ("ple.layer_multipliers", whole([1, 3]), r"\[1, 3\], which are not 3 whole numbers of at least 0"),
        ("ple.layer_multipliers", whole([1, 3, 1 << 63]), "which are not 3 whole numbers"),
        ("ple.head_vocab_sizes", whole([67, 71, 0, 79]), "which are not 4 whole numbers of at least 1"),
        ("ple.head_offsets", whole([0, 67, 138, 400]), r"has 296 rows, by the file's entries n-grams have 479"),
        ("ple.head_offsets", None, r"says nothing of qwen4exp\.ple\.head_offsets"),
        ("ple.eos_token_id", None, r"says nothing of qwen4exp\.ple\.eos_token_id"),
    ],
)
def test_entries_that_no_model_has(key: str, value: GGUFValue | None, message: str, tmp_path: Path) -> None:
    file = written(tmp_path, **{key: value})[1]
    with pytest.raises(ModelError, match=message):
        inspect_model(file, "model", tmp_path / "store")


def test_tensors_that_are_missing_are_named(tmp_path: Path) -> None:
    file = written(tmp_path)[1]
    with pytest.raises(ModelError, match=r"has no tensor per_layer_token_embd\.weight"):
        config_of(lacking(file, TABLE))
    with pytest.raises(ModelError, match=r"has no tensor blk\.1\.indexer\.k_proj\.weight"):
        open_checkpoint(lacking(file, "blk.1.indexer.k_proj.weight"))
