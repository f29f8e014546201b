"""Where the cases of Triton's kernels run, what they may differ by, and their inputs."""

import os

import pytest
import torch
from triton.runtime import interpreter

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# Error of one element, in units of |x| @ |w|: the result is rounded once to its dtype, by half a unit in the last
# place; the interpreter cuts bfloat16 off, by a whole one. The rest is float32 arithmetic.
TOLERANCE = {
    torch.float32: 2**-20,
    torch.float16: 1.01 * 2**-11,
    torch.bfloat16: 1.01 * (2**-7 if DEVICE == "cpu" else 2**-8),
}
DTYPES = tuple(TOLERANCE)
ORDER = "cpu-avx512"
KINDS = (
    f"int4/{ORDER}/g32", f"int4/{ORDER}/g64", f"int4/{ORDER}/g256", f"u2/{ORDER}/g64", f"int6/{ORDER}/g32",
    f"nl4/{ORDER}/g32", f"nl3/{ORDER}/g64", f"nl3/{ORDER}/g32", f"nl2/{ORDER}/g64", f"tcq2/{ORDER}/g64", "int8",
)  # fmt: skip


def tokens(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype).to(DEVICE)


@pytest.fixture(autouse=True)
def bfloat16_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as uint16 and its dot multiplies those integers: give it the values."""
    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, *rest):
        return plain(self, widened(a), widened(b), d, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def dot_row_by_row(bfloat16_dot: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's dot is numpy's matrix product, whose rows differ in their last bits with their place in the
    block on some processors. This one multiplies and adds element by element: what is left is the kernel's doing."""

    def create_dot(self, a, b, d, *_):
        products = widened(a).data[:, :, None].astype("float32") * widened(b).data[None].astype("float32")
        return interpreter.TensorHandle(products.sum(1) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def widened(handle):
    """A tensor of the interpreter's, in float32 where it is in bfloat16."""
    if handle.dtype != interpreter.tl.bfloat16:
        return handle
    values = (handle.data.astype("uint32") << 16).view("float32")
    return interpreter.TensorHandle(values, interpreter.tl.float32)
