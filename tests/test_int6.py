"""6 bits: what is stored against loops that follow the docstrings, and an output layer that has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from commands import Command
from parity import close, logits, tokens
from tiermoe.formats import int6
from tiermoe.formats.int4 import CPU_LAYOUT, ROW_MAJOR
from tiermoe.formats.int6 import Int6
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.store import open_store
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.packing import recipe, recipe_key
from tiny import oracle, write

HQQ = QUANTIZERS["hqq"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Model = Callable[..., Path]


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def code_at(packed: list[int], columns: int, row: int, column: int) -> int:
    """The code of a weight, from the bytes of a matrix of so many columns."""
    run = (row // 64 * columns + column // 4 * 4) * 48  # four columns of a block
    upper, byte = row % 64 // 32, row % 32
    low = packed[run + column % 4 * 32 + byte] >> 4 * upper & 15
    high = packed[run + 128 + column % 4 // 2 * 32 + byte] >> (4 * (column % 2) + 2 * (1 - upper)) & 3
    return low | high << 4


def scale_at(scales: list[float], groups: int, row: int, group: int) -> float:
    return scales[(row // 64 * groups + group) * 64 + row % 64]


def test_where_a_code_lies() -> None:
    """Worked through by hand: of row 1 and row 33, columns 0 to 3."""
    codes = torch.zeros(64, 4, dtype=torch.uint8)
    codes[1] = torch.tensor([0b01_1010, 0b10_0001, 0b11_0010, 0b00_0011])
    codes[33] = torch.tensor([0b10_0101, 0b11_1111, 0b01_0000, 0b00_1000])
    packed = int6.pack(codes)
    assert packed.shape == (64, 3)
    low = {1: 0b0101_1010, 33: 0b1111_0001, 65: 0b0000_0010, 97: 0b1000_0011}
    high = {129: 0b10_11_01_10, 161: 0b00_00_11_01}  # of columns 1 and 0, of 3 and 2: row 1, row 33
    bytes_ = enumerate(packed.flatten().tolist())
    assert {at: byte for at, byte in bytes_ if byte} == low | high


@pytest.mark.parametrize(("rows", "columns"), [(64, 4), (192, 96)])
def test_codes_lie_where_the_layout_says(rows: int, columns: int) -> None:
    codes = torch.randint(0, 64, (rows, columns), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    packed = int6.pack(codes)
    flat = packed.flatten().tolist()
    assert [[code_at(flat, columns, r, c) for c in range(columns)] for r in range(rows)] == codes.tolist()
    into = torch.empty((columns, rows), dtype=torch.uint8)
    assert torch.equal(int6.unpack_transposed(packed, into), codes.t())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [64, 32])
def test_a_weight_is_its_code_less_32_times_its_groups_scale(group: int, dtype: torch.dtype) -> None:
    rows, columns = 128, 192
    encoding = Int6(CPU_LAYOUT, group)
    weight = random(rows, columns)
    weight[5, :group] = 0
    fields = encoding.encode(weight, HQQ, dtype)
    assert {f.name: (f.dtype, f.shape) for f in encoding.stored_fields(rows, columns, dtype)} == {
        name: (value.dtype, tuple(value.shape)) for name, value in fields.items()
    }
    packed, scales = fields["codes"].flatten().tolist(), fields["scales"].float().flatten().tolist()
    want = torch.tensor(
        [
            [
                (code_at(packed, columns, r, c) - 32) * scale_at(scales, columns // group, r, c // group)
                for c in range(columns)
            ]
            for r in range(rows)
        ]
    )
    assert torch.equal(encoding.decode(fields, rows, columns, torch.float32), want)
    assert torch.equal(encoding.decode(fields, rows, columns, dtype), want.to(dtype))
    # never worse than the 31 steps to either side, of which the nearest is half a step away at most
    groups = weight.view(rows, -1, group)
    errors = (want.view_as(groups) - groups).square().mean(-1).sqrt()
    assert bool((errors <= groups.abs().amax(-1) / 31 * 0.51).all())
    assert not want[5, :group].any()


def test_the_better_of_two_scales_is_taken() -> None:
    """Weights on the 32 steps of one scale, and on the 31 of the other, are kept exactly."""
    steps = torch.arange(64, dtype=torch.float32)
    weight = torch.zeros(64, 128)
    weight[0, :64] = (steps - 32) * 0.5  # the largest is the most negative: code 0
    weight[1, :64] = (32 - steps) * 0.5  # the same with a scale below 0
    weight[2, :64] = (steps - 31).clamp(max=31) * 0.5  # as far up as down: 31 steps
    weight[2, 64:] = -weight[2, :64]
    encoding = Int6(CPU_LAYOUT, 64)
    fields = encoding.encode(weight, HQQ, torch.float32)
    assert torch.equal(encoding.decode(fields, 64, 128, torch.float32), weight)
    assert [scale_at(fields["scales"].flatten().tolist(), 2, row, 0) for row in (0, 1)] == [0.5, -0.5]


# the output layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_output_layer_at_6_bits_against_its_decoded_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    """Other dense layers are too small for 4 bits here but in q_proj and o_proj; all are decoded into the oracle."""
    directory = write(tmp_path / "model", "qwen3_moe", dtype)
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, dense_bits=4, store=tmp_path / "store")
    plain = oracle(directory, "qwen3_moe", dtype)
    ids = tokens(2, 9)
    assert not close(logits(ours, "qwen3_moe", ids), logits(plain, "qwen3_moe", ids))
    put_dense_decoded(ours.tiermoe.store, "4-lm_head6", plain)
    assert close(logits(ours, "qwen3_moe", ids), logits(plain, "qwen3_moe", ids))
    ours.tiermoe.close()


def put_dense_decoded(store: Any, key: str, plain: Any) -> None:
    """Gives a transformers model the weights that packed dense layers stand for."""
    found = {}
    for name, entry in store.dense[key]["layers"].items():
        form, (out, in_) = store.dense_format(key, name), entry["shape"]
        content = (store.root / store.dense[key]["file"]).read_bytes()[entry["offset"] :][: form.stored.nbytes]
        fields = form.stored.views(torch.frombuffer(bytearray(content), dtype=torch.uint8))["weight"]
        decoded = form.encodings["weight"].decode(fields, out, in_, torch.float32)
        layer = plain.get_submodule(name)
        layer.weight.data = decoded.to(layer.weight.dtype)
        found[name] = entry["encoding"]
    assert found["lm_head"] == f"int6/{CPU_LAYOUT}/g32"


def test_a_store_with_the_output_layer_at_8_bits_gets_it_at_6(
    tiermoe_: Command, tmp_path: Path, tiny_model: Model
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


def test_where_the_output_layer_keeps_8_bits(tiny_model: Model, tmp_path: Path) -> None:
    blueprint = inspect_model(tiny_model("qwen3_moe", torch.float32), "tiny")
    assert [recipe(blueprint, bits, CPU_LAYOUT) for bits in (4, 8)] == [{"lm_head": 6}, {}]
    assert recipe_key(blueprint, 4, ROW_MAJOR) == "4-lm_head8-rowmajor"  # no kernel of a GPU takes 6
    odd = inspect_model(write(tmp_path, "qwen3_moe", torch.float32, vocab_size=144), "odd")
    assert recipe_key(odd, 4, CPU_LAYOUT) == "4-lm_head8"
