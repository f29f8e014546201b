"""The row-major encodings of 4 and 2 bits: what they mean, and that they work without a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from measures import relative_error
from tiermoe.errors import ConfigError
from tiermoe.formats.int2 import Int2, RowMajorInt2
from tiermoe.formats.int4 import CPU_LAYOUT, Int4, RowMajorInt4
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_for, encoding_named
from tiermoe.kernels.linear import linear_for

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
matrices = st.builds(
    lambda seed, rows, groups, scale, mean: (
        torch.randn(16 * rows, 64 * groups, generator=torch.Generator().manual_seed(seed)) * scale + mean
    ),
    st.integers(0, 1000),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1e-3, 0.05, 1.0]),
    st.sampled_from([0.0, 0.1, -1.0]),
)


def by_definition(slot: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    packed, scale, zero = slot["codes"], slot["scale"].double(), slot["zero"].double()
    rows, columns = packed.shape[0], packed.shape[1] * 2
    weights = torch.empty(rows, columns, dtype=torch.float64)
    for k in range(columns):
        code = packed[:, k // 2] & 15 if k % 2 == 0 else packed[:, k // 2] >> 4
        group = k * scale.shape[1] // columns
        weights[:, k] = (code.double() - 8) * scale[:, group] + zero[:, group]
    return weights.to(dtype)


@settings(max_examples=25, deadline=None)
@given(weight=matrices, dtype=st.sampled_from(DTYPES), quantizer=st.sampled_from(["hqq", "linear"]))
def test_decodes_as_defined_to_the_weights_of_the_cpu_encoding(weight, dtype, quantizer):
    out, in_ = weight.shape
    encoding = encoding_for(4, out, in_, dtype, "rowmajor", quantizer)
    on_cpu = encoding_for(4, out, in_, dtype, CPU_LAYOUT, quantizer)
    assert isinstance(encoding, RowMajorInt4)
    assert isinstance(on_cpu, Int4)
    slot = encoding.encode(weight, QUANTIZERS[quantizer], dtype)
    decoded = encoding.decode(slot, out, in_, dtype)
    expected = by_definition(slot, dtype)
    if dtype == torch.float32:
        torch.testing.assert_close(decoded, expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(decoded, expected)
    same = on_cpu.decode(on_cpu.encode(weight, QUANTIZERS[quantizer], dtype), out, in_, dtype)
    assert torch.equal(decoded, same)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fields_are_what_encode_returns(dtype):
    encoding = RowMajorInt4(32)
    fields = encoding.encode(torch.randn(5, 96), QUANTIZERS["linear"], dtype)
    declared = encoding.stored_fields(5, 96, dtype)
    assert encoding.slot_fields(5, 96, dtype) == declared
    assert [(f.name, f.dtype, f.shape) for f in declared] == [
        (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in fields.items()
    ]
    assert all(tensor.is_contiguous() for tensor in fields.values())


@settings(max_examples=25, deadline=None)
@given(weight=matrices, dtype=st.sampled_from(DTYPES), quantizer=st.sampled_from(sorted(QUANTIZERS)))
def test_2_bits_decode_to_the_weights_of_the_cpu_encoding(weight, dtype, quantizer):
    out, in_ = weight.shape
    decoded = []
    for layout, expected in (("rowmajor", RowMajorInt2), (CPU_LAYOUT, Int2)):
        encoding = encoding_for(2, out, in_, dtype, layout, quantizer)
        assert isinstance(encoding, expected)
        slot = encoding.encode(weight, QUANTIZERS[quantizer], dtype)
        decoded.append(encoding.decode(slot, out, in_, dtype))
    assert torch.equal(*decoded)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.sampled_from([32, 64, 128, 256]), st.integers(1, 3), st.integers(0, 1000))
def test_2_bits_decode_every_code_exactly(rows, group, groups, seed):
    columns, generator = group * groups, torch.Generator().manual_seed(seed)
    encoding = RowMajorInt2(group)
    stored = {
        f.name: torch.randint(0, 128, f.shape, generator=generator).to(f.dtype)
        for f in encoding.stored_fields(rows, columns, torch.float32)
    }
    stored["scale"][:], stored["zero"][:] = 1, 8  # the levels themselves
    decoded = encoding.decode(stored, rows, columns, torch.float32)
    codes, ladders, levels = stored["codes"].tolist(), stored["ladders"].tolist(), torch.zeros(rows, columns)
    for n in range(rows):
        for column in range(columns):
            first, (eighth, stripe) = column // group, divmod(column % group, group // 8)
            byte, high = divmod(first * group // 8 + stripe, 2)
            code = codes[eighth % 4][n][byte] >> 4 * high + 2 * (eighth // 4) & 3
            ladder = ladders[n][byte] >> 4 * high & 15
            step, place = (ladder & 3) + 2, ladder >> 2
            levels[n, column] = step * code + (5 - step) * place
    assert torch.equal(decoded, levels)


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("encoding", [RowMajorInt4, RowMajorInt2])
def test_is_found_by_name_on_every_machine(encoding, group):
    name = f"int{encoding.bits}/rowmajor/g{group}"
    assert encoding_named(name) == encoding(group)
    assert encoding(group).name == name


def test_takes_any_number_of_rows_but_whole_groups():
    for bits in (4, 2):
        assert encoding_for(bits, 7, 96, torch.bfloat16, "rowmajor").name == f"int{bits}/rowmajor/g32"
        assert encoding_for(bits, 7, 100, torch.bfloat16, "rowmajor").name == "int8"


@pytest.mark.parametrize(("bits", "error"), [(4, 0.1), (2, 0.26)])
@pytest.mark.parametrize("m", [1, 40])
def test_works_on_a_cpu_through_decoding(m, bits, error):
    weight, x = torch.randn(24, 128), torch.randn(m, 128)
    encoding = encoding_for(bits, 24, 128, torch.float32, "rowmajor")
    slot = encoding.encode(weight, QUANTIZERS["hqq"], torch.float32)
    y = linear_for(encoding.name, "cpu", torch.float32)(x, slot, 24, 128)
    assert torch.equal(y, x @ encoding.decode(slot, 24, 128, torch.float32).T)
    assert relative_error(weight, encoding.decode(slot, 24, 128, torch.float32)) < error


def test_a_device_without_kernel_is_refused():
    for name in ("int4/rowmajor/g64", "int2/rowmajor/g64"):
        with pytest.raises(ConfigError, match=f"no kernel for '{name}' on 'mps'"):
            linear_for(name, "mps", torch.float32)
