"""GGUF files as checkpoints: headers, shards, values, and what is refused in a line."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

import gguf_files
from commands import Command
from gguf_files import kinds
from patience import PATIENCE_S
from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import open_gguf, read_whole
from tiermoe.formats.gguf_header import TYPES, UNREAD, read_header
from tiermoe.model.families.gguf import end_ids
from tiermoe.model.gguf.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, shipped: Path) -> Path:
    """A model of the Qwen3-MoE shape, with a tokenizer."""
    model = gguf_files.model_of("qwen3_moe")
    out = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return gguf_files.write(out, model, "qwen3_moe", kinds("q8_0", "q4_0"), vocabulary=shipped / "tokenizer.json")


@pytest.fixture
def copy(file: Path, tmp_path: Path) -> Path:
    """One to damage."""
    return Path(shutil.copyfile(file, tmp_path / "model.gguf"))


def test_types_are_those_of_the_gguf_package() -> None:
    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert {**{number: kind.name for number, kind in TYPES.items()}, **UNREAD} == known
    for number, kind in TYPES.items():
        assert GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.block, kind.nbytes)


def test_headers_are_read_as_the_gguf_package_reads_them(file: Path) -> None:
    found, reader = open_gguf(file), GGUFReader(file)
    for field in reader.fields.values():
        if field.name.startswith("GGUF."):
            continue
        wanted = field.contents()
        if field.types[-1] == gguf.GGUFValueType.STRING and isinstance(wanted, list):
            assert found.strings(field.name) == wanted
        else:
            value = found.entries[field.name]
            assert (value if not isinstance(wanted, list) else list(value)) == wanted, field.name
    assert found.tensors.keys() == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        mine = found.tensors[tensor.name]
        assert (mine.offset, mine.nbytes, mine.shape) == (
            tensor.data_offset, tensor.n_bytes, tuple(reversed(tensor.shape.tolist())),
        )  # fmt: skip
        assert mine.kind.name == tensor.tensor_type.name


def test_what_loading_reads_whole_is_all_but_experts_and_a_table_of_rows(file: Path) -> None:
    raw = sorted(GGUFReader(file).tensors, key=lambda tensor: tensor.data_offset)
    output = any(tensor.name == "output.weight" for tensor in raw)
    wanted = [
        (tensor.data_offset, tensor.n_bytes)
        for tensor in raw
        if len(tensor.shape) < 3 and not (output and tensor.name == "token_embd.weight")
    ]
    assert [(tensor.offset, tensor.nbytes) for tensor in read_whole(open_gguf(file))] == wanted


def test_a_run_reads_the_headers_before_it_imports_torch(file: Path) -> None:
    script = (
        "import sys; from tiermoe.cli.session import read_ahead\n"
        "print(len(read_ahead(sys.argv[1], {}).tensors), read_ahead(sys.argv[1], {'bits': 4}), 'torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(file)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ended.stdout.split() == [str(len(GGUFReader(file).tensors)), "None", "False"], ended.stderr


def test_turned_rows_are_put_back_for_any_rows_that_are_asked_for(tmp_path: Path) -> None:
    model = gguf_files.model_of("mixtral")
    checkpoint = open_checkpoint(open_gguf(gguf_files.write(tmp_path / "m.gguf", model, "mixtral", kinds("q8_0"))))
    name = "model.layers.0.self_attn.k_proj.weight"
    wanted = model.get_parameter(name).data
    for first, last in ((0, 32), (3, 4), (7, 21), (15, 17)):
        assert torch.equal(checkpoint.read_rows(name, first, last), wanted[first:last])
    assert not torch.equal(wanted, torch.from_numpy(dequantize(*_raw(tmp_path / "m.gguf", "blk.0.attn_k.weight"))))


def _raw(path: Path, name: str) -> tuple[Any, Any]:
    tensor = next(each for each in GGUFReader(path).tensors if each.name == name)
    return tensor.data, tensor.tensor_type


def test_shards_are_one_model_whichever_is_named(tmp_path: Path) -> None:
    model = gguf_files.model_of("qwen3_moe")
    gguf_files.write(tmp_path / "model.gguf", model, "qwen3_moe", kinds("q8_0"), shards=12)
    shards = sorted(tmp_path.glob("model-*.gguf"))
    assert len(shards) > 2
    opened = [open_checkpoint(open_gguf(shard)) for shard in (shards[0], shards[-1])]
    assert opened[0].fingerprint() == opened[1].fingerprint()
    for name, parameter in model.named_parameters():
        assert torch.equal(opened[1].read(name), parameter.data), name
    shards[1].unlink()
    with pytest.raises(ModelError, match=rf"1 of {len(shards)} shards are missing in .*: {shards[1].name}"):
        open_gguf(shards[0])
    renamed = shards[0].rename(tmp_path / "first.gguf")
    with pytest.raises(ModelError, match=f"one of {len(shards)} shards, but is not called NAME-00001-of"):
        open_gguf(renamed)


def test_a_vocabulary_stays_in_the_file(file: Path) -> None:
    header = read_header(file)
    assert not any(isinstance(value, list) and len(value) > 256 for value in header.entries.values())
    assert end_ids(open_gguf(file)) == [0]


def edited(copy: Path, change: Callable[[bytearray], Any]) -> Path:
    content = bytearray(copy.read_bytes())
    change(content)
    copy.write_bytes(content)
    return copy


def put(at: int, value: bytes) -> Callable[[bytearray], Any]:
    return lambda content: content.__setitem__(slice(at, at + len(value)), value)


def type_of(name: str, kind: int) -> Callable[[bytearray], Any]:
    """Gives a tensor of two dimensions another type."""

    def change(content: bytearray) -> None:
        at = content.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
        content[at + 4 + 16 : at + 8 + 16] = struct.pack("<I", kind)

    return change


def architecture(name: str) -> Callable[[bytearray], Any]:
    """Puts a name of eight letters in the place of 'qwen3moe'."""
    return lambda content: content.__setitem__(slice(None), content.replace(b"qwen3moe", name.encode()))


DAMAGE: dict[str, tuple[Callable[[bytearray], Any], str]] = {
    "text": (put(0, b"{js}"), r"is not a GGUF file: it does not begin with 'GGUF'; download it again"),
    "empty": (lambda content: content.clear(), r"is not a GGUF file"),
    "version": (put(4, struct.pack("<I", 1)), r"is GGUF version 1, versions 2 and 3 are read; convert the model again"),
    "endianness": (put(4, struct.pack(">I", 3)), r"is a big-endian GGUF; take the little-endian file"),
    "cut in the header": (
        lambda content: content.__delitem__(slice(400, None)),
        r"is cut short: its header goes on beyond its 400 bytes; download it again",
    ),
    "cut in the tensors": (
        lambda content: content.__delitem__(slice(-100_000, None)),
        r"is cut short: .* ends at byte [\d,]+, the file has [\d,]+; download it again",
    ),
    "endless": (put(16, struct.pack("<Q", 1 << 60)), r"malformed GGUF header|cut short"),
    "type": (
        type_of("blk.0.attn_q.weight", 41),
        r"blk\.0\.attn_q\.weight is stored as Q1_0, which tiermoe does not read; take a file with these types only: "
        r"F32, F16, BF16, Q8_0.*NVFP4",
    ),
    "unknown type": (type_of("blk.0.attn_q.weight", 99), r"is stored as type 99, which"),
    "architecture": (
        architecture("qwen9moe"),
        r"is of the architecture 'qwen9moe', which tiermoe does not read from GGUF files; it reads .*deepseek, "
        r"deepseek2, .*deepseek4, .*ernie4_5-moe, .*glm4moe, .*gpt-oss, .*lfm2moe, llama, .*; take the model's "
        r"safetensors",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_file_that_cannot_be_used_is_refused_in_a_line(name: str, copy: Path, tiermoe_: Command) -> None:
    change, cause = DAMAGE[name]
    found = tiermoe_("run", edited(copy, change), "hi", "--memory", "4GiB").cause
    assert re.search(cause, found), found
    assert str(copy) in found


@pytest.mark.parametrize(
    ("command", "entries", "cause"),
    [
        *(
            (command, {"expert_count": None}, "is a 'qwen3moe' model without experts: tiermoe runs Mixture-of-Experts")
            for command in ("run", "plan", "show", "pack", "chat")
        ),
        ("run", {"tokenizer.ggml.tokens": None}, "has no tokenizer; take a file that was converted with its"),
        ("run", {"context_length": None}, "says nothing of qwen3moe.context_length"),
        ("run", {"rope.scaling.type": "longrope"}, "scales its rotary embedding by 'longrope'"),
        ("run", {"expert_used_count": 9}, "says that a token uses 9 of 8 experts"),
    ],
)
def test_a_file_that_lacks_something(
    command: str, entries: dict[str, Any], cause: str, file: Path, tmp_path: Path, tiermoe_: Command
) -> None:
    words = (command, gguf_files.altered(file, tmp_path / "m.gguf", **entries), *["hi"] * (command == "run"))
    assert cause in tiermoe_(*words).cause


def test_a_tensor_that_the_architecture_does_not_have(copy: Path) -> None:
    edited(
        copy, lambda content: content.__setitem__(slice(None), content.replace(b"blk.0.attn_q.w", b"blk.0.attn_z.w"))
    )
    with pytest.raises(
        ModelError, match=r"holds the tensor blk\.0\.attn_z\.weight, which no model of the architecture"
    ):
        open_checkpoint(open_gguf(copy))
