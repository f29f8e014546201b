"""One matrix of an expert times its tokens, on the fields that a slot holds."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tiermoe.errors import ConfigError
from tiermoe.kernels import cpu
from tiermoe.kernels.gpu import cuda
from tiermoe.kernels.native.matrix import matrix_form
from tiermoe.kernels.reference import DecodedLinear
from tiermoe.native import _native, available, instruction_set
from tiermoe.quant.encoding import Encoding
from tiermoe.quant.gguf import Gguf
from tiermoe.quant.int2 import Int2
from tiermoe.quant.mixed import Halves
from tiermoe.quant.published import Published
from tiermoe.quant.registry import ROW_MAJOR, cpu_layout, encoding_named
from tiermoe.quant.transposed4 import Transposed4
from tiermoe.store.layout import ExpertFormat
from tiermoe.types import FEW_TOKENS, Part

__all__ = [
    "KERNELS", "LinearKernel", "cpu_kernels", "decoded_bytes", "decodes", "linear_for", "machine_layout",
    "prepared_bytes",
]  # fmt: skip

_DECODING = 4 << 20  # temporaries of decoding a matrix


class LinearKernel(Protocol):
    """`x` (M, in_) in the compute dtype and the slot fields of a matrix (out, in_) -> (M, out).

    A bias is the caller's to add."""

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor: ...


class HalvesLinear:
    """Slots whose rows lie in two encodings: a product with each."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        assert isinstance(encoding, Halves)
        self._encoding = encoding
        self._kernels = [linear_for(half.name, "cpu", dtype) for half in (encoding.first, encoding.second)]

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        halves = zip(self._kernels, self._encoding.of(slot), strict=True)
        return torch.cat([kernel(x, fields, out // 2, in_) for kernel, (_, fields) in halves], dim=1)


# (kind of encoding, with its layout where that decides; device type) -> kernel for (encoding, compute dtype)
KERNELS: dict[tuple[str, str], Callable[[Encoding, torch.dtype], LinearKernel]] = {
    ("plain", "cpu"): cpu.PlainLinear,
    ("int8", "cpu"): cpu.Int8Linear,
    ("int6", "cpu"): cpu.BlocksLinear,
    **dict.fromkeys((("nl4", "cpu"), ("nl3", "cpu"), ("nl2", "cpu")), cpu.BlocksLinear),
    ("int4", "cpu"): cpu.Int4Linear,
    ("int2", "cpu"): cpu.Int2Linear,
    ("gguf", "cpu"): cpu.PublishedLinear,
    ("published", "cpu"): cpu.PublishedLinear,
    ("transposed4", "cpu"): cpu.PublishedLinear,
    ("values", "cpu"): cpu.PublishedLinear,
    ("halves", "cpu"): HalvesLinear,
    ("int4/rowmajor", "cpu"): DecodedLinear,
    ("int2/rowmajor", "cpu"): DecodedLinear,
    ("plain", "cuda"): cuda.PlainLinear,
    ("int8", "cuda"): cuda.Int8Linear,
    ("int4/rowmajor", "cuda"): cuda.RowMajorInt4Linear,
    ("int2/rowmajor", "cuda"): cuda.RowMajorInt2Linear,
}


def machine_layout(device: str) -> str:
    """The layout of codes below 8 bits that the kernels of a device ('cpu', 'cuda', 'cuda:1') take."""
    return cpu_layout() if device == "cpu" else ROW_MAJOR


def cpu_kernels() -> str:
    """What computes on this CPU, for people: the instruction set of our own kernels, or torch. ConfigError as
    `instruction_set`."""
    return instruction_set() or "torch's operators"


def decodes(encoding: Encoding | None, out: int, in_: int, dtype: torch.dtype) -> bool:
    """Whether the CPU's kernel makes a decoded copy of a matrix (out, in_) for many tokens."""
    if encoding is None or encoding.bits == 16:
        return False
    if math.isfinite(cpu.native_tokens()) and not isinstance(encoding, Gguf | Published | Transposed4):
        return True
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
    encodings = [encoding for form, _ in parts for encoding in form.encodings.values()]
    widened = any(isinstance(encoding, Int2) for encoding in encodings)
    codes = max(decoded) // 2 if decoded and widened else 0  # 2 bits are decoded through the codes of 4
    return max(decoded) * dtype.itemsize + codes + _DECODING if decoded else 0


def prepared_bytes(formats: Sequence[ExpertFormat], top_k: int, tokens: int, dtype: torch.dtype) -> int:
    """What the native products of a layer's experts make of their inputs beforehand, in a call of the largest size; 0
    where none does. A call of many tokens has as many rows (`engine.experts`)."""
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
    kind, with_layout = encoding_name.partition("/")[0], encoding_name.rpartition("/g")[0]
    factory = KERNELS.get((with_layout, device_type)) or KERNELS.get((kind, device_type))
    if factory is None:
        raise ConfigError(
            f"no kernel for {encoding_name!r} on {device_type!r}; --bits 4 packs for it, --device cpu has one"
        )
    return factory(encoding_named(encoding_name), dtype)
