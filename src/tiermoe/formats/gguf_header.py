"""Header of a GGUF file, and ggml's types, in which it has numbers. Headers are read in blocks; no tensor is mapped or
touched, and torch is not imported.

A file is: 'GGUF', version, number of tensors and of entries, entries (key, type, value), tensors (name, sizes, type,
offset), padding, and the tensors' bytes. All numbers are little-endian. The gguf package's reader makes several arrays
of each string of a vocabulary, which takes seconds for 150,000 strings; this module leaves a vocabulary in the file
until it is read."""

from __future__ import annotations

import math
import os
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from tiermoe.errors import ModelError
from tiermoe.platform.file_io import read_bytes_at

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32  # where general.alignment says nothing
MOST_HEADER = 64 << 20
"""Bytes of a header that are read: 200,000 tokens and as many merges take 10 MB."""
_AT_ONCE = 4 << 20  # bytes read at a time
_DIMENSIONS = 4
_FEW = 256  # numbers of an array that are a list


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A type of ggml: `block` numbers of a row are in `nbytes` bytes."""

    name: str
    block: int
    nbytes: int
    bits: int  # of a number, or of a code, beside which a block has scales
    plain: str = ""  # torch's name of the dtype, where a number is a value of its own; empty: blocks

    @property
    def dtype(self) -> torch.dtype | None:
        """torch's dtype of numbers that are values of their own; None: blocks."""
        import torch  # late: headers are read while torch is imported

        return getattr(torch, self.plain) if self.plain else None

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of so many numbers, a multiple of `block`."""
        return columns // self.block * self.nbytes


TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4, 32, "float32"),
    1: GgmlType("F16", 1, 2, 16, "float16"),
    30: GgmlType("BF16", 1, 2, 16, "bfloat16"),
    26: GgmlType("I32", 1, 4, 32, "int32"),
    8: GgmlType("Q8_0", 32, 34, 8),
    2: GgmlType("Q4_0", 32, 18, 4),
    3: GgmlType("Q4_1", 32, 20, 4),
    6: GgmlType("Q5_0", 32, 22, 5),
    7: GgmlType("Q5_1", 32, 24, 5),
    10: GgmlType("Q2_K", 256, 84, 2),
    11: GgmlType("Q3_K", 256, 110, 3),
    12: GgmlType("Q4_K", 256, 144, 4),
    13: GgmlType("Q5_K", 256, 176, 5),
    14: GgmlType("Q6_K", 256, 210, 6),
    19: GgmlType("IQ1_S", 256, 50, 1),
    29: GgmlType("IQ1_M", 256, 56, 1),
    16: GgmlType("IQ2_XXS", 256, 66, 2),
    17: GgmlType("IQ2_XS", 256, 74, 2),
    22: GgmlType("IQ2_S", 256, 82, 2),
    18: GgmlType("IQ3_XXS", 256, 98, 3),
    21: GgmlType("IQ3_S", 256, 110, 3),
    20: GgmlType("IQ4_NL", 32, 18, 4),
    23: GgmlType("IQ4_XS", 256, 136, 4),
    34: GgmlType("TQ1_0", 256, 54, 1),
    35: GgmlType("TQ2_0", 256, 66, 2),
    39: GgmlType("MXFP4", 32, 17, 4),
    40: GgmlType("NVFP4", 64, 36, 4),
}
"""The types that tiermoe reads, by the ids that are in the file."""

UNREAD = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 27: "I64", 28: "F64", 41: "Q1_0",
}  # fmt: skip
"""Known types that tiermoe does not read."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is in a file."""

    file: Path
    kind: GgmlType
    shape: tuple[int, ...]  # in torch's order
    offset: int  # from the start of the file
    factors: GgufTensor | None = None  # of NVFP4: of the whole tensor, or of each entry along its first dimension

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: of the last dimension."""
        return self.kind.row_bytes(self.shape[-1])


@dataclass(frozen=True, slots=True)
class Strings:
    """An array of strings that stays in the file until it is read."""

    file: Path
    offset: int  # of the first string, in bytes
    count: int

    def read(self) -> list[str]:
        """The strings. ModelError where they cannot be read."""
        return _opened(self.file, lambda reader: reader.strings(self.offset, self.count))


class HeaderCutError(ModelError):
    """A file that ends within its header."""


@dataclass(frozen=True, slots=True)
class Header:
    """What one file says before its tensors' bytes."""

    entries: dict[str, Any]  # arrays of strings as `Strings`
    tensors: dict[str, GgufTensor]
    digest: bytes  # of the header's bytes


def read_header(file: Path) -> Header:
    """Reads the header of one file. ModelError names the file and what is wrong: not a GGUF, cut short, of another
    version or endianness, a type that is not read."""
    return _opened(file, lambda reader: reader.header())


def _opened(file: Path, ask: Callable[[_Reader], T]) -> T:
    try:
        with open(file, "rb", buffering=0) as handle:
            return ask(_Reader(file, handle.fileno()))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error


class _Reader:
    """Values one after the other, from a buffer that grows on demand."""

    def __init__(self, file: Path, descriptor: int) -> None:
        self._file, self._descriptor = file, descriptor
        self._size = os.fstat(descriptor).st_size
        self._buffer = bytearray()  # from byte `_begin` on
        self._begin = self._at = 0

    def header(self) -> Header:
        tensors, entries = self._counts()
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string()
            if key in metadata:
                raise self._malformed(f"the entry {key} is there twice")
            metadata[key] = self._value(self._number("I"))
        found: dict[str, tuple[GgmlType, tuple[int, ...], int]] = {}
        for _ in range(tensors):
            name = self._string()
            if name in found:
                raise self._malformed(f"the tensor {name} is there twice")
            found[name] = self._tensor(name)
        digest = xxhash.xxh3_64(memoryview(self._buffer)[: self._at]).digest()
        start = self._begin_of_tensors(metadata)
        return Header(metadata, {name: self._placed(name, start, *tensor) for name, tensor in found.items()}, digest)

    def strings(self, offset: int, count: int) -> list[str]:
        """`count` strings from a byte on."""
        self._at, self._begin = 0, offset
        return [self._string() for _ in range(count)]

    def _counts(self) -> tuple[int, int]:
        if self._size < 4 or self._take(4) != MAGIC:
            raise ModelError(f"{self._file} is not a GGUF file: it does not begin with 'GGUF'; download it again")
        version: int = self._number("I")
        if version not in VERSIONS:
            if version.bit_length() > 16:  # the bytes the other way round
                raise ModelError(
                    f"{self._file} is a big-endian GGUF; take the little-endian file, or convert it with gguf's "
                    f"gguf_convert_endian.py"
                )
            raise ModelError(
                f"{self._file} is GGUF version {version}, versions {' and '.join(map(str, VERSIONS))} are read; "
                f"convert the model again with a current llama.cpp"
            )
        tensors, entries = self._number("Q"), self._number("Q")
        return tensors, entries

    def _tensor(self, name: str) -> tuple[GgmlType, tuple[int, ...], int]:
        dimensions = self._number("I")
        if not 1 <= dimensions <= _DIMENSIONS:
            raise self._malformed(f"{name} has {dimensions} dimensions")
        shape = tuple(reversed(self._numbers("Q", dimensions)))
        kind, offset = self._number("I"), self._number("Q")
        if kind not in TYPES:
            weights = [each.name for each in TYPES.values() if each.plain != "int32"]
            raise ModelError(
                f"{self._file}: {name} is stored as {UNREAD.get(kind, f'type {kind}')}, which tiermoe does not read; "
                f"take a file with these types only: {', '.join(weights)}"
            )
        if shape[-1] % TYPES[kind].block or not all(shape):
            raise self._malformed(f"{name} of shape {shape} cannot be {TYPES[kind].name}")
        return TYPES[kind], shape, offset

    def _begin_of_tensors(self, entries: dict[str, Any]) -> int:
        alignment = entries.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise self._malformed(f"an alignment of {alignment!r}")
        return -(-self._at // alignment) * alignment

    def _placed(self, name: str, start: int, kind: GgmlType, shape: tuple[int, ...], offset: int) -> GgufTensor:
        tensor = GgufTensor(self._file, kind, shape, start + offset)
        end = tensor.offset + tensor.nbytes
        if end > self._size:
            raise ModelError(
                f"{self._file} is cut short: {name} ends at byte {end:,}, the file has {self._size:,}; download it "
                f"again"
            )
        return tensor

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._malformed(f"an entry of type {kind}")
        of, count = self._number("I"), self._number("Q")
        if of in _SCALARS:
            return self._scalars(_SCALARS[of], count)
        if of == _STRING:
            return self._skipped(count)
        raise self._malformed(f"an array of type {of}")  # nor of arrays, as in llama.cpp

    def _scalars(self, code: str, count: int) -> Sequence[Any]:
        if count <= _FEW:
            return list(self._numbers(code, count))
        values = array("B" if code == "?" else code)
        values.frombytes(self._take(count * struct.calcsize(f"<{code}")))
        return values

    def _skipped(self, count: int) -> Strings:
        found = Strings(self._file, self._at, count)
        for _ in range(count):
            at = self._at
            if at + 8 > len(self._buffer):
                self._fill(8)
            self._at = at + 8 + int.from_bytes(self._buffer[at : at + 8], "little")
        self._fill(0)
        return found

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}")))

    def _string(self) -> str:
        at = self._at
        if at + 8 > len(self._buffer):
            self._fill(8)
        length = int.from_bytes(self._buffer[at : at + 8], "little")
        end = at + 8 + length
        if end > len(self._buffer):
            self._fill(8 + length)
        self._at = end
        try:
            return self._buffer[at + 8 : end].decode()
        except UnicodeDecodeError as error:
            raise self._malformed(f"text that is not UTF-8 ({error})") from error

    def _take(self, nbytes: int) -> bytes:
        at = self._at
        if at + nbytes > len(self._buffer):
            self._fill(nbytes)
        self._at = at + nbytes
        return bytes(self._buffer[at : self._at])

    def _fill(self, nbytes: int) -> None:
        """Reads on until `nbytes` are there from the present place."""
        needed = self._at + nbytes
        if self._begin + needed > self._size:
            raise HeaderCutError(
                f"{self._file} is cut short: its header goes on beyond its {self._size:,} bytes; download it again"
            )
        if needed > MOST_HEADER:
            raise self._malformed(f"more than {MOST_HEADER:,} bytes of header")
        while len(self._buffer) < needed:
            end = self._begin + len(self._buffer)
            read = read_bytes_at(self._descriptor, max(_AT_ONCE, needed - len(self._buffer)), end)
            if not read:
                raise ModelError(f"{self._file} ended at byte {end:,} while it was read; download it again")
            self._buffer += read

    def _malformed(self, what: str) -> ModelError:
        return ModelError(f"{self._file} has a malformed GGUF header ({what}); download it again")
