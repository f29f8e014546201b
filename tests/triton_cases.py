"""The Triton kernels against decoded weights; test_triton.py runs this file in processes of its own.

Under TRITON_INTERPRET=1 Triton's interpreter runs the kernels on CPU tensors, otherwise a GPU does. The
variable must be set before Triton is imported, hence the processes.
"""

import pytest
import torch
from triton.runtime import interpreter

from tiermoe.formats.encoding import Encoding
from tiermoe.formats.int4 import RowMajorInt2
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_for
from tiermoe.kernels.linear import linear_for
from tiermoe.kernels.triton_kernels import blocks, int4_linear
from triton_device import DEVICE, DTYPES, TOLERANCE, tokens

# (bits, quantizer); linear takes the largest group that divides K, HQQ 64 or 32
PACKED = ((4, "hqq"), (4, "linear"), (8, "linear"), (2, "hqq"))


@pytest.fixture(autouse=True)
def bfloat16_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as uint16 and its dot multiplies those integers: give it the values."""
    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, *rest):
        return plain(self, _widened(a), _widened(b), d, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _widened(handle):
    if handle.dtype != interpreter.tl.bfloat16:
        return handle
    values = (handle.data.astype("uint32") << 16).view("float32")
    return interpreter.TensorHandle(values, interpreter.tl.float32)


@pytest.fixture
def dot_row_by_row(bfloat16_dot: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's dot is numpy's matrix product, whose rows differ in their last bits with their place in the
    block on some processors. This one multiplies and adds element by element: what is left is the kernel's doing."""

    def create_dot(self, a, b, d, *_):
        products = _widened(a).data[:, :, None].astype("float32") * _widened(b).data[None].astype("float32")
        return interpreter.TensorHandle(products.sum(1) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def packed(bits: int, quantizer: str, shape: tuple[int, int], dtype: torch.dtype):
    """An encoding, and slot fields of a random matrix with a mean."""
    out, in_ = shape
    weight = torch.randn(out, in_, generator=torch.Generator().manual_seed(bits)) * 0.05 + 0.02
    encoding: Encoding = encoding_for(bits, out, in_, dtype, "rowmajor", quantizer)
    assert encoding.bits == bits
    slot = encoding.encode(weight, QUANTIZERS[quantizer], dtype)
    return encoding, {name: tensor.to(DEVICE) for name, tensor in slot.items()}


def check(encoding, slot, x, out: int, in_: int) -> None:
    y = linear_for(encoding.name, "cuda", x.dtype)(x, slot, out, in_)
    assert y.dtype == x.dtype
    assert y.shape == (x.shape[0], out)
    w = encoding.decode(slot, out, in_, torch.float32).double()
    error = (y.double() - x.double() @ w.T).abs() / (x.double().abs() @ w.abs().T)
    assert float(error.max()) <= TOLERANCE[x.dtype]


# rows and columns below, at and beyond one block, mostly multiples of none; 1088 = 2 * 512 + 64
SHAPES = [(7, 32), (70, 320), (33, 1088), (16, 768)]
# every shape in one type, the other types in the shape that is a multiple of no block
TYPED = [(torch.bfloat16, shape) for shape in SHAPES] + [(torch.float32, SHAPES[2]), (torch.float16, SHAPES[2])]


# below 768 columns linear's groups of 4 bits are HQQ's
AGREE = [
    (*kind, *typed)
    for kind in PACKED
    for typed in ([(dtype, SHAPES[3]) for dtype in DTYPES] if kind == (4, "linear") else TYPED)
]


@pytest.mark.parametrize(("bits", "quantizer", "dtype", "shape"), AGREE, ids=str)
def test_agrees_with_decoded_weights(bits, quantizer, dtype, shape):
    encoding, slot = packed(bits, quantizer, shape, dtype)
    for m in (1, 3, 40):
        check(encoding, slot, tokens(m, shape[1], dtype), *shape)


@pytest.mark.parametrize(("k", "group"), [(256, 64), (256, 128), (768, 32), (768, 256)])
def test_2_bits_have_any_code(k, group):
    encoding, made = RowMajorInt2(group), torch.Generator().manual_seed(group)
    slot = encoding.encode(torch.randn(9, k, generator=made), QUANTIZERS["linear"], torch.float32)
    slot["codes"].random_(0, 256, generator=made)
    slot = {name: field.to(DEVICE) for name, field in slot.items()}
    for m in (1, 3, 40):
        check(encoding, slot, tokens(m, k, torch.float32), 9, k)


@pytest.mark.parametrize(("bits", "m"), [(4, 1), (4, 70), (8, 70)])
def test_more_rows_and_tokens_than_one_block(bits, m):
    shape = (4099, 64) if m == 1 else (70, 64)
    assert blocks(m, *shape).rows < shape[0]
    assert blocks(m, *shape).tokens < m or m == 1
    encoding, slot = packed(bits, "linear", shape, torch.float32)
    check(encoding, slot, tokens(m, 64, torch.float32), *shape)


@pytest.mark.parametrize("k", [30, 33, 50])
def test_int8_takes_any_number_of_columns(k):
    encoding, slot = packed(8, "linear", (5, k), torch.bfloat16)
    for m in (1, 3):
        check(encoding, slot, tokens(m, k, torch.bfloat16), 5, k)


@pytest.mark.usefixtures("dot_row_by_row")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_equal_bits_wherever_the_tokens_lie_and_however_many_share_the_block(bits, dtype):
    shape = (20, 192)
    encoding, slot = packed(bits, "hqq", shape, dtype)
    run = linear_for(encoding.name, "cuda", dtype)
    x = tokens(16, 192, dtype)
    whole = run(x, slot, *shape)
    assert torch.equal(run(x, slot, *shape), whole)
    assert torch.equal(run(x[5:8], slot, *shape), whole[5:8])
    assert torch.equal(run(x[5:7].flip(0), slot, *shape), whole[5:7].flip(0))
    shifted = torch.empty(16 * 192 + 1, dtype=dtype, device=DEVICE)[1:].view(16, 192).copy_(x)
    assert torch.equal(run(shifted, slot, *shape), whole)
    assert torch.equal(run(x.t().contiguous().t(), slot, *shape), whole)


@pytest.mark.parametrize("bits", [4, 8])
def test_large_sums_do_not_overflow_float16(bits):
    encoding, slot = packed(bits, "linear", (8, 256), torch.float16)
    check(encoding, slot, tokens(3, 256, torch.float16) * 1000, 8, 256)
    check(encoding, slot, tokens(1, 256, torch.float16) * 1000, 8, 256)


@pytest.mark.parametrize("bits", [4, 8])
def test_no_tokens_give_an_empty_result(bits):
    encoding, slot = packed(bits, "linear", (8, 64), torch.bfloat16)
    y = linear_for(encoding.name, "cuda", torch.bfloat16)(tokens(0, 64, torch.bfloat16), slot, 8, 64)
    assert y.shape == (0, 8)


def test_groups_that_are_no_power_of_two_are_refused():
    codes, scale = torch.zeros(4, 48, dtype=torch.uint8), torch.ones(4, 2)
    with pytest.raises(ValueError, match="groups of 48"):
        int4_linear(torch.ones(1, 96), codes, scale, scale)


def test_plain_weights_go_through_torch():
    weight, x = torch.randn(6, 32, device=DEVICE), torch.randn(3, 32, device=DEVICE)
    y = linear_for("plain", "cuda", torch.float32)(x, {"weight": weight}, 6, 32)
    assert torch.equal(y, torch.nn.functional.linear(x, weight))
