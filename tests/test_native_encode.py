"""The native quantisers against torch's: the same bytes under every instruction set, whatever packs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sources import EXPERTS, RandomExperts, contents, empty_store
from tiermoe import native
from tiermoe.errors import PackError
from tiermoe.formats import encode_experts
from tiermoe.formats import encoding as encodings
from tiermoe.formats.encoding import ORDER, Encoding
from tiermoe.formats.expert_format import expert_format
from tiermoe.formats.pack import pack_experts
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_named
from tiermoe.types import MoeLayer, Part, Segment

pytestmark = [
    pytest.mark.skipif(not native.quantizes(), reason="this build has no kernels"),
    pytest.mark.usefixtures("one_thread"),
]

SETS = native.instruction_sets()


def some(rows: int, columns: int, size: float, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Weights with groups of equal ones, zeros of both signs, and few that are far from the others."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * size
    weight[torch.rand(rows, columns, generator=generator) > 0.999] *= 20
    weight[1, : columns // 2] = 0.25
    weight[2, :] = 0
    weight[3, :16] = torch.tensor([0.0, -0.0]).repeat(8)
    weight[4, :8] = torch.tensor([1e-38, -1e-38]).repeat(4)
    return weight.to(dtype)


def in_torch(
    encoding: Encoding, quantizer: str, weight: torch.Tensor, dtype: torch.dtype, patch: pytest.MonkeyPatch
) -> tuple[Any, encodings.Squares]:
    with patch.context() as without:
        without.setattr(native, "quantizes", lambda: False)
        return encodings.encode_rows(encoding, QUANTIZERS[quantizer], weight, dtype)


ENCODINGS = ["int8", *[f"{kind}/{{}}/g{group}" for kind in ("int4", "u2") for group in (32, 64, 128, 256)]]
# whole blocks of 64 rows and a rest; several blocks that torch solves together, and stripes that it sums in two ways
SHAPES = [(64, 256), (80, 2816), (16, 768)]


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("quantizer", ["hqq", "linear"])
@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_fields_are_torchs_bit_for_bit(
    shape: tuple[int, int], name: str, quantizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = encoding_named(name.format(ORDER))
    for dtype, size in ((torch.bfloat16, 0.5), (torch.float32, 0.02)):
        weight = some(*shape, size, dtype, seed=shape[0])
        compare(encoding, quantizer, weight, dtype, monkeypatch)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("name", ["nl4/{}/g32", "nl3/{}/g64", "nl3/{}/g32", "nl2/{}/g64"])
def test_uneven_bits_are_torchs_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = encoding_named(name.format(ORDER))
    weight = torch.cat([some(64, 192, size, torch.float32, seed) for seed, size in enumerate((0.05, 1e-30, 1e3))])
    found = encoding.encode(weight, QUANTIZERS["hqq"], torch.bfloat16)["blocks"]
    monkeypatch.setattr(native, "quantizes", lambda: False)
    assert torch.equal(encoding.encode(weight, QUANTIZERS["hqq"], torch.bfloat16)["blocks"], found)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("name", ["int6/{}/g32", "int6/{}/g64"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_six_bits_are_torchs_bit_for_bit(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = encoding_named(name.format(ORDER))
    for seed in range(2):
        compare(encoding, "hqq", some(192, 1024, 0.05, dtype, seed), dtype, monkeypatch)
    # groups whose largest weights are as far up as down: the two scales are nearly as good as each other
    weight = some(64, 512, 0.05, torch.float32)
    weight[:, ::32], weight[:, 1::32] = 0.2, -0.2
    compare(encoding, "hqq", weight.to(dtype), dtype, monkeypatch)


def compare(
    encoding: Encoding, quantizer: str, weight: torch.Tensor, dtype: torch.dtype, patch: pytest.MonkeyPatch
) -> None:
    assert encodings.encodes_natively(encoding, weight.shape[1], weight.dtype, dtype)
    mine, squares = encodings.encode_rows(encoding, QUANTIZERS[quantizer], weight, dtype)
    theirs, torchs = in_torch(encoding, quantizer, weight, dtype, patch)
    assert mine.keys() == theirs.keys()
    for field, value in mine.items():
        assert value.dtype == theirs[field].dtype
        assert torch.equal(value.view(torch.uint8), theirs[field].view(torch.uint8)), field
    # torch fuses the sum where it decodes to float32
    assert squares == pytest.approx(torchs, rel=1e-12 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("group", [16, 64])
def test_every_set_stops_where_torch_stops(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is done after few steps, groups beside it that would go on, and shrunk errors."""
    quantizer = QUANTIZERS["hqq"]
    easy = torch.arange(16).repeat(4, group // 16 * 3).float() * 0.1
    for weight in (easy, torch.cat((easy, torch.randn(4, easy.shape[1], generator=torch.Generator().manual_seed(1))))):
        with monkeypatch.context() as without:
            without.setattr(native, "quantizes", lambda: False)
            want = quantizer.parameters(weight, 4, group)
        for name in SETS:
            native.use(name)
            found = quantizer.parameters(weight, 4, group)
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    native.use(SETS[0])


@pytest.mark.parametrize(("shape", "weights", "dtype"), [
    ((7, 33), torch.bfloat16, torch.bfloat16), ((64, 64), torch.float16, torch.bfloat16),
    ((64, 64), torch.bfloat16, torch.float16),
])  # fmt: skip
def test_torch_encodes_the_rest(shape: tuple[int, int], weights: torch.dtype, dtype: torch.dtype) -> None:
    encoding = encoding_named("int8")
    assert not encodings.encodes_natively(encoding, shape[1], weights, dtype)
    fields, _ = encodings.encode_rows(encoding, QUANTIZERS["hqq"], torch.ones(shape, dtype=weights), dtype)
    assert fields["scale"].dtype == dtype


@pytest.mark.parametrize("quantizer", ["hqq", "linear"])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_store_is_the_same_whoever_packed_it(
    bits: int, quantizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for who in ("torch", *SETS):
        store = empty_store(tmp_path / who)
        with monkeypatch.context() as patch:
            if who == "torch":
                patch.setattr(native, "quantizes", lambda: False)
            else:
                native.use(who)
            pack_experts(store, RandomExperts(), bits, quantizer)
        found.append(contents(store.root))
    native.use(SETS[0])
    assert all(each == found[0] for each in found)


class FromFile(RandomExperts):
    """Random experts that lie in a file, each of its matrices in two segments, with bytes between them."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._places: dict[tuple[int, int], list[Segment]] = {}
        with open(file, "wb") as handle:
            for layer in range(len(self.layers)):
                for expert in range(EXPERTS):
                    self._places[layer, expert] = list(self._put(handle, str(file), layer, expert))
        self.reads.clear()

    def _put(self, handle: Any, file: str, layer: int, expert: int) -> Iterator[Segment]:
        at = 0
        for values in self.read(layer, expert).values():
            content = values.view(torch.uint8).flatten().numpy().tobytes()
            half = len(content) // 4 * 2
            for some in (content[:half], content[half:]):
                handle.write(b"between")
                yield Segment(file, handle.tell(), len(some), at)
                handle.write(some)
                at += len(some)
            at = -(-at // 64) * 64

    def in_place(self, layer: int, expert: int) -> list[Segment] | None:
        return self._places[layer, expert]


@pytest.mark.parametrize(("workers", "block"), [(1, 3000), (2, 1), (5, 3000), (5, 1 << 22)])
def test_rows_that_are_read_where_they_lie(
    workers: int, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = empty_store(tmp_path / "whole")
    pack_experts(whole, RandomExperts(), 4, "hqq")
    monkeypatch.setattr(encodings, "BLOCK_WEIGHTS", block)
    monkeypatch.setattr("tiermoe.formats.quantizers.BLOCK_WEIGHTS", 64 * 64)
    source = FromFile(tmp_path / "checkpoint")
    parts, again = (empty_store(tmp_path / name) for name in ("parts", "again"))
    pack_experts(parts, source, 4, "hqq", workers=workers)
    assert source.reads == []
    pack_experts(again, RandomExperts(), 4, "hqq", workers=workers)
    assert contents(parts.root) == contents(again.root)
    if block == 1 << 22:
        assert contents(parts.root) == contents(whole.root)


def test_memory_is_that_of_a_few_rows(tmp_path: Path) -> None:
    """Of an expert that is larger than what workers hold of it."""
    layer = MoeLayer("experts", 8, 2, (Part("gate_up", (28672, 4096)), Part("down", (4096, 14336))))
    form = expert_format(layer, 4, torch.bfloat16, "hqq")
    placed = encode_experts.working_bytes(form, QUANTIZERS["hqq"], None, 3)
    assert 2 * form.stored.nbytes < placed < 300 << 20
    assert encode_experts.working_bytes(form, QUANTIZERS["hqq"], 1 << 20, 3) > 3 * 2 * 28672 * 4096


def test_undefined_weights_are_refused_where_rows_are_read(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint"
    source = FromFile(file)
    segment = source.in_place(1, 2)[1]  # type: ignore[index]
    with open(file, "r+b") as handle:
        handle.seek(segment.offset)
        handle.write(b"\xff\x7f" * 4)
    with pytest.raises(PackError, match="infinite or undefined"):
        pack_experts(empty_store(tmp_path / "store"), source, 4, "hqq", workers=2)
