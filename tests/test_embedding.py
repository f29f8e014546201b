"""The input embedding read row by row from the checkpoint, against torch's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import small_families
import tiermoe
from parity import close
from tests import tiny
from tiermoe.engine.loading import OutputLayer
from tiermoe.engine.memory_plan import MemoryPlan
from tiermoe.errors import ModelError
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.model.stored_weights import EmbeddingOnDisk, embedding_bytes, embedding_key

KEY = "model.embed_tokens.weight"


def blueprint(
    directory: Path, family: str = "qwen3_moe", dtype: torch.dtype = torch.bfloat16, **changes: object
) -> Blueprint:
    return inspect_model(tiny.write(directory, family, dtype, **changes), "tiny")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_those_of_the_whole_table_each_read_once(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, read = blueprint(tmp_path, dtype=dtype), list[int]()
    whole, one = found.checkpoint.read(KEY).bfloat16(), found.checkpoint.read

    def counted(name: str, row: int) -> torch.Tensor:
        read.append(row)
        return one(name, row)

    monkeypatch.setattr(found.checkpoint, "read", counted)
    on_disk = EmbeddingOnDisk(found.checkpoint, [KEY], torch.bfloat16)
    for ids in ([[3]], [[3, 70, 3], [101, 0, 127]], [5, 5], [[]]):
        tokens = torch.tensor(ids, dtype=torch.long)
        read.clear()
        assert torch.equal(on_disk(tokens), torch.nn.functional.embedding(tokens, whole))
        assert len(read) == len(set(tokens.flatten().tolist()))


def test_ids_without_a_row_and_rows_that_are_gone_are_named(tmp_path: Path) -> None:
    found = blueprint(tmp_path)
    on_disk = EmbeddingOnDisk(found.checkpoint, [KEY], torch.bfloat16)
    for wrong in (128, -1):
        with pytest.raises(IndexError, match="128 rows"):
            on_disk(torch.tensor([3, wrong]))
    found.checkpoint.close()
    found.checkpoint.tensors[KEY].file.unlink()
    with pytest.raises(ModelError, match=r"cannot open .*safetensors"):
        on_disk(torch.tensor([3]))


def test_what_is_shared_or_scaled_stays_in_memory(tmp_path: Path) -> None:
    assert embedding_key(blueprint(tmp_path / "own")) == KEY
    assert embedding_bytes(blueprint(tmp_path / "own32", dtype=torch.float32)) == 128 * 64 * 4
    tied = blueprint(tmp_path / "tied", tie_word_embeddings=True)
    encoder = blueprint(tmp_path / "encoder", "switch_transformers", torch.float32)
    for found in (tied, encoder):
        assert embedding_key(found) is None
        assert embedding_bytes(found) == 0


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2"])
def test_a_model_gives_the_same_logits_with_its_embedding_on_disk(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiermoe.engine.budget.resident_bytes", lambda: 300 << 20)
    monkeypatch.setattr("tiermoe.engine.reading.page_cache_room", lambda: -1)  # mapped, it stays on disk as well
    directory = tiny.write(tmp_path, family, torch.bfloat16, vocab_size=4096)
    ids = torch.randint(3, 4096, (2, 9), generator=torch.Generator().manual_seed(1))

    def logits(memory: int, on_disk: bool) -> tuple[torch.Tensor, MemoryPlan]:
        model, _ = tiermoe.load(directory, memory=memory, device="cpu", context=64, chunk=16)
        assert isinstance(model.get_input_embeddings(), EmbeddingOnDisk) == on_disk
        with torch.no_grad():
            found = model(ids).logits
        assert model.generate(ids, max_new_tokens=3).shape == (2, 12)
        plan = model.tiermoe.plan
        model.tiermoe.close()
        return found, plan

    want, plan = logits(4 << 30, on_disk=False)
    fixed = plan.fixed - plan.idle_activations
    got, short = logits(fixed + (plan.all_slots - 2) * plan.slot_bytes, on_disk=True)
    assert torch.equal(got, want)
    assert plan.dense - short.dense == 4096 * 64 * 2
    assert not any(str(directory) in os.readlink(f"/proc/self/fd/{each}") for each in open_files())


def test_a_mapped_start_leaves_the_table_on_disk_as_its_plan_says(tmp_path: Path) -> None:
    directory = tiny.write(tmp_path, "qwen3_moe", torch.bfloat16, vocab_size=4096)
    model, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=4, context=64, chunk=16)
    table = model.get_input_embeddings()
    assert model.tiermoe.plan.unless_mapped == table.weight.nbytes == 4096 * 64 * 2
    assert table.weight.is_meta
    ids = torch.tensor([[3, 4000]])
    assert torch.equal(table(ids), inspect_model(directory, "tiny").checkpoint.read(KEY)[ids])
    model.tiermoe.close()


def open_files() -> list[str]:
    """Descriptors that are open, without the one that lists them."""
    return [each for each in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{each}")]


@pytest.mark.parametrize("sequences", [1, 2])
def test_the_output_layer_multiplies_a_prompt_s_last_token_as_one_matrix(sequences: int) -> None:
    """In batches torch would copy the weight."""
    layer = OutputLayer(64, 128, bias=True)
    hidden = torch.randn(sequences, 5, 64, generator=torch.Generator().manual_seed(0))
    operations = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            operations.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Seen():
        got = layer(hidden[:, -1:, :])
    want = torch.nn.functional.linear(hidden, layer.weight, layer.bias)[:, -1:, :]
    torch.testing.assert_close(got, want)
    assert not any("bmm" in name for name in operations)


@pytest.mark.parametrize(
    ("family", "changes", "path"),
    [
        ("gemma4_text", {"vocab_size_per_layer_input": 4096}, "model.embed_tokens_per_layer.weight"),
        (
            "qwen4_exp_text", {"ngram_vocab_size_base": 1024, "split_ngram_parts": 8, "ple_layer_ids": [1]},
            "model.layers.0.ple.ple_embedding.ngram_embedding.weight",
        ),
    ],
)  # fmt: skip
def test_tables_beside_the_embedding_stay_on_disk(
    family: str, changes: dict[str, Any], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings of each layer, and of several tokens, whose rows lie in eight tensors."""
    monkeypatch.setattr("tiermoe.engine.budget.resident_bytes", lambda: 300 << 20)
    monkeypatch.setattr("tiermoe.engine.reading.page_cache_room", lambda: -1)
    directory = small_families.write_small(tmp_path, family, vocab_size=4096, **changes)
    found = inspect_model(directory, "small")
    keys = found.outline.tables[path]
    assert len(keys) == changes.get("split_ngram_parts", 1)
    ids = torch.randint(3, 4096, (2, 9), generator=torch.Generator().manual_seed(1))

    def logits(memory: int, on_disk: bool) -> tuple[torch.Tensor, MemoryPlan]:
        model, _ = tiermoe.load(directory, memory=memory, device="cpu", bits=16, context=64, chunk=16, preset="lru")
        table = model.get_submodule(path.removesuffix(".weight"))
        assert isinstance(table, EmbeddingOnDisk) == on_disk
        with torch.no_grad():
            got = model(ids).logits
        assert model.generate(ids, max_new_tokens=3).shape == (2, 12)
        plan = model.tiermoe.plan
        model.tiermoe.close()
        return got, plan

    want, plan = logits(4 << 30, on_disk=False)
    with torch.no_grad():
        assert close(want, small_families.plain_model(directory)(ids).logits)
    fixed = plan.fixed - plan.idle_activations
    got, short = logits(fixed + (plan.all_slots - 2) * plan.slot_bytes, on_disk=True)
    assert torch.equal(got, want)
    table = sum(found.checkpoint.tensors[key].nbytes for key in keys)
    own = 0 if family == "gemma4_text" else 4096 * 64 * 4  # gemma's input embedding is its output layer
    assert plan.dense - short.dense == table + own
