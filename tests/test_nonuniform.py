"""NonUniform levels of 4, 3 and 2 bits: what is stored against loops that follow the docstrings, scales against brute
force."""

from __future__ import annotations

import pytest
import torch

from tiermoe import native
from tiermoe.errors import StoreError
from tiermoe.formats.int4 import CPU_LAYOUT, ROW_MAJOR
from tiermoe.formats.nonuniform import LEVELS, NonUniform
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_for, encoding_named, quantizer_used
from tiermoe.formats.store import precision_key

NONLINEAR = QUANTIZERS["nonlinear"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_native = pytest.mark.skipif(not native.quantizes(), reason="needs the native kernels")


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


class Content:
    """The bytes of matrices of so many columns, `size` in a group, in blocks of 64 rows."""

    def __init__(self, fields: dict[str, torch.Tensor], bits: int, columns: int, size: int) -> None:
        self.bytes = fields["blocks"].numpy().tobytes()
        self.bits, self.columns, self.size = bits, columns, size

    def run(self, row: int, group: int) -> int:
        """Where the bytes of a group of a row's block begin."""
        return (row // 64 * (self.columns // self.size) + group) * (128 + 8 * self.bits * self.size)

    def code(self, row: int, column: int) -> int:
        """Of four columns, planes of 32 bytes."""
        four = self.run(row, column // self.size) + 128 + column % self.size // 4 * 32 * self.bits
        shift, place = 4 if row % 64 >= 32 else 0, column % 4
        planes = [self.bytes[four + 32 * plane + row % 32] >> shift & 15 for plane in range(self.bits)]
        if self.bits == 4:
            return planes[place]
        if self.bits == 2:
            return planes[place // 2] >> 2 * (place % 2) & 3
        return planes[place] & 7 if place < 3 else sum(planes[bit] >> 3 << bit for bit in range(3))

    def scale(self, row: int, group: int) -> float:
        at = self.run(row, group) + row % 64 * 2
        return float(torch.frombuffer(bytearray(self.bytes[at : at + 2]), dtype=torch.bfloat16))

    def decoded(self, rows: int) -> torch.Tensor:
        return torch.tensor(
            [
                [LEVELS[self.bits][self.code(r, c)] * self.scale(r, c // self.size) for c in range(self.columns)]
                for r in range(rows)
            ]
        )


@pytest.mark.parametrize("bits", LEVELS)
def test_the_levels_are_in_order_and_fit_a_byte(bits: int) -> None:
    assert len(LEVELS[bits]) == 1 << bits
    assert sorted(set(LEVELS[bits])) == list(LEVELS[bits])
    assert max(map(abs, LEVELS[bits])) <= 127


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [64, 32])
@pytest.mark.parametrize("bits", LEVELS)
def test_a_weight_is_its_codes_level_times_its_groups_scale(bits: int, group: int, dtype: torch.dtype) -> None:
    rows, columns = 128, 192
    encoding, weight = NonUniform(bits, CPU_LAYOUT, group), random(rows, columns)
    weight[5, :group] = 0
    fields = encoding.encode(weight, NONLINEAR, dtype)
    assert {f.name: (f.dtype, f.shape) for f in encoding.stored_fields(rows, columns, dtype)} == {
        name: (value.dtype, tuple(value.shape)) for name, value in fields.items()
    }
    want = Content(fields, bits, columns, group).decoded(rows)
    assert torch.equal(encoding.decode(fields, rows, columns, torch.float32), want)
    assert torch.equal(encoding.decode(fields, rows, columns, dtype), want.to(dtype))
    assert not want[5, :group].any()


@pytest.mark.parametrize("bits", LEVELS)
def test_codes_are_the_nearest_under_their_scale(bits: int) -> None:
    rows, columns = 64, 96
    weight = random(rows, columns)
    content = Content(NonUniform(bits, CPU_LAYOUT, 32).encode(weight, NONLINEAR, torch.bfloat16), bits, columns, 32)
    for r in range(rows):
        for c in range(columns):
            scale = content.scale(r, c // 32)
            distances = [abs(level * scale - float(weight[r, c])) for level in LEVELS[bits]]
            got = distances[content.code(r, c)]
            assert got <= min(distances) * (1 + 1e-5) + 1e-9


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (3, 64), (2, 64)])
def test_a_scale_is_nearly_as_good_as_the_best_of_thousands(bits: int, group: int) -> None:
    """Of both signs; normal weights, weights with an outlier, and weights to one side of 0."""
    columns = 3 * group
    weight = random(64, columns)
    weight[:, group + 8] *= 6
    weight[:, 2 * group :].abs_()
    encoding, levels = NonUniform(bits, CPU_LAYOUT, group), torch.tensor(LEVELS[bits]).double()
    got = encoding.decode(encoding.encode(weight, NONLINEAR, torch.bfloat16), 64, columns, torch.float32)
    groups = weight.double().view(64, 3, group)
    largest, best = groups.abs().amax(-1), torch.full((64, 3), torch.inf, dtype=torch.float64)
    for step in range(1200):
        for sign in (-1, 1):
            scale = largest * (sign * (0.2 + step / 1000) / 127)
            nearest = (groups[..., None] - levels * scale[..., None, None]).square().amin(-1).sum(-1)
            best = torch.minimum(best, nearest)
    error = (got.double().view(64, 3, group) - groups).square().sum(-1)
    assert bool((error <= best * 1.15).all())
    assert float(error.sum() / best.sum()) < 1.02


@pytest.mark.parametrize("bits", LEVELS)
def test_weights_on_the_levels_are_kept(bits: int) -> None:
    """Under scales of either sign."""
    levels = torch.tensor(LEVELS[bits]).float().repeat(32 >> bits)
    weight = torch.cat((levels * 0.5, levels * -0.25)).repeat(64, 1)
    encoding = NonUniform(bits, CPU_LAYOUT, 32)
    fields = encoding.encode(weight, NONLINEAR, torch.float32)
    assert torch.equal(encoding.decode(fields, 64, 64, torch.float32), weight)


@needs_native
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("bits", LEVELS)
def test_the_native_search_finds_what_torchs_does(bits: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.cat((random(128, 192), random(64, 192, 1) * 1e-30, random(64, 192, 2).pow(3) * 1e3))
    weight[3], weight[70, ::5] = 0.25, 0
    encoding = NonUniform(bits, CPU_LAYOUT, group)
    found = encoding.encode(weight, NONLINEAR, torch.bfloat16)["blocks"]
    monkeypatch.setattr(native, "quantizes", lambda: False)
    assert torch.equal(encoding.encode(weight, NONLINEAR, torch.bfloat16)["blocks"], found)


def test_a_store_calls_what_hqq_makes_by_its_name() -> None:
    cpu_ = CPU_LAYOUT
    assert precision_key(4, "nonlinear", cpu_) == "4-nonlinear"
    assert precision_key(2, "nonlinear", cpu_) == "2-nonlinear"
    assert precision_key(4, "nonlinear", ROW_MAJOR) == "4-hqq-rowmajor"
    assert precision_key(4, "nonlinear", cpu_, "neuron") == "4-hqq-neuron"
    assert precision_key(4, "hqq-double", cpu_, "neuron") == "4-hqq-double-neuron"
    assert precision_key(2, "hqq-double", cpu_, "neuron") == "2-hqq-neuron"
    assert precision_key(4, "hqq-double", ROW_MAJOR) == "4-hqq-rowmajor"
    for bits in (4, 2):
        used = [quantizer_used(name, bits, cpu_) for name in QUANTIZERS]
        assert used == ["hqq" if name == "hqq-double" else name for name in QUANTIZERS]


def test_3_bits_are_uneven_whatever_the_quantizer() -> None:
    for name in QUANTIZERS:
        assert encoding_for(3, 64, 128, torch.bfloat16, CPU_LAYOUT, name) == NonUniform(3, CPU_LAYOUT, 64)
        used = "gptq-nonlinear" if name.startswith("gptq") else "nonlinear"
        assert precision_key(3, name, CPU_LAYOUT) == f"3-{used}"


@pytest.mark.parametrize("name", ["nl4/{}/g64", "nl3/{}/g128", "nl6/{}/g32", "int3/{}/g64"])
def test_names_that_no_version_writes_are_refused(name: str) -> None:
    with pytest.raises(StoreError, match="unknown encoding"):
        encoding_named(name.format(CPU_LAYOUT))
