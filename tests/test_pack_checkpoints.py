"""Packing checkpoints of real families: in place or copied, followed when moved, never mixed up; the output layer at 6
bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import tiermoe
from commands import Command
from parity import close, logits, tokens
from sources import contents
from tiermoe.errors import StoreError
from tiermoe.formats import encoding, quantizers, store_files
from tiermoe.formats.store import open_store
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.packing import pack_dense, recipe, recipe_key
from tiermoe.model.prepare_store import ensure_packed, open_or_create
from tiny import oracle, write


@pytest.fixture(scope="module")
def blueprint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """The blueprint of a tiny checkpoint: (family, dtype, compute dtype in its config) → Blueprint."""

    def make(family: str, dtype: torch.dtype = torch.bfloat16, compute: str | None = None) -> Any:
        directory = write(tmp_path_factory.mktemp(family) / "tiny", family, dtype)
        if compute is not None:
            config = json.loads((directory / "config.json").read_text())
            (directory / "config.json").write_text(json.dumps({**config, "dtype": compute}))
        return inspect_model(directory, family)

    return make


def bytes_of(extent: Any) -> bytes:
    parts = []
    for segment in extent.segments:
        with open(segment.file, "rb") as handle:
            handle.seek(segment.offset)
            parts.append(handle.read(segment.nbytes))
    return b"".join(parts)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "switch_transformers"])
def test_16_bits_are_served_from_the_checkpoint(family: str, blueprint_of: Any, tmp_path: Path) -> None:
    blueprint = blueprint_of(family)
    store = open_or_create(blueprint, tmp_path)
    ensure_packed(store, blueprint, 16, "hqq")
    precision = open_store(tmp_path).precisions["16"]
    assert precision.in_place
    assert sorted(contents(tmp_path)) == ["model-config.json", "outline.json", "store.json"]  # no copy
    for index, layer in enumerate(precision.layers):
        for expert, extent in enumerate(layer.extents):
            values = blueprint.experts.read(index, expert)
            wanted = b"".join(
                values[part.name].contiguous().view(torch.uint8).numpy().tobytes()
                for part in blueprint.layers[index].parts
            )
            assert bytes_of(extent) == wanted
            assert xxhash.xxh3_64_hexdigest(wanted) == extent.checksum


def test_16_bits_are_copied_where_the_checkpoint_holds_another_type(blueprint_of: Any, tmp_path: Path) -> None:
    blueprint = blueprint_of("qwen3_moe", torch.float32, "bfloat16")
    store = open_or_create(blueprint, tmp_path)
    ensure_packed(store, blueprint, 16, "hqq")
    precision = store.precisions["16"]
    assert not precision.in_place
    form = store.expert_format("16", 1)
    views = form.stored.views(torch.frombuffer(bytearray(bytes_of(precision.layers[1].extents[5])), dtype=torch.uint8))
    for name, value in blueprint.experts.read(1, 5).items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(views[name]["weight"], value)


def test_experts_in_place_follow_a_checkpoint_that_was_moved(blueprint_of: Any, tmp_path: Path) -> None:
    blueprint = blueprint_of("qwen3_moe")
    ensure_packed(open_or_create(blueprint, tmp_path), blueprint, 16, "hqq")
    moved = blueprint.directory.rename(blueprint.directory.with_name("moved"))
    elsewhere = inspect_model(moved, "moved")
    store = open_or_create(elsewhere, tmp_path)
    ensure_packed(store, elsewhere, 16, "hqq")
    extents = [extent for layer in store.precisions["16"].layers for extent in layer.extents]
    assert {Path(segment.file).parent for extent in extents for segment in extent.segments} == {moved}
    assert all(xxhash.xxh3_64_hexdigest(bytes_of(extent)) == extent.checksum for extent in extents)


def test_another_checkpoint_is_refused_and_its_journal_not_taken_over(blueprint_of: Any, tmp_path: Path) -> None:
    one, other = blueprint_of("qwen3_moe"), blueprint_of("mixtral")
    ensure_packed(open_or_create(one, tmp_path), one, 4, "hqq")
    with pytest.raises(StoreError, match=r"packed from another checkpoint"):
        open_or_create(other, tmp_path)
    assert set(open_store(tmp_path).precisions) == {"4-hqq"}
    store = open_or_create(other, tmp_path, force=True)
    assert sorted(contents(tmp_path)) == ["model-config.json", "outline.json", "store.json"]
    ensure_packed(store, other, 4, "hqq")
    assert open_store(tmp_path).source.fingerprint == other.checkpoint.fingerprint()
    assert open_or_create(other, tmp_path, force=True).precisions.keys() == {"4-hqq"}  # usable: kept


def test_packed_dense_layers_are_checked_like_experts(blueprint_of: Any, tmp_path: Path) -> None:
    blueprint = blueprint_of("qwen3_moe")
    ensure_packed(open_or_create(blueprint, tmp_path), blueprint, 4, "hqq", dense_bits=8)
    file = tmp_path / "dense-8.bin"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(StoreError, match=r"dense-8\.bin is truncated"):
        ensure_packed(open_store(tmp_path), blueprint, 4, "hqq", dense_bits=8)
    file.unlink()
    with pytest.raises(StoreError, match=r"dense-8\.bin is missing"):
        ensure_packed(open_store(tmp_path), blueprint, 4, "hqq", dense_bits=8)


def test_two_that_create_the_store_at_once(blueprint_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower one finds the table that it did not see a moment ago, and keeps it."""
    root, faster = tmp_path / "store", store_files.exclusive
    blueprint = blueprint_of("qwen3_moe")

    def overtaken(path: Path, *waiting: Any) -> Any:
        monkeypatch.undo()
        ensure_packed(open_or_create(blueprint, path), blueprint, 4, "hqq")
        return faster(path, *waiting)

    monkeypatch.setattr("tiermoe.model.prepare_store.exclusive", overtaken)
    assert set(open_or_create(blueprint, root).precisions) == {"4-hqq"}
    assert set(open_store(root).precisions) == {"4-hqq"}


@pytest.mark.parametrize("bits", [8, 4])
def test_dense_layers_in_blocks_of_rows_are_those_packed_whole(
    blueprint_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    blueprint: Any = blueprint_of("qwen3_moe")
    steps: list[tuple[int, int]] = []
    monkeypatch.setattr(quantizers, "BLOCK_WEIGHTS", 64 * 64)  # so that a tiny matrix has several
    found = []
    for weights in (1, 1 << 22):
        monkeypatch.setattr(encoding, "BLOCK_WEIGHTS", weights)
        store = open_or_create(blueprint, tmp_path / str(weights))
        pack_dense(store, blueprint, bits, lambda done, total: steps.append((done, total)))
        (entry,) = store.dense.values()
        found.append(((store.root / entry["file"]).read_bytes(), entry["layers"]))
        assert steps[-1][0] == steps[-1][1]
    assert found[0] == found[1]
    assert steps[-1][1] < len(steps) - steps[-1][1]  # more blocks than layers


@pytest.mark.parametrize(
    ("dtype", "dense_bits", "key", "head"),
    [
        (torch.float32, 8, "8", "int8"),
        (torch.float32, 4, "4-lm_head6", "int6/cpu-avx512/g32"),
        (torch.bfloat16, 4, "4-lm_head6", "int6/cpu-avx512/g32"),
    ],
)
def test_dense_layers_against_their_decoded_weights(
    dtype: torch.dtype, dense_bits: int, key: str, head: str, tmp_path: Path
) -> None:
    """At 4 bits the output layer has 6, and others are too small here but q_proj and o_proj. All are decoded into the
    oracle."""
    directory = write(tmp_path / "model", "qwen3_moe", dtype)
    ours, _ = tiermoe.load(
        directory, memory="4GiB", device="cpu", bits=16, dense_bits=dense_bits, store=tmp_path / "store"
    )
    plain = oracle(directory, "qwen3_moe", dtype)
    ids = tokens(2, 9)
    assert not close(logits(ours, "qwen3_moe", ids), logits(plain, "qwen3_moe", ids))
    assert put_dense_decoded(ours.tiermoe.store, key, plain)["lm_head"] == head
    assert close(logits(ours, "qwen3_moe", ids), logits(plain, "qwen3_moe", ids))
    ours.tiermoe.close()


def put_dense_decoded(store: Any, key: str, plain: Any) -> dict[str, str]:
    """Gives a transformers model the weights that packed dense layers stand for; their encodings, by name."""
    found = dict[str, str]()
    for name, entry in store.dense[key]["layers"].items():
        form, (out, in_) = store.dense_format(key, name), entry["shape"]
        content = (store.root / store.dense[key]["file"]).read_bytes()[entry["offset"] :][: form.stored.nbytes]
        fields = form.stored.views(torch.frombuffer(bytearray(content), dtype=torch.uint8))["weight"]
        decoded = form.encodings["weight"].decode(fields, out, in_, torch.float32)
        layer = plain.get_submodule(name)
        layer.weight.data = decoded.to(layer.weight.dtype)
        found[name] = entry["encoding"]
    return found


def test_a_store_with_the_output_layer_at_8_bits_gets_it_at_6(
    tiermoe_: Command, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    """As it was packed once: the layers are packed anew, with the reason, and the next run packs nothing."""
    directory, root = tiny_model("qwen3_moe", torch.float32), tmp_path / "store"
    words = ("run", directory, "hi", "--memory", "4GiB", "--lanes", "1", "--max-tokens", "2", "--store", root)
    assert tiermoe_(*words).code == 0
    table = json.loads((root / "store.json").read_text())
    table["dense"]["4-lm_head8"] = table["dense"].pop("4-lm_head6") | {"file": "dense-4-lm_head8.bin"}
    (root / "store.json").write_text(json.dumps(table))
    (root / "dense-4-lm_head6.bin").rename(root / "dense-4-lm_head8.bin")
    again = tiermoe_(*words)
    assert again.code == 0
    reason = "packing dense layers (once: the store has them as 4-lm_head8, this version takes 4-lm_head6)"
    assert reason in again.err
    assert set(open_store(root).dense) == {"4-lm_head8", "4-lm_head6"}
    assert "packing" not in tiermoe_(*words).err


def test_where_the_output_layer_keeps_8_bits(blueprint_of: Any, tmp_path: Path) -> None:
    blueprint = blueprint_of("qwen3_moe", torch.float32)
    assert [recipe(blueprint, bits) for bits in (4, 8)] == [{"lm_head": 6}, {}]
    assert recipe_key(blueprint, 4) == "4-lm_head6"
    odd = inspect_model(write(tmp_path, "qwen3_moe", torch.float32, vocab_size=144), "odd")
    assert recipe_key(odd, 4) == "4-lm_head8"
