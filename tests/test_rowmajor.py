"""The row-major encodings of 4 and 2 bits: what they mean, and that they work without a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from measures import relative_error
from tiermoe.errors import ConfigError
from tiermoe.formats.int4 import CPU_LAYOUT, Int2, Int4, RowMajorInt2, RowMajorInt4
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_for
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


def by_definition(bits: int, slot: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    packed, scale, zero = slot["codes"], slot["scale"].double(), slot["zero"].double()
    rows, columns = packed.shape[0], packed.shape[1] * 8 // bits
    weights = torch.empty(rows, columns, dtype=torch.float64)
    for k in range(columns):
        byte, place = divmod(k * bits, 8)
        code = packed[:, byte] >> place & 2**bits - 1
        group = k * scale.shape[1] // columns
        weights[:, k] = (code.double() - 2 ** (bits - 1)) * scale[:, group] + zero[:, group]
    return weights.to(dtype)


@settings(max_examples=25, deadline=None)
@given(
    bits=st.sampled_from([4, 2]),
    weight=matrices,
    dtype=st.sampled_from(DTYPES),
    quantizer=st.sampled_from(["hqq", "linear"]),
)
def test_decodes_as_defined_to_the_weights_of_the_cpu_encoding(bits, weight, dtype, quantizer):
    out, in_ = weight.shape
    encoding = encoding_for(bits, out, in_, dtype, "rowmajor", quantizer)
    on_cpu = encoding_for(bits, out, in_, dtype, CPU_LAYOUT, quantizer)
    assert type(encoding) is {4: RowMajorInt4, 2: RowMajorInt2}[bits]
    assert type(on_cpu) is {4: Int4, 2: Int2}[bits]
    slot = encoding.encode(weight, QUANTIZERS[quantizer], dtype)
    decoded = encoding.decode(slot, out, in_, dtype)
    expected = by_definition(bits, slot, dtype)
    if dtype == torch.float32:
        torch.testing.assert_close(decoded, expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(decoded, expected)
    same = on_cpu.decode(on_cpu.encode(weight, QUANTIZERS[quantizer], dtype), out, in_, dtype)
    assert torch.equal(decoded, same)


@pytest.mark.parametrize(("bits", "error"), [(4, 0.1), (2, 0.45)])
@pytest.mark.parametrize("m", [1, 40])
def test_works_on_a_cpu_through_decoding(m, bits, error):
    weight, x = torch.randn(24, 128), torch.randn(m, 128)
    encoding = encoding_for(bits, 24, 128, torch.float32, "rowmajor")
    slot = encoding.encode(weight, QUANTIZERS["hqq"], torch.float32)
    y = linear_for(encoding.name, "cpu", torch.float32)(x, slot, 24, 128)
    assert torch.equal(y, x @ encoding.decode(slot, 24, 128, torch.float32).T)
    assert relative_error(weight, encoding.decode(slot, 24, 128, torch.float32)) < error


def test_a_device_without_kernel_is_refused():
    for name in ("int4/rowmajor/g64", "u2/rowmajor/g64"):
        with pytest.raises(ConfigError, match=f"no kernel for '{name}' on 'mps'"):
            linear_for(name, "mps", torch.float32)
