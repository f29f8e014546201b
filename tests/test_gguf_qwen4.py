"""N-grams of Qwen3.8 in GGUF files: their ends, and a table that stays in the file."""

from __future__ import annotations

from pathlib import Path

import torch

import gguf_files
from gguf_engines import engine_of, logits_of
from gguf_files import kinds
from parity import tokens
from tiermoe.formats.gguf_file import open_gguf, read_whole
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.stored_weights import EmbeddingOnDisk

NAME, TABLE = "qwen4_exp", "per_layer_token_embd.weight"
END = 2  # of a text, by the model's config
PREFIX = "model.layers.0.ple.ple_embedding"


def test_rows_of_the_table_are_read_from_the_file(shipped: Path, tmp_path: Path) -> None:
    """N-grams end where the model's texts do, which the tokenizer may call otherwise; their rows alone are read."""
    model = gguf_files.model_of(NAME)
    file = gguf_files.write(
        tmp_path / "model.gguf", model, NAME, kinds("q8_0", "q5_0", "q4_0"), vocabulary=shipped / "tokenizer.json"
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
    model = gguf_files.model_of(NAME)
    file = gguf_files.write(tmp_path / "model.gguf", model, NAME, kinds("f32"))
    checkpoint = inspect_model(file, "model", tmp_path / "store").checkpoint
    table = EmbeddingOnDisk(checkpoint, [f"{PREFIX}.ngram_embedding.weight"], torch.float32)
    ids = torch.tensor([[3, 70, 3, 201]])
    assert torch.equal(table(ids), model.get_submodule(PREFIX).ngram_embedding(ids))
