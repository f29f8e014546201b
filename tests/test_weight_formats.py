"""What holds of every weight format: a table of encodings, and a claim a test."""

from __future__ import annotations

import math

import pytest
import torch

from measures import relative_error
from tiermoe.errors import PackError
from tiermoe.formats import encode_matrix, int6, nonuniform, quantizers, trellis
from tiermoe.formats.encoding import Encoding, Field, RowBlocks
from tiermoe.formats.int4 import CPU_LAYOUT, ROW_MAJOR
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_for, encoding_named
from tiermoe.kernels import linear
from tiermoe.kernels.linear import linear_for

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Each with the step by which a product may differ, of the sum of magnitudes."""

FORMATS = {  # name → the largest relative error of normal weights, quantised by HQQ where the format leaves it open
    "plain": 0.003, "int8": 0.01, "int6/{}/g32": 0.03, "int6/{}/g64": 0.03,
    "int4/{}/g32": 0.09, "int4/{}/g64": 0.09, "int4/rowmajor/g64": 0.09, "u2/{}/g64": 0.45, "u2/rowmajor/g32": 0.45,
    "nl4/{}/g32": 0.09, "nl3/{}/g32": 0.18, "nl3/{}/g64": 0.18, "nl2/{}/g64": 0.35, "tcq2/{}/g64": 0.3,
    "tcq2/{}/g128": 0.3,
}  # fmt: skip


@pytest.fixture(params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def encoding(name: str) -> Encoding:
    return encoding_named(name.format(CPU_LAYOUT))


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def is_declared(values: dict[str, torch.Tensor], fields: tuple[Field, ...]) -> bool:
    """Whether values are the fields, in their order, dense."""
    declared = [(each.name, each.dtype, each.shape, each.nbytes) for each in fields]
    dense = all(value.is_contiguous() for value in values.values())
    return dense and declared == [
        (name, value.dtype, tuple(value.shape), value.nbytes) for name, value in values.items()
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_known_by_its_name_and_gives_its_fields(name: str, encoding: Encoding, dtype: torch.dtype) -> None:
    assert encoding.name == name.format(CPU_LAYOUT)
    weight = random(128, 256)
    fields = encoding.encode(weight.to(dtype), QUANTIZERS["hqq"], dtype)
    declared = encoding.stored_fields(128, 256, dtype)
    assert is_declared(fields, declared)
    assert encoding.slot_fields(128, 256, dtype) == declared
    for into in DTYPES:
        decoded = encoding.decode(fields, 128, 256, into)
        assert (decoded.dtype, decoded.shape) == (into, weight.shape)
        assert relative_error(weight, decoded) < FORMATS[name]


def test_blocks_of_rows_are_those_of_the_whole_matrix(encoding: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the squares of what is lost, whoever encodes them: C, or torch by blocks of its own."""
    rows, columns, hqq = 320, 128, QUANTIZERS["hqq"]
    weight = random(rows, columns).bfloat16()
    monkeypatch.setattr(quantizers, "BLOCK_WEIGHTS", 4 * columns)  # HQQ's sums end by blocks of whole matrices
    want = encoding.encode(weight, hqq, torch.bfloat16)
    monkeypatch.setattr(encode_matrix, "BLOCK_WEIGHTS", 1)
    for module in (int6, nonuniform, trellis):
        monkeypatch.setattr(module, "BLOCK_WEIGHTS", 4 * columns)
    got, done = {name: torch.empty_like(value) for name, value in want.items()}, []

    def write(field: Field, first: int, value: torch.Tensor) -> None:
        got[field.name].narrow(field.rows_at, first, value.shape[field.rows_at]).copy_(value)

    matrix = encode_matrix.Matrix(
        encoding, hqq, (rows, columns), torch.bfloat16, lambda first, last: weight[first:last], write
    )
    (squares,) = encode_matrix.encode([matrix], done.append)
    assert len(done) > 1
    assert done == list(range(1, len(done) + 1))
    assert all(torch.equal(got[name], want[name]) for name in want)
    lost = relative_error(weight.float(), encoding.decode(want, rows, columns, torch.bfloat16).float())
    assert math.sqrt(squares[0] / squares[1]) == pytest.approx(lost, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_native_kernels_a_product_is_that_of_the_decoded_weights(
    encoding: Encoding, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = encoding.encode(random(320, 128), QUANTIZERS["hqq"], dtype)
    monkeypatch.setattr(linear, "matrix_form", lambda *_: None)
    monkeypatch.setattr(linear, "DECODED_BLOCKS", 130 * 128)  # two blocks at a time, and one is left
    kernel, weight = linear_for(encoding.name, "cpu", dtype), encoding.decode(fields, 320, 128, torch.float32)
    assert isinstance(kernel, linear.BlocksLinear) == isinstance(encoding, RowBlocks)
    for count in (1, 20):
        x = random(count, 128, 1).to(dtype)
        exact = x.double() @ weight.double().t()
        allowed = x.double().abs() @ weight.double().abs().t() * DTYPES[dtype]
        assert bool(((kernel(x, fields, 320, 128).double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_undefined_weights_are_refused(encoding: Encoding, value: float) -> None:
    if encoding.bits == 16:
        pytest.skip("the checkpoint's own weights")
    weight = random(64, 128)
    weight[3, 5] = value
    for quantizer in QUANTIZERS.values():
        with pytest.raises(PackError, match="infinite or undefined"):
            encoding.encode(weight, quantizer, torch.float32)


def bits_of(encoding: Encoding) -> float:
    """Bits of a weight of a matrix (2048, 1024) in a store."""
    fields = encoding.stored_fields(2048, 1024, torch.bfloat16)
    assert encoding.slot_fields(2048, 1024, torch.bfloat16) == fields
    return sum(field.nbytes for field in fields) * 8 / (2048 * 1024)


@pytest.mark.parametrize(
    ("bits", "quantizer", "stored"),
    [
        (16, "hqq", 16), (8, "hqq", 8 + 16 / 1024), (6, "hqq", 6.5), (4, "hqq", 4.5), (4, "linear", 4 + 32 / 256),
        (4, "nonlinear", 4.5), (3, "nonlinear", 3.25), (2, "nonlinear", 2.25), (2, "gptq-nonlinear", 2.125),
        (2, "hqq", 2.5), (2, "linear", 2 + 32 / 256),
    ],
)  # fmt: skip
def test_bits_of_a_weight_in_store_and_slot(bits: int, quantizer: str, stored: float) -> None:
    assert bits_of(encoding_for(bits, 2048, 1024, torch.bfloat16, CPU_LAYOUT, quantizer)) == stored


SHAPES = [
    ("hqq", 16, 7, 33, "plain"), ("hqq", 8, 7, 33, "int8"),
    ("hqq", 6, 64, 128, "int6/{}/g32"), ("linear", 6, 64, 96, "int6/{}/g32"), ("hqq", 6, 80, 64, "int8"),
    ("hqq", 6, 64, 48, "int8"),
    ("hqq", 4, 64, 128, "int4/{}/g64"), ("hqq", 4, 64, 96, "int4/{}/g32"), ("gptq", 4, 64, 128, "int4/{}/g64"),
    ("linear", 4, 64, 1024, "int4/{}/g256"), ("linear", 4, 64, 384, "int4/{}/g128"), ("hqq", 4, 64, 100, "int8"),
    ("hqq", 4, 24, 128, "int8"), ("gptq-nonlinear", 4, 64, 128, "nl4/{}/g32"),
    ("nonlinear", 4, 64, 96, "nl4/{}/g32"), ("nonlinear", 4, 80, 128, "int4/{}/g64"),
    ("nonlinear", 4, 80, 96, "int4/{}/g32"), ("nonlinear", 4, 64, 48, "int8"),
    ("nonlinear", 3, 64, 96, "nl3/{}/g32"), ("nonlinear", 3, 80, 128, "int8"),
    *((quantizer, 3, 64, 128, "nl3/{}/g64") for quantizer in QUANTIZERS),
    ("hqq", 2, 64, 128, "u2/{}/g64"), ("hqq", 2, 64, 96, "u2/{}/g32"), ("linear", 2, 64, 1024, "u2/{}/g256"),
    ("hqq", 2, 64, 48, "int8"), ("hqq", 2, 24, 128, "int8"), ("gptq-nonlinear", 2, 64, 128, "tcq2/{}/g128"),
    ("gptq-nonlinear", 2, 64, 192, "tcq2/{}/g64"), ("gptq-nonlinear", 2, 64, 96, "nl2/{}/g32"),
    ("nonlinear", 2, 64, 128, "nl2/{}/g64"), ("nonlinear", 2, 64, 96, "nl2/{}/g32"),
    ("nonlinear", 2, 80, 128, "u2/{}/g64"),
]  # fmt: skip
ON_A_GPU = [
    ("hqq", 6, 64, 64, "int8"), ("nonlinear", 4, 64, 128, "int4/rowmajor/g64"), ("nonlinear", 3, 64, 128, "int8"),
    ("nonlinear", 2, 64, 128, "u2/rowmajor/g64"), ("hqq", 4, 7, 96, "int4/rowmajor/g32"), ("hqq", 4, 7, 100, "int8"),
    ("hqq", 2, 7, 96, "u2/rowmajor/g32"), ("hqq", 2, 7, 100, "int8"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "case"), [*((CPU_LAYOUT, case) for case in SHAPES), *((ROW_MAJOR, case) for case in ON_A_GPU)]
)
def test_the_encoding_of_a_shape(layout: str, case: tuple[str, int, int, int, str]) -> None:
    """One that a shape does not fit is made by HQQ, or has 8 bits."""
    quantizer, bits, out, in_, expected = case
    encoding = encoding_for(bits, out, in_, torch.bfloat16, layout, quantizer)
    assert encoding.name == expected.format(layout)
    assert encoding_named(encoding.name) == encoding
    if quantizer == "nonlinear" and encoding.name.startswith(("int4", "u2")):
        made, hqq = (encoding.encode(random(out, in_), QUANTIZERS[each], torch.bfloat16) for each in (quantizer, "hqq"))
        assert all(torch.equal(made[field], hqq[field]) for field in hqq)


@pytest.mark.parametrize("bits", [8, 6, 4, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, 0.375, -0.375])
def test_equal_weights_are_kept(bits: int, dtype: torch.dtype, value: float) -> None:
    weight = torch.full((64, 64), value, dtype=dtype)
    for name, quantizer in QUANTIZERS.items():
        encoding = encoding_for(bits, 64, 64, dtype, CPU_LAYOUT, name)
        if isinstance(encoding, trellis.Trellis) and value:
            continue  # no run of a trellis has the same level 64 times
        decoded = encoding.decode(encoding.encode(weight, quantizer, dtype), 64, 64, torch.float32)
        torch.testing.assert_close(decoded, weight.float(), rtol=0.01, atol=0)
