"""The Triton kernels against decoded weights; test_triton.py runs this file in processes of its own.

Under TRITON_INTERPRET=1 Triton's interpreter runs the kernels on CPU tensors, otherwise a GPU does. The
variable must be set before Triton is imported, hence the processes.
"""

import pytest
import torch

from tiermoe.formats.encoding import Encoding
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_named
from tiermoe.kernels.linear import linear_for
from tiermoe.kernels.triton_kernels import launches, linear
from triton_device import DEVICE, DTYPES, KINDS, TOLERANCE, bfloat16_dot, dot_row_by_row, tokens

__all__ = ["bfloat16_dot", "dot_row_by_row"]


def packed(kind: str, shape: tuple[int, int], dtype: torch.dtype, seed: int = 0):
    """An encoding, and slot fields of a random matrix with a mean."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05 + 0.02
    encoding: Encoding = encoding_named(kind)
    return encoding, encoding.encode(weight, QUANTIZERS["hqq"], dtype)


def check(encoding, slot, x, out: int, in_: int) -> None:
    y = linear_for(encoding.name, "cuda", x.dtype)(x, {name: each.to(DEVICE) for name, each in slot.items()}, out, in_)
    assert y.dtype == x.dtype
    assert y.shape == (x.shape[0], out)
    w = encoding.decode(slot, out, in_, torch.float32).double().to(DEVICE)
    error = (y.double() - x.double() @ w.T).abs() / (x.double().abs() @ w.abs().T)
    assert float(error.max()) <= TOLERANCE[x.dtype]


def shapes(kind: str) -> list[tuple[int, int]]:
    """Rows and columns below, at and beyond one block and one tile; of 4 and 2 bits a last block of fewer rows."""
    if kind == "int8":
        return [(7, 32), (70, 320), (33, 576)]
    group = int(kind.rpartition("/g")[2])
    columns = [group, 3 * group, 512 + group]
    if kind.startswith(("int4", "u2")):
        return list(zip((16, 48, 96), columns, strict=True))
    return list(zip((64, 128, 64), columns, strict=True))


# every shape in one type, the other types in the shape that is a multiple of no tile
AGREE = [
    *((kind, torch.bfloat16, shape) for kind in KINDS for shape in shapes(kind)),
    *((kind, dtype, shapes(kind)[2]) for kind in KINDS for dtype in DTYPES if dtype != torch.bfloat16),
]


@pytest.mark.parametrize(("kind", "dtype", "shape"), AGREE, ids=str)
def test_agrees_with_decoded_weights(kind, dtype, shape):
    encoding, slot = packed(kind, shape, dtype)
    for m in (1, 3):
        check(encoding, slot, tokens(m, shape[1], dtype), *shape)


@pytest.mark.parametrize("kind", ["int4/cpu-avx512/g128", "u2/cpu-avx512/g256"])
def test_any_code_and_any_scale(kind):
    encoding, slot = packed(kind, (80, 512), torch.float32)
    made = torch.Generator().manual_seed(1)
    slot["codes"].random_(0, 256, generator=made)
    slot["scales_and_zeros"] = torch.rand(slot["scales_and_zeros"].shape, generator=made)
    for m in (1, 3):
        check(encoding, slot, tokens(m, 512, torch.float32), 80, 512)


@pytest.mark.parametrize("kind", ["int4/cpu-avx512/g32", "nl3/cpu-avx512/g32", "int8"])
def test_more_rows_and_tokens_than_one_block(kind):
    encoding, slot = packed(kind, (192, 64), torch.float32)
    (_, blocks, constants), *_ = launches("INT8" if kind == "int8" else "INT4", 32, 70, 192, 64)
    assert blocks > 1
    assert constants["TOKENS"] < 70
    check(encoding, slot, tokens(70, 64, torch.float32), 192, 64)


def test_more_columns_than_the_threads_of_a_program_take_at_once():
    """From 2,048 columns on a program has more threads."""
    encoding, slot = packed("int4/cpu-avx512/g64", (64, 2112), torch.float32)
    check(encoding, slot, tokens(1, 2112, torch.float32), 64, 2112)


def test_rows_of_8_bits_beyond_4096():
    encoding, slot = packed("int8", (4099, 64), torch.float32)
    check(encoding, slot, tokens(1, 64, torch.float32), 4099, 64)


@pytest.mark.parametrize("k", [30, 33, 50])
def test_int8_takes_any_number_of_columns(k):
    encoding, slot = packed("int8", (5, k), torch.bfloat16)
    for m in (1, 3):
        check(encoding, slot, tokens(m, k, torch.bfloat16), 5, k)


@pytest.mark.usefixtures("dot_row_by_row")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["int4/cpu-avx512/g64", "nl3/cpu-avx512/g64", "int8"])
def test_equal_bits_wherever_the_tokens_lie_and_however_many_share_the_block(kind, dtype):
    shape = (64, 192)
    encoding, slot = packed(kind, shape, dtype)
    slot = {name: each.to(DEVICE) for name, each in slot.items()}
    run = linear_for(encoding.name, "cuda", dtype)
    x = tokens(16, 192, dtype)
    whole = run(x, slot, *shape)
    assert torch.equal(run(x, slot, *shape), whole)
    assert torch.equal(run(x[5:8], slot, *shape), whole[5:8])
    assert torch.equal(run(x[5:7].flip(0), slot, *shape), whole[5:7].flip(0))
    shifted = torch.empty(16 * 192 + 1, dtype=dtype, device=DEVICE)[1:].view(16, 192).copy_(x)
    assert torch.equal(run(shifted, slot, *shape), whole)
    assert torch.equal(run(x.t().contiguous().t(), slot, *shape), whole)


@pytest.mark.parametrize("kind", ["int4/cpu-avx512/g64", "nl4/cpu-avx512/g32", "int8"])
def test_large_sums_do_not_overflow_float16(kind):
    encoding, slot = packed(kind, (64, 256), torch.float16)
    check(encoding, slot, tokens(3, 256, torch.float16) * 1000, 64, 256)
    check(encoding, slot, tokens(1, 256, torch.float16) * 1000, 64, 256)


@pytest.mark.parametrize("kind", ["int4/cpu-avx512/g64", "int8"])
def test_no_tokens_give_an_empty_result(kind):
    encoding, slot = packed(kind, (16, 64), torch.bfloat16)
    y = linear_for(encoding.name, "cuda", torch.bfloat16)(tokens(0, 64, torch.bfloat16), slot, 16, 64)
    assert y.shape == (0, 16)


def test_groups_that_are_no_power_of_two_are_refused():
    codes, scales = torch.zeros(16, 48, dtype=torch.uint8), torch.ones(2, 16, 2)
    with pytest.raises(ValueError, match="groups of 48"):
        linear(torch.ones(1, 96), "INT4", 48, codes, scales, 16)


def test_plain_weights_go_through_torch():
    weight, x = torch.randn(6, 32, device=DEVICE), torch.randn(3, 32, device=DEVICE)
    y = linear_for("plain", "cuda", torch.float32)(x, {"weight": weight}, 6, 32)
    assert torch.equal(y, torch.nn.functional.linear(x, weight))
