"""What holds of every weight format: a table of encodings, and a claim a test. What is stored is taken apart as
docs/formats.md has it."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from measures import relative_error
from tiermoe.errors import ConfigError, PackError, StoreError
from tiermoe.formats import encoding as encodings
from tiermoe.formats import int4, int6, nonuniform, quantizers, trellis
from tiermoe.formats.encoding import ORDER, Encoding, Field, RowBlocks
from tiermoe.formats.expert_format import expert_format
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_for, encoding_named, quantizer_used
from tiermoe.formats.store import precision_key
from tiermoe.kernels import linear
from tiermoe.kernels.linear import linear_for
from tiermoe.types import MoeLayer, Part

pytestmark = pytest.mark.usefixtures("one_thread")

HQQ = QUANTIZERS["hqq"]
DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Each with the step by which a product may differ, of the sum of magnitudes."""

FORMATS = {  # name → the largest relative error of normal weights, quantised by HQQ where the format leaves it open
    "plain": 0.003, "int8": 0.01, "int6/{}/g32": 0.03, "int6/{}/g64": 0.03,
    "int4/{}/g32": 0.09, "int4/{}/g64": 0.09, "u2/{}/g64": 0.45,
    "nl4/{}/g32": 0.09, "nl3/{}/g32": 0.18, "nl3/{}/g64": 0.18, "nl2/{}/g64": 0.35, "tcq2/{}/g64": 0.3,
    "tcq2/{}/g128": 0.3,
}  # fmt: skip


@pytest.fixture(params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def encoding(name: str) -> Encoding:
    return encoding_named(name.format(ORDER))


def random(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


class Page(NamedTuple):
    """A matrix by its format's page, float64: levels[codes] * scale + zero, each (rows, columns) but the levels."""

    codes: Tensor
    levels: Tensor
    scale: Tensor
    zero: Tensor

    def weights(self) -> Tensor:
        return self.levels[self.codes] * self.scale + self.zero

    def nearest(self, weight: Tensor) -> Tensor:
        """The distance of the nearest level from each weight."""
        there = self.levels * self.scale[..., None] + self.zero[..., None]
        return (there - weight[..., None]).abs().amin(-1)


def by_the_page(encoding: Encoding, fields: dict[str, Tensor], rows: int, columns: int) -> Page:
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None]
    kind, group, bits = encoding.name.partition("/")[0], getattr(encoding, "group", columns), encoding.bits
    if kind == "int8":
        codes, levels = fields["weight"].long() + 128, torch.arange(-128, 128)
        return _page(codes, levels, fields["scale"][r.expand(rows, columns)])
    if kind in ("int4", "u2"):
        levels = torch.arange(2**bits) - 2 ** (bits - 1)
        nibbles = _nibbles(fields["codes"], r, c * bits // 4, columns * bits // 4)
        scale, zero = fields["scales_and_zeros"][c // group, r].unbind(-1)
        return _page(nibbles >> bits * (c % (4 // bits)) & 2**bits - 1, levels, scale, zero)
    j, upper, run = r % 32, r % 64 // 32 * 4, r // 64 * columns + c // 4 * 4  # a run has four columns of a block
    if kind.startswith("nl"):
        content, levels = fields["blocks"].flatten().long(), torch.tensor(nonuniform.LEVELS[bits])
        begin = (r // 64 * (columns // group) + c // group) * (128 + 8 * bits * group)
        four = begin + 128 + c % group // 4 * 32 * bits
        planes = torch.stack([content[four + 32 * plane + j] >> upper & 15 for plane in range(bits)])
        scale = content[begin + r % 64 * 2] << 16 | content[begin + r % 64 * 2 + 1] << 24
        return _page(_uneven(planes, c % 4, bits), levels, scale.int().view(torch.float32))
    content = fields["codes"].flatten().long()
    scale = fields["scales"].flatten()[(r // 64 * (columns // group) + c // group) * 64 + r % 64]
    if kind == "int6":
        low = content[run * 48 + c % 4 * 32 + j] >> upper & 15
        high = content[run * 48 + 128 + c % 4 // 2 * 32 + j] >> 4 * (c % 2) + 2 * (1 - r % 64 // 32) & 3
        return _page(low | high << 4, torch.arange(-32, 32), scale)
    assert kind == "tcq2"
    byte, i, first = r % 16, r % 64 // 16, run * 16 + torch.tensor([0, 2, 1, 3])[c % 4]
    word = content[first + (byte - 1) % 16 * 4] | content[first + byte * 4] << 8
    index = (word & torch.tensor(trellis.KEPT)[i]) * torch.tensor(trellis.FACTORS)[i] >> 16 & 31
    return _page(index, torch.tensor(trellis.LEVELS), scale)


def _page(codes: Tensor, levels: Tensor, scale: Tensor, zero: Tensor | None = None) -> Page:
    zero = torch.zeros_like(scale) if zero is None else zero
    return Page(codes, levels.double(), scale.double(), zero.double())


def _nibbles(packed: Tensor, r: Tensor, c: Tensor, columns: int) -> Tensor:
    """The nibbles: blocks of 64 rows, the last one of the rest."""
    rows = len(packed)
    whole = r < rows // 64 * 64
    size = torch.where(whole, 64, rows % 64)
    byte, upper = torch.where(whole, r % 32, r % 64 // 2), torch.where(whole, r % 64 // 32, r % 2)
    return packed.flatten().long()[(r // 64 * 64 * columns + c * size) // 2 + byte] >> 4 * upper & 15


def _uneven(planes: Tensor, place: Tensor, bits: int) -> Tensor:
    """The codes of one column of four, `place`, from planes (bits, rows, columns) of nibbles."""
    if bits == 2:
        return torch.where(place < 2, planes[0], planes[1]) >> 2 * (place % 2) & 3
    if bits == 4:
        return planes.gather(0, place.expand(planes.shape[1:])[None])[0]
    own = planes.gather(0, place.clamp(max=2).expand(planes.shape[1:])[None])[0] & 7
    return torch.where(place < 3, own, sum(planes[bit] >> 3 << bit for bit in range(3)))


def random_fields(encoding: Encoding, rows: int, columns: int, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Any bytes are codes; scales and zeros have both signs."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for field in encoding.stored_fields(rows, columns, dtype):
        if field.dtype.is_floating_point:
            signs = torch.randint(0, 2, field.shape, generator=generator) * 2 - 1
            found[field.name] = (signs * (torch.rand(field.shape, generator=generator) * 0.1 + 0.02)).to(field.dtype)
        else:
            codes = torch.randint(0, 256, field.shape, generator=generator)
            found[field.name] = codes.to(torch.uint8).view(field.dtype)
    if isinstance(encoding, nonuniform.NonUniform):
        runs = found["blocks"].view(-1, 128 + 8 * encoding.bits * encoding.group)
        runs[:, 1:128:2] = runs[:, 1:128:2] & 0x80 | 0x3C  # the scales' exponents
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bytes_stand_for_what_the_page_says(name: str, encoding: Encoding, dtype: torch.dtype) -> None:
    """Rounded once."""
    columns = 256
    if name == "plain":
        pytest.skip("the checkpoint's own weights")
    for seed, rows in enumerate((128, 64) if isinstance(encoding, RowBlocks) else (16, 144, 336)):
        fields = random_fields(encoding, rows, columns, dtype, seed)
        want = by_the_page(encoding, fields, rows, columns).weights()
        got = encoding.decode(fields, rows, columns, dtype)
        if dtype == torch.float32:
            torch.testing.assert_close(got, want.float(), rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(got, want.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_the_nearest_under_what_is_stored(name: str, encoding: Encoding, dtype: torch.dtype) -> None:
    """Of weights around 0 and far from it, with outliers, equal ones and zeros."""
    if name == "plain" or isinstance(encoding, trellis.Trellis):
        pytest.skip("no codes, or codes that are chosen together")
    rows, columns = (128 if isinstance(encoding, RowBlocks) else 80), 256
    weight = random(rows, columns)
    weight[:, 64:128] -= 3
    weight[:, 128:192] = (weight[:, 128:192] * 20) ** 5
    weight[3, :64], weight[5, :128], weight[7] = 0.25, 0, 0
    weight = weight.to(dtype)
    found = by_the_page(encoding, encoding.encode(weight, HQQ, dtype), rows, columns)
    error = (found.weights() - weight.double()).abs()
    assert bool((error <= found.nearest(weight.double()) * (1 + 1e-3) + 1e-5 * found.scale.abs() + 1e-9).all())
    assert not found.weights()[7].any()


def test_codes_of_4_bits_lie_as_torchs_operator_takes_them() -> None:
    """On a machine with AVX-512; the name of the CPUs' order says so."""
    if not int4.is_torchs():
        pytest.skip("torch's operator takes another order here")
    for rows in (16, 48, 64, 80, 336):
        codes = torch.randint(0, 16, (rows, 96), generator=torch.Generator().manual_seed(rows)).to(torch.uint8)
        theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        assert torch.equal(int4.pack(codes).flatten(), theirs.flatten())


@pytest.mark.parametrize("bits", [4, 2])
def test_4_and_2_bits_decode_in_blocks_of_columns(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = encoding_for(bits, 80, 320, torch.bfloat16)
    fields = encoding.encode(random(80, 320), HQQ, torch.bfloat16)
    whole = encoding.decode(fields, 80, 320, torch.float32)
    monkeypatch.setattr(int4, "BLOCK_WEIGHTS", 2 * 64 * 80)  # two groups, and a block of one group at the end
    assert torch.equal(encoding.decode(fields, 80, 320, torch.float32), whole)


def own_weights(name: str) -> Tensor:
    """Weights that a format keeps as they are: of its levels, under scales of both signs."""
    weight = torch.zeros(64, 128)
    if name == "int6":
        steps = torch.arange(64.0)
        weight[0, :64] = (steps - 32) * 0.5  # the largest is the most negative: code 0
        weight[1, :64] = (32 - steps) * 0.5  # the same with a scale below 0
        weight[2, :64] = (steps - 31).clamp(max=31) * 0.5  # as far up as down: 31 steps
        weight[2, 64:] = -weight[2, :64]
        return weight
    if name == "u2":
        return torch.tensor([-0.5, 0.0, 0.5, 0.5]).repeat(64, 32)
    levels = torch.tensor(nonuniform.LEVELS[int(name[-1])]).float().repeat(32 >> int(name[-1]))
    return torch.cat((levels * 0.5, levels * -0.25)).repeat(64, 2)


@pytest.mark.parametrize("name", ["int6/{}/g64", "u2/{}/g64", "nl4/{}/g32", "nl3/{}/g32", "nl2/{}/g32"])
def test_weights_on_its_levels_are_kept(name: str) -> None:
    encoding, weight = encoding_named(name.format(ORDER)), own_weights(name.partition("/")[0])
    fields = encoding.encode(weight, QUANTIZERS["linear"], torch.float32)
    assert torch.equal(encoding.decode(fields, 64, 128, torch.float32), weight)


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (3, 64), (2, 64)])
def test_an_uneven_scale_is_nearly_as_good_as_the_best_of_thousands(bits: int, group: int) -> None:
    """Of both signs; normal weights, weights with an outlier, and weights to one side of 0."""
    columns = 3 * group
    weight = random(64, columns)
    weight[:, group + 8] *= 6
    weight[:, 2 * group :].abs_()
    encoding = nonuniform.NonUniform(bits, group)
    levels = torch.tensor(nonuniform.LEVELS[bits]).double()
    got = encoding.decode(encoding.encode(weight, HQQ, torch.bfloat16), 64, columns, torch.float32)
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


def is_declared(values: dict[str, Tensor], fields: tuple[Field, ...]) -> bool:
    """Whether values are the fields, in their order, dense."""
    declared = [(each.name, each.dtype, each.shape, each.nbytes) for each in fields]
    dense = all(value.is_contiguous() for value in values.values())
    return dense and declared == [
        (name, value.dtype, tuple(value.shape), value.nbytes) for name, value in values.items()
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_known_by_its_name_and_gives_its_fields(name: str, encoding: Encoding, dtype: torch.dtype) -> None:
    assert encoding.name == name.format(ORDER)
    weight = random(128, 256)
    fields = encoding.encode(weight.to(dtype), HQQ, dtype)
    declared = encoding.stored_fields(128, 256, dtype)
    assert is_declared(fields, declared)
    assert encoding.slot_fields(128, 256, dtype) == declared
    for into in DTYPES:
        decoded = encoding.decode(fields, 128, 256, into)
        assert (decoded.dtype, decoded.shape) == (into, weight.shape)
        assert relative_error(weight, decoded) < FORMATS[name]


def test_blocks_of_rows_are_those_of_the_whole_matrix(encoding: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one worker and by several, with the squares of what is lost; whoever encodes them, C or torch."""
    rows, columns = 320, 128
    weight = random(rows, columns).bfloat16()
    monkeypatch.setattr(quantizers, "BLOCK_WEIGHTS", 4 * columns)  # HQQ's sums end by blocks of whole matrices
    want = encoding.encode(weight, HQQ, torch.bfloat16)
    monkeypatch.setattr(encodings, "BLOCK_WEIGHTS", 1)
    for module in (int6, nonuniform, trellis):
        monkeypatch.setattr(module, "BLOCK_WEIGHTS", 4 * columns)
    for workers in (1, 3):
        got, done = {name: torch.empty_like(value) for name, value in want.items()}, list[int]()

        def write(field: Field, first: int, value: Tensor, into: dict[str, Tensor] = got) -> None:
            into[field.name].narrow(field.rows_at, first, value.shape[field.rows_at]).copy_(value)

        matrix = encodings.Matrix(
            encoding, HQQ, (rows, columns), torch.bfloat16, lambda first, last: weight[first:last], write
        )
        (squares,) = encodings.encode_matrices([matrix], done.append, workers)
        assert len(done) > 1
        assert done == list(range(1, len(done) + 1))
        assert all(torch.equal(got[name], want[name]) for name in want)
    lost = relative_error(weight.float(), encoding.decode(want, rows, columns, torch.bfloat16).float())
    assert math.sqrt(squares[0] / squares[1]) == pytest.approx(lost, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_native_kernels_a_product_is_that_of_the_decoded_weights(
    encoding: Encoding, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = encoding.encode(random(320, 128), HQQ, dtype)
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
    assert bits_of(encoding_for(bits, 2048, 1024, torch.bfloat16, quantizer)) == stored


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


@pytest.mark.parametrize("case", SHAPES)
def test_the_encoding_of_a_shape(case: tuple[str, int, int, int, str]) -> None:
    """One that a shape does not fit is made by HQQ, or has 8 bits."""
    quantizer, bits, out, in_, expected = case
    encoding = encoding_for(bits, out, in_, torch.bfloat16, quantizer)
    assert encoding.name == expected.format(ORDER)
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
        encoding = encoding_for(bits, 64, 64, dtype, name)
        if isinstance(encoding, trellis.Trellis) and value:
            continue  # no run of a trellis has the same level 64 times
        decoded = encoding.decode(encoding.encode(weight, quantizer, dtype), 64, 64, torch.float32)
        torch.testing.assert_close(decoded, weight.float(), rtol=0.01, atol=0)


def test_what_cannot_be_encoded_is_refused() -> None:
    for bits, dtype, quantizer, told in (
        (5, torch.bfloat16, "hqq", "no 5-bit encoding"),
        (4, torch.float64, "hqq", "float64"),
        *((bits, torch.bfloat16, "awq", "unknown quantizer 'awq'") for bits in (4, 2)),
    ):
        with pytest.raises(ConfigError, match=told):
            encoding_for(bits, 64, 64, dtype, quantizer)
    for name, device in (("int8", "xpu"), (f"int4/{ORDER}/g64", "mps"), ("gguf/q4_k", "cuda")):
        with pytest.raises(ConfigError, match=f"no kernel for '{name}' on '{device}'"):
            linear_for(name, device, torch.bfloat16)


def test_names_of_other_orders_and_versions_are_refused() -> None:
    for name, told in (
        *((f"{kind}/cpu-avx2/g64", "older version") for kind in ("int6", "int4", "u2")),
        ("int4/rowmajor/g64", "older version"),
        (f"int2/{ORDER}/g64", "older version"),  # until November 2026
        *((name, "unknown encoding") for name in ("int3", "int4/cpu-avx2/g48", "int4", "u2/g16", "int8/cpu-avx2/g64")),
        *((f"{kind}/{ORDER}/{group}", "unknown encoding")
          for kind, group in (("nl4", "g64"), ("nl3", "g128"), ("nl6", "g32"), ("int3", "g64"))),
    ):  # fmt: skip
        with pytest.raises(StoreError, match=told):
            encoding_named(name)


def test_a_store_calls_codes_by_the_quantizer_that_makes_them() -> None:
    for bits, quantizer, unit, key in (
        (4, "nonlinear", "expert", "4-nonlinear"), (2, "nonlinear", "expert", "2-nonlinear"),
        (4, "nonlinear", "neuron", "4-hqq-neuron"), (4, "gptq-nonlinear", "neuron", "4-hqq-neuron"),
        (4, "hqq-double", "neuron", "4-hqq-double-neuron"), (2, "hqq-double", "neuron", "2-hqq-neuron"),
        (4, "hqq-double", "expert", "4-hqq"),
        *((3, name, "expert", "3-gptq-nonlinear" if name.startswith("gptq") else "3-nonlinear") for name in QUANTIZERS),
    ):  # fmt: skip
        assert precision_key(bits, quantizer, unit) == key
    for bits in (4, 2):
        used = [quantizer_used(name, bits) for name in QUANTIZERS]
        assert used == ["hqq" if name == "hqq-double" else name for name in QUANTIZERS]


@pytest.mark.parametrize(
    ("hidden", "inner", "names"),
    [
        (256, 64, ("tcq2/{}/g128", "nl3/{}/g64")), (192, 128, ("tcq2/{}/g64", "nl3/{}/g64")),
        (96, 64, ("nl2/{}/g32", "u2/{}/g64")), (256, 48, ("u2/{}/g64", "int8")),
    ],
)  # fmt: skip
def test_down_projections_have_three_bits_beside_a_trellis(hidden: int, inner: int, names: tuple[str, str]) -> None:
    layer = MoeLayer("mlp", 4, 2, (Part("gate_up_proj", (2 * inner, hidden)), Part("down_proj", (hidden, inner))))
    form = expert_format(layer, 2, torch.bfloat16, "gptq-nonlinear")
    assert [each.name for each in form.encodings.values()] == [name.format(ORDER) for name in names]
    uncalibrated = expert_format(layer, 2, torch.bfloat16, "nonlinear")
    assert not any(isinstance(each, trellis.Trellis) for each in uncalibrated.encodings.values())
