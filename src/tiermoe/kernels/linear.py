"""Linear kernels: tokens times one packed matrix, on the fields of a slot. `KERNELS` has one for each encoding and
device. `MatrixForm` describes a matrix to the native kernels: coding, sizes and the addresses of a slot's fields.

On a CPU, 2 to 8 bits in bfloat16: the native kernels where there are any. Else few tokens: torch's operators on the
packed weights, which read fewer bytes; many tokens: decode, then one matrix product, in float32 where the processor
has no instructions for bfloat16 (there torch multiplies number by number). A native product has the same bits for any
number of tokens; which of torch's runs follows from the machine, the encoding, the dtype and the number of tokens
alone, so that a result depends on neither timing nor the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.errors import ConfigError
from tiermoe.formats.encoding import BLOCK_ROWS, Encoding, FixedEncoding, InC, RowBlocks, scratch
from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.formats.int4 import Int4, is_torchs
from tiermoe.formats.plain import Halves, Plain
from tiermoe.formats.registry import encoding_named
from tiermoe.kernels import gpu
from tiermoe.native import CODINGS, _native, available, instruction_set, structs, takes
from tiermoe.types import FEW_TOKENS, Part

# The most tokens for which the operator on packed weights is used; measured for (2048, 2048) and (1024, 2048)
# on AVX-512. Torch has vector code of these operators in bfloat16 only: in the other dtypes they run at
# 0.2 to 1.2 GB/s, and decoding is several times faster even for one token.
INT8_TOKENS = {torch.bfloat16: 12}
INT4_TOKENS = {torch.bfloat16: 48}

# Of a matrix at 8 bits decoded at a time: an output layer is larger, an expert's matrix is not.
DECODED_WEIGHTS = 1 << 24
DECODED_BLOCKS = 1 << 20  # likewise, of blocks of rows: what is decoded stays in the cache
INT8_COLUMNS = 16  # with another multiple the operator reads past the end of the rows in 16-bit dtypes
_DECODING = 4 << 20  # temporaries of decoding a matrix


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """Matrices (out, in_) of one coding."""

    how: InC
    out: int
    in_: int

    def pack(self, fields: Mapping[str, Tensor]) -> bytes:
        """`structs.Matrix` of a matrix in a slot, valid as long as the slot's tensors live."""
        how = self.how
        return _packed(self, _address(fields, how.weights), _address(fields, how.scales), _address(fields, how.others))

    def absent(self) -> bytes:
        """`structs.Matrix` of an absent matrix: addresses are 0."""
        return _packed(self, 0, 0, 0)


def _address(fields: Mapping[str, Tensor], name: str | None) -> int:
    return fields[name].data_ptr() if name and name in fields else 0


@lru_cache(maxsize=4096)  # slots lie at the same addresses again and again
def _packed(form: MatrixForm, weights: int, scales: int, others: int) -> bytes:
    how = form.how
    scale_kind, scale_rows, scale_columns, factor_rows = how.published
    return _native.pack(
        structs.Matrix(
            coding=CODINGS[how.coding], weights=weights, scales=scales, zeros_or_factors=others, rows=form.out,
            columns=form.in_, group=how.group, scale_kind=scale_kind, scale_rows=scale_rows,
            scale_columns=scale_columns, factor_rows=factor_rows,
        )
    )  # fmt: skip


def plain(tensor: Tensor) -> bool:
    """Whether the kernels take a tensor by its address."""
    return tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and tensor.device.type == "cpu"


def address(tensor: Tensor | None) -> int:
    """The address of a tensor; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def prepared_at_most(columns: int) -> int:
    """Upper bound of the bytes of one token's quantised activations, for any encoding (native/isa/integers.h): each 32
    columns have int8 codes, a scale and two sums."""
    return 44 * -(-columns // 32)


def matrix_form(encoding: Encoding, out: int, in_: int, dtype: torch.dtype) -> MatrixForm | None:
    """The form of matrices (out, in_) in an encoding, for products in `dtype`; None where the kernels do not take
    them."""
    form = _form(encoding, out, in_)
    return form if form and takes(dtype, form.how.coding, out, in_, form.how.group) else None


def decoded_form(out: int, in_: int, dtype: torch.dtype) -> MatrixForm | None:
    """The form of matrices (out, in_) that are decoded to `dtype`; None where the kernels do not take them."""
    return matrix_form(Plain(), out, in_, dtype)


@lru_cache(maxsize=4096)
def _form(encoding: Encoding, out: int, in_: int) -> MatrixForm | None:
    how = encoding.in_c(out, in_)
    return MatrixForm(how, out, in_) if how else None


class LinearKernel(Protocol):
    """`x` (M, in_) in the compute dtype and the slot fields of a matrix (out, in_) -> (M, out).

    A bias is the caller's to add."""

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor: ...


def linear(x: Tensor, form: MatrixForm, fields: Mapping[str, Tensor]) -> Tensor:
    """x (M, in_) in bfloat16 → (M, out). A token's result does not depend on the other tokens. ValueError for another
    dtype or width."""
    if x.dtype != torch.bfloat16 or x.shape[1:] != (form.in_,):
        raise ValueError(
            f"the native product takes tokens (M, {form.in_}) in bfloat16, not {tuple(x.shape)} in {x.dtype}"
        )
    x = x.contiguous()
    tokens = x.shape[0]
    result = torch.empty((tokens, form.out), dtype=torch.bfloat16)
    packed, threads = form.pack(fields), torch.get_num_threads()
    room = scratch.address("prepared", _native.prepared(packed, tokens, tokens, threads))
    _native.product(packed, x.data_ptr(), tokens, room, result.data_ptr(), threads, tokens > FEW_TOKENS)
    return result


class PlainLinear:
    """The checkpoint's own weights, by torch; where torch's bfloat16 products use no instructions of the processor, the
    native kernels compute."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        self._encoding = encoding
        self._dtype = dtype
        self._slow = dtype == torch.bfloat16 and not multiplies_bfloat16()

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        if self._slow:
            form = matrix_form(self._encoding, out, in_, self._dtype)
            return linear(x, form, slot) if form else product(x, slot["weight"])
        return F.linear(x, slot["weight"])


class NativeFirst:
    """On a CPU: the native product of the packed weights; of an encoding without one, of the weights dequantised to
    bfloat16; without native kernels `by_torch`, which dequantises and multiplies."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        self._encoding = encoding
        self._dtype = dtype
        self._product_dtype = product_dtype(dtype)

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        form = matrix_form(self._encoding, out, in_, self._dtype)
        if form is not None:
            return linear(x, form, slot)
        decoded = decoded_form(out, in_, self._dtype)
        if decoded is not None:
            return linear(x, decoded, {"weight": self._encoding.decode(slot, out, in_, self._dtype).contiguous()})
        return self.by_torch(x, slot, out, in_)

    def by_torch(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        """The product by torch's operators."""
        dtype = self._product_dtype
        return F.linear(x.to(dtype), self._encoding.decode(slot, out, in_, dtype)).to(x.dtype)


class Int8Linear(NativeFirst):
    """Slots of Int8."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        super().__init__(encoding, dtype)
        self._tokens = INT8_TOKENS.get(dtype, 0)

    def by_torch(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
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


class BlocksLinear(NativeFirst):
    """Slots of Int6, NonUniform and Trellis, blocks of 64 rows. torch has no operator on such weights."""

    def by_torch(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        assert isinstance(self._encoding, RowBlocks)
        dtype, result = self._product_dtype, torch.empty((x.shape[0], out), dtype=x.dtype)
        rows = max(1, DECODED_BLOCKS // (in_ * BLOCK_ROWS)) * BLOCK_ROWS
        for first in range(0, out, rows):
            last = min(first + rows, out)
            into = scratch.take("weight", ((last - first) * in_,), dtype)
            weight = self._encoding.decode_rows(slot, first, last, in_, dtype, into)
            result[:, first:last] = F.linear(x.to(dtype), weight)
        return result


class PublishedLinear:
    """Slots of published weights: a GGUF file's blocks, a checkpoint's codes and scales, values in another dtype.
    Without a native kernel some rows at a time are decoded to float32."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        assert isinstance(encoding, FixedEncoding)
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


class Int4Linear(NativeFirst):
    """Slots of Int4 and Int2."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        super().__init__(encoding, dtype)
        assert isinstance(encoding, Int4)
        self._int4, self._group = encoding, encoding.group
        self._tokens = INT4_TOKENS.get(dtype, 0) if encoding.bits == 4 and is_torchs() else 0

    def by_torch(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        if x.shape[0] <= self._tokens:
            codes, scales_and_zeros = slot["codes"], slot["scales_and_zeros"]
            return torch._weight_int4pack_mm_for_cpu(x.contiguous(), codes, self._group, scales_and_zeros)
        dtype = self._product_dtype
        weight = self._int4.decode(slot, out, in_, dtype, into=scratch.take("weight", (out * in_,), dtype))
        return F.linear(x.to(dtype), weight).to(x.dtype)


class HalvesLinear:
    """Slots with rows in two encodings: a product with each."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        assert isinstance(encoding, Halves)
        self._encoding = encoding
        self._kernels = [linear_for(half.name, "cpu", dtype) for half in (encoding.first, encoding.second)]

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        halves = zip(self._kernels, self._encoding.of(slot), strict=True)
        return torch.cat([kernel(x, fields, out // 2, in_) for kernel, (_, fields) in halves], dim=1)


# (kind of encoding, device type) -> kernel for (encoding, compute dtype)
KERNELS: dict[tuple[str, str], Callable[[Encoding, torch.dtype], LinearKernel]] = {
    ("plain", "cpu"): PlainLinear,
    ("int8", "cpu"): Int8Linear,
    ("int4", "cpu"): Int4Linear,
    ("u2", "cpu"): Int4Linear,
    ("halves", "cpu"): HalvesLinear,
    ("plain", "cuda"): gpu.PlainLinear,
    **{(kind, "cuda"): gpu.PackedLinear for kind in gpu.KINDS},
}
"""Encodings for which torch has operators, or a GPU a kernel; on a CPU all others are computed by what decodes them."""


def _on_cpu(encoding: Encoding) -> Callable[[Encoding, torch.dtype], LinearKernel]:
    if isinstance(encoding, FixedEncoding):
        return PublishedLinear
    return BlocksLinear if isinstance(encoding, RowBlocks) else NativeFirst


def cpu_kernels() -> str:
    """Name of this CPU's kernels, for messages: the instruction set of the native kernels, or torch. ConfigError as
    `instruction_set`."""
    return instruction_set() or "torch's operators"


def decodes(encoding: Encoding | None, out: int, in_: int, dtype: torch.dtype) -> bool:
    """Whether the CPU's kernel makes a decoded copy of a matrix (out, in_) for many tokens."""
    if encoding is None or encoding.bits == 16:
        return False
    return matrix_form(encoding, out, in_, dtype) is None


def decoded_bytes(formats: Sequence[ExpertFormat], dense_bits: int, dtype: torch.dtype) -> int:
    """The largest matrix that a kernel decodes for many tokens, with its temporaries; 0 where none does. Dense layers
    are about as large as experts' matrices."""
    parts = [(form, part) for form in formats for part in form.layer.parts if part.is_matrix]
    dense = dense_bits == 8 or (dense_bits == 4 and not available())
    decoded = [
        math.prod(part.out_in)
        for form, part in parts
        if dense or decodes(form.encodings.get(part.name), *part.out_in, dtype)
    ]
    return max(decoded) * dtype.itemsize + _DECODING if decoded else 0


def prepared_bytes(formats: Sequence[ExpertFormat], top_k: int, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the prepared inputs of the native products of a layer's experts, in the largest call; 0 without native
    products. A call of many tokens has as many rows (`kernels.experts`)."""
    if not available():
        return 0
    rows = top_k * tokens if tokens <= FEW_TOKENS else tokens
    return max(sum(_prepared(form, part, rows, dtype) for part in form.layer.parts) for form in formats)


def _prepared(form: ExpertFormat, part: Part, tokens: int, dtype: torch.dtype) -> int:
    encoding = form.encodings.get(part.name)
    matrix = matrix_form(encoding, *part.out_in, dtype) if part.is_matrix and encoding else None
    return _native.prepared(matrix.absent(), tokens, tokens, torch.get_num_threads()) if matrix else 0


def linear_for(encoding_name: str, device_type: str, dtype: torch.dtype) -> LinearKernel:
    """The kernel for slots of an encoding. Raises ConfigError where the device has none."""
    factory = KERNELS.get((encoding_name.partition("/")[0], device_type))
    encoding = encoding_named(encoding_name)
    if factory is None and device_type == "cpu":
        factory = _on_cpu(encoding)
    if factory is None:
        raise ConfigError(
            f"no kernel for {encoding_name!r} on {device_type!r}; --bits 4 packs for it, --device cpu has one"
        )
    return factory(encoding, dtype)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's x (M, in_) times a weight (out, in_) of its dtype, with a bias (out) if there is one → (M, out), in the
    dtype that the processor can multiply in."""
    if x.device.type != "cpu" or x.dtype != torch.bfloat16 or multiplies_bfloat16():
        return F.linear(x, weight, bias)
    result = F.linear(x.float(), weight.float()).to(x.dtype)
    return result if bias is None else result + bias


@lru_cache(maxsize=1)
def multiplies_bfloat16() -> bool:
    """Whether torch's matrix products in bfloat16 use instructions of this processor."""
    return torch.backends.cpu.get_cpu_capability() != "AVX2" and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the products of decoded weights of a dtype. Those in float16 in float32: faster on CPUs, and safe from
    overflow. Likewise those in bfloat16 where the processor has no instructions for them."""
    slow = dtype == torch.float16 or (dtype == torch.bfloat16 and not multiplies_bfloat16())
    return torch.float32 if slow else dtype
