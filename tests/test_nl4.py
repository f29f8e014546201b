"""4 bits with uneven levels: what is stored against loops that follow the docstrings, scales against brute force."""

from __future__ import annotations

import pytest
import torch

from tiermoe import native
from tiermoe.kernels import cpu, linear_for
from tiermoe.quant import nl4, row_blocks
from tiermoe.quant.nl4 import LEVELS, Nl4
from tiermoe.quant.quantizers import QUANTIZERS
from tiermoe.quant.registry import ROW_MAJOR, cpu_layout, encoding_for, quantizer_used
from tiermoe.store.store import precision_key

NONLINEAR = QUANTIZERS["nonlinear"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_native = pytest.mark.skipif(not native.quantizes(), reason="needs the native kernels")


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def run_of(row: int, group: int, groups: int, size: int) -> int:
    """Where the bytes of a group of `size` columns of a row's block begin, among `groups` of them."""
    return (row // 64 * groups + group) * (128 + 32 * size)


def code_at(content: bytes, columns: int, size: int, row: int, column: int) -> int:
    run = run_of(row, column // size, columns // size, size)
    return content[run + 128 + column % size * 32 + row % 32] >> (4 if row % 64 >= 32 else 0) & 15


def scale_at(content: bytes, columns: int, size: int, row: int, group: int) -> float:
    at = run_of(row, group, columns // size, size) + row % 64 * 2
    return float(torch.frombuffer(bytearray(content[at : at + 2]), dtype=torch.bfloat16))


def content_of(fields: dict[str, torch.Tensor]) -> bytes:
    return fields["blocks"].numpy().tobytes()


def decoded(content: bytes, rows: int, columns: int, size: int) -> torch.Tensor:
    return torch.tensor(
        [
            [
                LEVELS[code_at(content, columns, size, r, c)] * scale_at(content, columns, size, r, c // size)
                for c in range(columns)
            ]
            for r in range(rows)
        ]
    )


def test_the_levels_are_in_order_and_fit_a_byte() -> None:
    assert len(LEVELS) == 16
    assert sorted(set(LEVELS)) == list(LEVELS)
    assert max(map(abs, LEVELS)) <= 127


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [64, 32])
def test_a_weight_is_its_codes_level_times_its_groups_scale(group: int, dtype: torch.dtype) -> None:
    rows, columns = 128, 192
    encoding, weight = Nl4(cpu_layout(), group), random(rows, columns)
    weight[5, :group] = 0
    fields = encoding.encode(weight, NONLINEAR, dtype)
    assert {f.name: (f.dtype, f.shape) for f in encoding.stored_fields(rows, columns, dtype)} == {
        name: (value.dtype, tuple(value.shape)) for name, value in fields.items()
    }
    want = decoded(content_of(fields), rows, columns, group)
    assert torch.equal(encoding.decode(fields, rows, columns, torch.float32), want)
    assert torch.equal(encoding.decode(fields, rows, columns, dtype), want.to(dtype))
    assert not want[5, :group].any()


def test_codes_are_the_nearest_under_their_scale() -> None:
    rows, columns = 64, 96
    weight = random(rows, columns)
    content = content_of(Nl4(cpu_layout(), 32).encode(weight, NONLINEAR, torch.bfloat16))
    for r in range(rows):
        for c in range(columns):
            scale = scale_at(content, columns, 32, r, c // 32)
            distances = [abs(level * scale - float(weight[r, c])) for level in LEVELS]
            got = distances[code_at(content, columns, 32, r, c)]
            assert got <= min(distances) * (1 + 1e-5) + 1e-9


def test_a_scale_is_nearly_as_good_as_the_best_of_thousands() -> None:
    """Of both signs; normal weights, weights with an outlier, and weights to one side of 0."""
    weight = random(64, 96)
    weight[:, 40] *= 6
    weight[:, 64:].abs_()
    encoding, levels = Nl4(cpu_layout(), 32), torch.tensor(LEVELS).double()
    got = encoding.decode(encoding.encode(weight, NONLINEAR, torch.bfloat16), 64, 96, torch.float32)
    groups = weight.double().view(64, 3, 32)
    largest, best = groups.abs().amax(-1), torch.full((64, 3), torch.inf, dtype=torch.float64)
    for step in range(1200):
        for sign in (-1, 1):
            scale = largest * (sign * (0.4 + step / 1000) / 127)
            nearest = (groups[..., None] - levels * scale[..., None, None]).square().amin(-1).sum(-1)
            best = torch.minimum(best, nearest)
    error = (got.double().view(64, 3, 32) - groups).square().sum(-1)
    assert bool((error <= best * 1.15).all())
    assert float(error.sum() / best.sum()) < 1.02


def test_weights_on_the_levels_are_kept() -> None:
    """Under scales of either sign."""
    levels = torch.tensor(LEVELS).float().repeat(2)
    weight = torch.cat((levels * 0.5, levels * -0.25)).repeat(64, 1)
    encoding = Nl4(cpu_layout(), 32)
    fields = encoding.encode(weight, NONLINEAR, torch.float32)
    assert torch.equal(encoding.decode(fields, 64, 64, torch.float32), weight)


@needs_native
@pytest.mark.parametrize("group", [32, 64])
def test_the_native_search_finds_what_torchs_does(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.cat((random(128, 192), random(64, 192, 1) * 1e-30, random(64, 192, 2).pow(3) * 1e3))
    weight[3], weight[70, ::5] = 0.25, 0
    encoding = Nl4(cpu_layout(), group)
    found = encoding.encode(weight, NONLINEAR, torch.bfloat16)["blocks"]
    monkeypatch.setattr(native, "quantizes", lambda: False)
    assert torch.equal(encoding.encode(weight, NONLINEAR, torch.bfloat16)["blocks"], found)


def test_blocks_of_rows_are_those_of_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, weight, columns = Nl4(cpu_layout(), 32), random(320, 128).bfloat16(), 128
    want = encoding.encode(weight, NONLINEAR, torch.bfloat16)["blocks"]
    monkeypatch.setattr(row_blocks, "BLOCK_WEIGHTS", 1)
    monkeypatch.setattr(nl4, "BLOCK_WEIGHTS", 5 * columns)
    got, done = torch.empty_like(want), []
    matrix = row_blocks.Matrix(
        encoding, NONLINEAR, (320, columns), torch.bfloat16, lambda first, last: weight[first:last],
        lambda field, first, value: got[first : first + len(value)].copy_(value),
    )  # fmt: skip
    assert len(list(row_blocks.encode([matrix], done.append))) == 1
    assert done == [1, 2, 3, 4, 5]
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_native_kernels_blocks_are_decoded_and_multiplied(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = Nl4(cpu_layout(), 32)
    fields = encoding.encode(random(320, 128), NONLINEAR, dtype)
    monkeypatch.setattr(cpu, "matrix_form", lambda *_: None)
    monkeypatch.setattr(cpu, "DECODED_BLOCKS", 130 * 128)  # two blocks at a time, and one is left
    kernel, weights = linear_for(encoding.name, "cpu", dtype), encoding.decode(fields, 320, 128, torch.float32)
    step = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    for count in (1, 20):
        x = random(count, 128, 1).to(dtype)
        exact = x.double() @ weights.double().t()
        allowed = x.double().abs() @ weights.double().abs().t() * step
        assert bool(((kernel(x, fields, 320, 128).double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize(
    ("bits", "out", "in_", "layout", "name"),
    [
        (4, 64, 96, cpu_layout(), "nl4/{}/g32"),
        (4, 80, 128, cpu_layout(), "int4/{}/g64"),  # HQQ's
        (4, 80, 96, cpu_layout(), "int4/{}/g32"),
        (4, 64, 48, cpu_layout(), "int8"),
        (4, 64, 128, ROW_MAJOR, "int4/rowmajor/g64"),
        (2, 64, 128, cpu_layout(), "int2/{}/g64"),
    ],
)
def test_what_is_not_taken_is_made_by_hqq(bits: int, out: int, in_: int, layout: str, name: str) -> None:
    encoding = encoding_for(bits, out, in_, torch.bfloat16, layout, "nonlinear")
    assert encoding.name == name.format(layout)
    if encoding.name.startswith("int4"):
        weight = random(out, in_)
        made, hqq = (encoding.encode(weight, QUANTIZERS[each], torch.bfloat16) for each in ("nonlinear", "hqq"))
        assert all(torch.equal(made[field], hqq[field]) for field in hqq)


def test_a_store_calls_what_hqq_makes_by_its_name() -> None:
    cpu_ = cpu_layout()
    assert precision_key(4, "nonlinear", cpu_) == "4-nonlinear"
    assert precision_key(2, "nonlinear", cpu_) == "2-hqq"
    assert precision_key(4, "nonlinear", ROW_MAJOR) == "4-hqq-rowmajor"
    assert precision_key(4, "nonlinear", cpu_, "neuron") == "4-hqq-neuron"
    assert [quantizer_used(name, 4, cpu_) for name in QUANTIZERS] == list(QUANTIZERS)
