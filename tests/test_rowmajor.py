"""The row-major int4 encoding: what it means, and that it works without a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from measures import relative_error
from tiermoe.errors import ConfigError
from tiermoe.kernels import linear_for
from tiermoe.quant.encodings import Int4, cpu_layout, encoding_for, encoding_named
from tiermoe.quant.quantizers import QUANTIZERS
from tiermoe.quant.rowmajor import RowMajorInt4

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
@given(weight=matrices, dtype=st.sampled_from(DTYPES), quantizer=st.sampled_from(sorted(QUANTIZERS)))
def test_decodes_as_defined_to_the_weights_of_the_cpu_encoding(weight, dtype, quantizer):
    out, in_ = weight.shape
    encoding = encoding_for(4, out, in_, dtype, "rowmajor", quantizer)
    on_cpu = encoding_for(4, out, in_, dtype, cpu_layout(), quantizer)
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


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_is_found_by_name_on_every_machine(group):
    encoding = encoding_named(f"int4/rowmajor/g{group}")
    assert encoding == RowMajorInt4(group)
    assert encoding.name == f"int4/rowmajor/g{group}"


def test_takes_any_number_of_rows_but_whole_groups():
    assert encoding_for(4, 7, 96, torch.bfloat16, "rowmajor").name == "int4/rowmajor/g32"
    assert encoding_for(4, 7, 100, torch.bfloat16, "rowmajor").name == "int8"


@pytest.mark.parametrize("m", [1, 40])
def test_works_on_a_cpu_through_decoding(m):
    weight, x = torch.randn(24, 128), torch.randn(m, 128)
    encoding = encoding_for(4, 24, 128, torch.float32, "rowmajor")
    slot = encoding.encode(weight, QUANTIZERS["hqq"], torch.float32)
    y = linear_for(encoding.name, "cpu", torch.float32)(x, slot, 24, 128)
    assert torch.equal(y, x @ encoding.decode(slot, 24, 128, torch.float32).T)
    assert relative_error(weight, encoding.decode(slot, 24, 128, torch.float32)) < 0.1


def test_a_device_without_kernel_is_refused():
    with pytest.raises(ConfigError, match="no kernel for 'int4/rowmajor/g64' on 'mps'"):
        linear_for("int4/rowmajor/g64", "mps", torch.float32)
