"""The store's table and files: what is written reads back, and what cannot be used is refused in words."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from sources import EXPERTS, RandomExperts, empty_store, stored
from tiermoe.errors import StoreError
from tiermoe.formats import store_files
from tiermoe.formats.expert_format import expert_format
from tiermoe.formats.pack import pack_experts
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.store import Store, check_files, open_store
from tiermoe.model.prepare_store import is_store

SOURCE = RandomExperts()
PRECISIONS = [
    (16, "hqq", "16"),
    (8, "hqq", "8"),
    (4, "hqq", "4-hqq"),
    (4, "nonlinear", "4-nonlinear"),
    (4, "linear", "4-linear"),
    (3, "nonlinear", "3-nonlinear"),
    (2, "hqq", "2-hqq"),
    (2, "nonlinear", "2-nonlinear"),
]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with every precision side by side."""
    store = empty_store(tmp_path_factory.mktemp("packed"))
    for bits, quantizer, _ in PRECISIONS:
        pack_experts(store, SOURCE, bits, quantizer)
    return store.root


@pytest.fixture
def copied(packed: Path, tmp_path: Path) -> Path:
    """A copy to damage, elsewhere."""
    return Path(shutil.copytree(packed, tmp_path / "store"))


def edit(root: Path, change: Any) -> None:
    table = json.loads((root / "store.json").read_text())
    change(table)
    (root / "store.json").write_text(json.dumps(table))


def fields(store: Store, key: str, layer: int, expert: int) -> dict[str, dict[str, torch.Tensor]]:
    return store.expert_format(key, layer).stored.views(stored(store, key, layer, expert))


def expected(bits: int, quantizer: str, layer: int, expert: int) -> dict[str, dict[str, torch.Tensor]]:
    """The fields of an expert by the encodings themselves."""
    form = expert_format(SOURCE.layers[layer], bits, torch.bfloat16, quantizer)
    found = {}
    for name, weight in SOURCE.read(layer, expert).items():
        encoding = form.encodings.get(name)
        encoded = encoding.encode(weight, QUANTIZERS[quantizer], torch.bfloat16) if encoding else {"weight": weight}
        found[name] = dict(encoded)
    return found


def same(one: dict[str, dict[str, torch.Tensor]], other: dict[str, dict[str, torch.Tensor]]) -> bool:
    return {part: set(fields) for part, fields in one.items()} == {part: set(f) for part, f in other.items()} and all(
        torch.equal(value, other[part][name]) for part, fields in one.items() for name, value in fields.items()
    )


def test_the_table_reads_back_as_it_was_written(packed: Path) -> None:
    store = open_store(packed)
    assert is_store(packed)
    assert store.layers == SOURCE.layers
    assert list(store.precisions) == [key for _, _, key in PRECISIONS]
    written = json.loads((packed / "store.json").read_text())
    store.save()
    assert json.loads((packed / "store.json").read_text()) == written
    for bits, quantizer, key in PRECISIONS:
        precision = store.precisions[key]
        assert (precision.bits, precision.quantizer) == (bits, quantizer if bits < 8 else "")
        assert written["precisions"][key]["machine"] == ("cpu-avx512" if bits in (4, 3, 2) else "any")
        check_files(store, key)


@pytest.mark.parametrize(("bits", "quantizer", "key"), PRECISIONS, ids=[key for _, _, key in PRECISIONS])
def test_every_expert_reads_back_also_as_safetensors(bits: int, quantizer: str, key: str, packed: Path) -> None:
    store = open_store(packed)
    for layer in range(len(SOURCE.layers)):
        found: dict[int, dict[str, dict[str, torch.Tensor]]] = {}
        with safe_open(packed / f"experts-{key}-layer{layer:03}.safetensors", framework="pt") as file:
            for name in [name for name in file.keys() if ".padding." not in name]:  # noqa: SIM118
                _, number, _, expert_, part, field = name.split(".")
                assert int(number) == layer
                found.setdefault(int(expert_), {}).setdefault(part, {})[field] = file.get_tensor(name)
        assert sorted(found) == list(range(EXPERTS))
        for expert in range(EXPERTS):
            want = expected(bits, quantizer, layer, expert)
            assert same(fields(store, key, layer, expert), want)
            assert same(found[expert], want)
            (segment,) = store.precisions[key].layers[layer].extents[expert].segments
            assert segment.offset % 4096 == segment.nbytes % 4096 == segment.at == 0


def test_a_store_can_be_moved(packed: Path, copied: Path) -> None:
    here, there = open_store(packed), open_store(copied)
    there_files = {
        segment.file
        for precision in there.precisions.values()
        for layer in precision.layers
        for extent in layer.extents
        for segment in extent.segments
    }
    assert {Path(file).parent for file in there_files} == {copied}
    assert same(fields(here, "4-hqq", 2, 3), fields(there, "4-hqq", 2, 3))
    assert str(packed) not in (copied / "store.json").read_text()


def test_dense_tables_read_back(copied: Path) -> None:
    entry = {"encoding": "int8", "shape": [8, 64], "offset": 4096, "checksum": "00", "error": 0.01}
    store = open_store(copied)
    store.dense["8"] = {"file": "dense-8.bin", "machine": "any", "layers": {"lm_head": entry}}
    store.save()
    again = open_store(copied)
    assert again.dense == store.dense
    (segment,) = again.dense_extent("8", "lm_head").segments
    assert (segment.file, segment.offset) == (str(copied / "dense-8.bin"), 4096)


def test_codes_that_an_older_version_packed_for_gpus_are_left_out(copied: Path) -> None:
    """The rest reads as before; the next writer drops them from the table."""
    before = open_store(copied)
    layer = {"encoding": "int4/rowmajor/g64", "shape": [8, 64], "offset": 0, "checksum": "00", "error": 0.01}

    def add(table: dict[str, Any]) -> None:
        old = json.loads(json.dumps(table["precisions"]["4-hqq"]).replace("cpu-avx512", "rowmajor"))
        assert old["machine"] == "rowmajor"
        table["precisions"]["4-hqq-rowmajor"] = old
        dense = {"file": "dense-4-rowmajor.bin", "machine": "rowmajor", "layers": {"lm_head": layer}}
        table["dense"] = {"4-rowmajor": dense}

    edit(copied, add)
    store = open_store(copied)
    assert (store.precisions, store.dense) == (before.precisions, {})
    store.save()
    assert "rowmajor" not in (copied / "store.json").read_text()


ANEW = "'tiermoe pack MODEL --store .* --force' packs the model anew"


@pytest.mark.parametrize("text", ["", "{", '{"format":', "\x00\xff"])
def test_a_table_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    assert not is_store(tmp_path)
    with pytest.raises(StoreError, match=r"holds no store\.json: it is not an expert store"):
        open_store(tmp_path)
    (tmp_path / "store.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StoreError, match=rf"store\.json cannot be read .*{ANEW}"):
        open_store(tmp_path)


def experts_of(table: dict[str, Any]) -> Any:
    return table["precisions"]["4-hqq"]["layers"][1]["experts"]


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.pop("layers"),
        lambda table: table["source"].pop("fingerprint"),
        lambda table: table["source"].update(dtype="float64"),
        lambda table: table.update(precisions=[]),
        lambda table: table["precisions"]["4-hqq"]["layers"].pop(),
        lambda table: experts_of(table).pop(),
        lambda table: experts_of(table)[0].pop("checksum"),
        lambda table: experts_of(table)[0].update(segments=[[1]]),
        lambda table: table.update(dense={"8": {"file": "dense-8.bin"}}),
        lambda table: table.update(dense={"8": {"file": "f", "machine": "any", "layers": {"a": {"offset": 0}}}}),
    ],
)
def test_a_table_that_contradicts_itself(change: Any, copied: Path) -> None:
    edit(copied, change)
    with pytest.raises(StoreError, match=rf"store\.json is damaged .*{ANEW}"):
        open_store(copied)


@pytest.mark.parametrize(
    "sizes",
    [[10], [store_files.PIECE], [100, store_files.PIECE - 100, 1], [3 * store_files.PIECE + 5, 7, store_files.PIECE]],
)
def test_files_are_written_in_whole_pieces(sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = [os.urandom(size) for size in sizes]
    written: list[tuple[int, int]] = []
    pwrite = os.pwrite

    def counted(descriptor: int, some: memoryview, at: int) -> int:
        written.append((at, len(some)))
        return pwrite(descriptor, some, at)

    monkeypatch.setattr(os, "pwrite", counted)
    with store_files.whole_or_nothing(tmp_path / "file") as handle:
        pieces = store_files.Pieces(handle)
        assert [pieces.write(some) for some in content] == sizes
        pieces.finish()
    assert (tmp_path / "file").read_bytes() == b"".join(content)
    whole, rest = divmod(sum(sizes), store_files.PIECE)
    assert written == [(i * store_files.PIECE, store_files.PIECE) for i in range(whole)] + (
        [(whole * store_files.PIECE, rest)] if rest else []
    )
