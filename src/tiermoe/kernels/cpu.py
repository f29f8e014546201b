"""CPU kernels on packed weights.

2 to 8 bits in bfloat16: our own kernels where there are any (`native/`). Else few tokens: torch's operators on the
packed weights, which read fewer bytes; many tokens: decode, then one matrix product, in float32 where the processor
has no instructions for bfloat16 (there torch multiplies number by number). Which of them runs follows from the machine,
the encoding, the dtype and the number of tokens alone, so that a result depends on neither timing nor what is cached.
"""

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.kernels.native.linear import linear
from tiermoe.kernels.native.matrix import matrix_form
from tiermoe.quant.encoding import Encoding
from tiermoe.quant.gguf import Gguf
from tiermoe.quant.int2 import Int2
from tiermoe.quant.int4 import Int4
from tiermoe.quant.int4_layout import is_torchs
from tiermoe.quant.int6 import Int6
from tiermoe.quant.int6_layout import BLOCK_ROWS
from tiermoe.quant.mixed import Values
from tiermoe.quant.published import Published
from tiermoe.quant.scratch import scratch
from tiermoe.quant.transposed4 import Transposed4
from tiermoe.quant.uneven import Uneven

# The most tokens for which the operator on packed weights is used; measured for (2048, 2048) and (1024, 2048)
# on AVX-512. Torch has vector code of these operators in bfloat16 only: in the other dtypes they run at
# 0.2 to 1.2 GB/s, and decoding is several times faster even for one token.
INT8_TOKENS = {torch.bfloat16: 12}
INT4_TOKENS = {torch.bfloat16: 48}

NATIVE_TOKENS_BESIDE_AMX = 48
# Of a matrix at 8 bits decoded at a time: an output layer is larger, an expert's matrix is not.
DECODED_WEIGHTS = 1 << 24
DECODED_BLOCKS = 1 << 20  # likewise, of blocks of rows: what is decoded stays in the cache
INT8_COLUMNS = 16  # with another multiple the operator reads past the end of the rows in 16-bit dtypes


class PlainLinear:
    """The checkpoint's own weights.

    One token in bfloat16 on a machine with AMX takes `torch.mv`: F.linear has a bad case there (6.7 against
    14 GB/s of weights for (4096, 14336)). Without AMX F.linear is twice as fast as mv. Where torch has no bfloat16
    products worth the name, our own kernels compute."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        self._use_mv = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        self._encoding = encoding
        self._dtype = dtype
        self._slow = dtype == torch.bfloat16 and not multiplies_bfloat16()

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        if self._slow:
            form = matrix_form(self._encoding, out, in_, self._dtype)
            return linear(x, form, slot) if form else product(x, slot["weight"])
        if self._use_mv and x.shape[0] == 1:
            return torch.mv(slot["weight"], x[0])[None]
        return F.linear(x, slot["weight"])


class Int8Linear:
    """Slots of Int8."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        self._tokens = INT8_TOKENS.get(dtype, 0)
        self._encoding = encoding
        self._dtype = dtype
        self._product_dtype = product_dtype(dtype)
        self._native_tokens = native_tokens()

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        form = matrix_form(self._encoding, out, in_, self._dtype) if x.shape[0] <= self._native_tokens else None
        if form:
            return linear(x, form, slot)
        if x.shape[0] <= self._tokens and in_ % INT8_COLUMNS == 0:
            return torch._weight_int8pack_mm(x.contiguous(), slot["weight"], slot["scale"])
        rows = max(1, DECODED_WEIGHTS // in_)
        if out <= rows:
            return self._decoded(x, slot["weight"], slot["scale"])
        result = torch.empty((x.shape[0], out), dtype=x.dtype)
        for first in range(0, out, rows):
            some = slice(first, first + rows)
            result[:, some] = self._decoded(x, slot["weight"][some], slot["scale"][some])
        return result

    def _decoded(self, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        # any int8 is exact in bfloat16: scaling the product rounds and costs less than scaling the weights
        dtype = self._product_dtype
        weight = scratch.take("weight", tuple(codes.shape), dtype).copy_(codes)
        return F.linear(x.to(dtype), weight).mul_(scale.to(dtype)).to(x.dtype)


class BlocksLinear:
    """Slots of Int6 and Uneven, blocks of 64 rows. torch has no operator on such weights."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        assert isinstance(encoding, Int6 | Uneven)
        self._encoding = encoding
        self._dtype = dtype
        self._product_dtype = product_dtype(dtype)
        self._native_tokens = native_tokens()

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        form = matrix_form(self._encoding, out, in_, self._dtype) if x.shape[0] <= self._native_tokens else None
        if form:
            return linear(x, form, slot)
        dtype, result = self._product_dtype, torch.empty((x.shape[0], out), dtype=x.dtype)
        rows = max(1, DECODED_BLOCKS // (in_ * BLOCK_ROWS)) * BLOCK_ROWS
        for first in range(0, out, rows):
            last = min(first + rows, out)
            into = scratch.take("weight", ((last - first) * in_,), dtype)
            weight = self._encoding.decode_rows(slot, first, last, in_, dtype, into)
            result[:, first:last] = F.linear(x.to(dtype), weight)
        return result


class PublishedLinear:
    """Slots of weights as they are published: a GGUF file's blocks, a checkpoint's codes and scales, values in another
    dtype. Where the native kernels do not compute, some rows at a time are decoded to float32."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        assert isinstance(encoding, Gguf | Published | Transposed4 | Values)
        self._encoding = encoding
        self._dtype = dtype

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        form = matrix_form(self._encoding, out, in_, self._dtype)
        if form:
            return linear(x, form, slot)
        x, result = x.float(), torch.empty((x.shape[0], out), dtype=x.dtype)
        for first, weight in self._encoding.decoded(slot, in_):
            result[:, first : first + weight.shape[0]] = F.linear(x, weight)
        return result


class Int4Linear:
    """Slots of Int4 in the CPUs' layout."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        assert isinstance(encoding, Int4)
        self._group = encoding.group
        self._tokens = INT4_TOKENS.get(dtype, 0) if is_torchs() else 0
        self._encoding = encoding
        self._dtype = dtype
        self._product_dtype = product_dtype(dtype)
        self._native_tokens = native_tokens()

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        form = matrix_form(self._encoding, out, in_, self._dtype) if x.shape[0] <= self._native_tokens else None
        if form:
            return linear(x, form, slot)
        if x.shape[0] <= self._tokens:
            codes, scales_and_zeros = slot["codes"], slot["scales_and_zeros"]
            return torch._weight_int4pack_mm_for_cpu(x.contiguous(), codes, self._group, scales_and_zeros)
        dtype = self._product_dtype
        weight = self._encoding.decode(slot, out, in_, dtype, into=scratch.take("weight", (out * in_,), dtype))
        return F.linear(x.to(dtype), weight).to(x.dtype)


class Int2Linear:
    """Slots of Int2: where the native kernels do not compute, a matrix is widened to Int4 first."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        assert isinstance(encoding, Int2)
        self._encoding = encoding
        self._dtype = dtype
        self._native_tokens = native_tokens()
        self._widened = Int4Linear(encoding.widened, dtype)

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        form = matrix_form(self._encoding, out, in_, self._dtype) if x.shape[0] <= self._native_tokens else None
        if form:
            return linear(x, form, slot)
        return self._widened(x, self._encoding.widen_codes(slot), out, in_)


def native_tokens() -> float:
    """The most tokens for which the native kernels are used: with AMX, decoding and one product of torch's is faster
    for many."""
    return NATIVE_TOKENS_BESIDE_AMX if torch.cpu._is_amx_tile_supported() else math.inf


def product(x: Tensor, weight: Tensor) -> Tensor:
    """torch's x (M, in_) times a weight (out, in_) of its dtype → (M, out), in the dtype that the processor can
    multiply in."""
    if x.device.type != "cpu" or x.dtype != torch.bfloat16 or multiplies_bfloat16():
        return F.linear(x, weight)
    return F.linear(x.float(), weight.float()).to(x.dtype)


@lru_cache(maxsize=1)
def multiplies_bfloat16() -> bool:
    """Whether torch's matrix products in bfloat16 use instructions of this processor."""
    return torch.backends.cpu.get_cpu_capability() != "AVX2" and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what products of decoded weights of a dtype are taken. Those in float16 in float32: faster on CPUs, and safe
    from overflow. Likewise those in bfloat16 where the processor has no instructions for them."""
    slow = dtype == torch.float16 or (dtype == torch.bfloat16 and not multiplies_bfloat16())
    return torch.float32 if slow else dtype
