"""The checkpoint reader, against files that safetensors writes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tiermoe.errors import ModelError
from tiermoe.formats.safetensors import Checkpoint

TENSORS = {
    "a.weight": torch.arange(24, dtype=torch.float32).view(4, 6),
    "b.experts": torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "c.half": torch.arange(10, dtype=torch.float16),
    "d.codes": torch.arange(256, dtype=torch.uint8).view(2, 128),
    "e.scale": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
    "f.scalar": torch.tensor(7, dtype=torch.int64),
    "g.empty": torch.empty(0, 4),
}


def single(folder: Path, tensors: dict[str, torch.Tensor] = TENSORS, config: str = "{}") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(config)
    return folder


def sharded(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    weight_map = {}
    for number, names in enumerate(
        (["a.weight", "c.half"], ["b.experts", "d.codes"], ["e.scale", "f.scalar", "g.empty"])
    ):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        save_file({name: TENSORS[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def raw(folder: Path, header: dict[str, Any] | bytes, data: int = 64) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return folder


@pytest.mark.parametrize("write", [single, sharded])
def test_every_tensor_reads_as_it_was_written(write: Any, tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(tmp_path / "model"))
    assert set(checkpoint.tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert name in checkpoint
        got = checkpoint.read(name)
        assert got.dtype == tensor.dtype
        assert got.shape == tensor.shape
        assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8)) if tensor.dim() else got == tensor
    checkpoint.close()
    assert torch.equal(checkpoint.read("a.weight"), TENSORS["a.weight"])  # opens its files again


def test_rows_and_where_they_lie(tmp_path: Path) -> None:
    checkpoint = Checkpoint(single(tmp_path / "model"))
    for row in range(3):
        assert torch.equal(checkpoint.read("b.experts", row), TENSORS["b.experts"][row : row + 1])
        segment = checkpoint.segment("b.experts", row, at=128)
        assert (segment.nbytes, segment.at) == (5 * 7 * 2, 128)
        with open(segment.file, "rb") as handle:
            handle.seek(segment.offset)
            assert handle.read(segment.nbytes) == TENSORS["b.experts"][row].view(torch.uint8).numpy().tobytes()
    assert checkpoint.segment("b.experts", None, 0).nbytes == 3 * 5 * 7 * 2


@pytest.mark.parametrize("write", [single, sharded])
def test_the_fingerprint_is_the_content_s(write: Any, tmp_path: Path) -> None:
    first, copy = write(tmp_path / "first"), write(tmp_path / "copy")
    wanted = Checkpoint(first).fingerprint()
    assert wanted == Checkpoint(copy).fingerprint() == Checkpoint(first).fingerprint()
    (copy / "README.md").write_text("more files beside the weights change nothing")
    assert Checkpoint(copy).fingerprint() == wanted

    (copy / "config.json").write_text('{"top_k": 2}')
    changed_config = Checkpoint(copy).fingerprint()
    (copy / "config.json").write_text("{}")
    shard = next(file for file in sorted(copy.glob("*.safetensors")))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    changed_weight = Checkpoint(copy).fingerprint()
    assert len({wanted, changed_config, changed_weight}) == 3


def test_the_fingerprint_tells_names_and_types(tmp_path: Path) -> None:
    tensor = torch.zeros(4, 4)
    variants = [{"a": tensor}, {"b": tensor}, {"a": tensor.view(2, 8)}, {"a": tensor.to(torch.int32)}]
    prints = {Checkpoint(single(tmp_path / str(i), each)).fingerprint() for i, each in enumerate(variants)}
    assert len(prints) == len(variants)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"1 of 3 shards are missing .*model-00002-of-00003\.safetensors; download"):
        Checkpoint(folder)


@pytest.mark.parametrize("kept", [-1, 20, 8, 5, 0])
def test_a_truncated_shard_is_named_with_the_sizes(kept: int, tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    shard = folder / "model-00002-of-00003.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:kept])
    with pytest.raises(
        ModelError, match=r"model-00002-of-00003\.safetensors .*truncated.*; download it again"
    ) as refused:
        Checkpoint(folder)
    if kept == -1:
        assert f"the file has {len(content) - 1:,}" in str(refused.value)


def test_a_large_tensor_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiermoe.formats.safetensors.READ_BYTES", 4096)
    large = torch.randn(37, 1001, generator=torch.Generator().manual_seed(0))
    checkpoint = Checkpoint(single(tmp_path / "model", {"small": torch.ones(3), "large": large}))
    assert torch.equal(checkpoint.read("large"), large)
    assert torch.equal(checkpoint.read_rows("large", 5, 36), large[5:36])
    with open(checkpoint.shards[0], "r+b") as file:
        file.truncate(checkpoint.shards[0].stat().st_size - 5000)
    with pytest.raises(ModelError, match="bytes early while reading large"):
        checkpoint.read("large")


def test_a_shard_that_ends_early_later_is_an_error(tmp_path: Path) -> None:
    folder = single(tmp_path)
    checkpoint = Checkpoint(folder)
    with open(folder / "model.safetensors", "r+b") as handle:
        handle.truncate(checkpoint.tensors["b.experts"].offset + 10)
    with pytest.raises(ModelError, match=r"ended 200 bytes early while reading b\.experts; download"):
        checkpoint.read("b.experts")


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"\xff\xfe",
        b"[1, 2]",
        {"a": 5},
        {"a": {"dtype": "F32", "shape": [4]}},
        {"a": {"dtype": "F7", "shape": [4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}},
        {"a": {"dtype": "F32", "shape": ["4"], "data_offsets": [0, 16]}},
    ],
    ids=str,
)
def test_malformed_headers_are_refused(header: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.safetensors has a malformed safetensors header .*download it again"):
        Checkpoint(raw(tmp_path, header))


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "{}"])
def test_a_malformed_index_is_refused(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"index\.json is malformed .*download it again"):
        Checkpoint(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no safetensors weights .*save_pretrained"):
        Checkpoint(tmp_path)


def test_a_shard_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"cannot read .*: Is a directory"):
        Checkpoint(tmp_path)
