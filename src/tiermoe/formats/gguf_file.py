"""A GGUF model: one file, or its shards. Headers are read in blocks; no tensor is mapped or touched.

A file is: 'GGUF', version, number of tensors and of entries, entries (key, type, value), tensors (name, sizes, type,
offset), padding, and the tensors' bytes. All numbers are little-endian. The gguf package's reader makes several arrays
of each string of a vocabulary, which takes seconds for 150,000 strings; this module leaves a vocabulary in the file
until it is read. `tiermoe.model.gguf` maps GGUF tensors to a model's parameters.
"""

from __future__ import annotations

import functools
import math
import os
import re
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from tiermoe.errors import ModelError
from tiermoe.formats.ggml_types import TYPES, UNREAD, GgmlType
from tiermoe.formats.source import require_shards
from tiermoe.platform.file_io import read_bytes_at

T = TypeVar("T")

SUFFIX = ".gguf"
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
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_NEEDED: Any = object()


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


@dataclass(frozen=True)
class GgufFile:
    """The headers of a model's files. A value that an entry must have raises ModelError where it is missing or
    wrong."""

    path: Path  # the file that was named
    shards: tuple[Path, ...]  # all files, in their order
    entries: dict[str, Any]  # of the first shard's header
    tensors: dict[str, GgufTensor]  # of all shards, by llama.cpp's names
    digests: tuple[bytes, ...]  # of the headers, a shard each

    @functools.cached_property
    def longest(self) -> int:
        """The longest dimension of a tensor."""
        return max((size for tensor in self.tensors.values() for size in tensor.shape), default=0)

    @property
    def architecture(self) -> str:
        """`general.architecture`. ModelError where there is none."""
        return str(self.require("general.architecture"))

    def require(self, key: str) -> Any:
        """The value of an entry. ModelError where the file has no such entry."""
        if key not in self.entries:
            raise ModelError(f"{self.path} says nothing of {key}; convert the model again with a current llama.cpp")
        return self.entries[key]

    def strings(self, key: str) -> list[str]:
        """The strings of an entry, read from the file; none where it has no such entry."""
        found = self.entries.get(key)
        return found.read() if isinstance(found, Strings) else []

    def of_model(self, key: str, default: Any = None) -> Any:
        """The value of an entry of the architecture: 'expert_count' for 'qwen3moe.expert_count'."""
        return self.entries.get(f"{self.architecture}.{key}", default)

    def count(self, key: str, default: int = _NEEDED, least: int = 0) -> int:
        """An entry of the architecture: a whole number of at least `least`. ModelError where it is no such number, or
        is missing and has no default."""
        value = self._entry(key, default)
        if not isinstance(value, int) or value < least:
            raise self._wrong(key, value, f"a whole number of at least {least}")
        return value

    def decimal(self, key: str, default: Any = _NEEDED) -> Any:
        """An entry of the architecture, `rounded`, or the default. ModelError where it is no finite number from 0 on,
        or is missing and has no default."""
        value = self._entry(key, default)
        if value is default:
            return value
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self._wrong(key, value, "a finite number of at least 0")
        return rounded(value)

    def uniform_count(self, key: str, default: int = _NEEDED) -> int:
        """`count`, at least 1, of an entry that newer files may have for each layer. ModelError where layers differ."""
        value = self.of_model(key, default)
        if not isinstance(value, list):
            return self.count(key, default, least=1)
        if not value or any(each != value[0] for each in value):
            raise ModelError(
                f"{self.path}: {key} differs between layers, which tiermoe does not compute from GGUF files"
            )
        if not isinstance(value[0], int) or value[0] < 1:
            raise self._wrong(key, value[0], "a whole number of at least 1")
        return value[0]

    def largest(self, key: str) -> int:
        """The largest value, at least 1, of an entry that files have for each layer, or for all."""
        value = self.of_model(key)
        if not isinstance(value, list):
            return self.count(key, least=1)
        found = max((each for each in value if isinstance(each, int)), default=0)
        if found < 1:
            raise self._wrong(key, value, "a whole number of at least 1 for some layer")
        return found

    def _entry(self, key: str, default: Any) -> Any:
        value = self.of_model(key, default)
        return self.require(f"{self.architecture}.{key}") if value is _NEEDED else value

    def _wrong(self, key: str, value: Any, instead: str) -> ModelError:
        return ModelError(
            f"{self.path} says that {key} is {str(value)[:80]}, which is not {instead}; download it again"
        )


class HeaderCutError(ModelError):
    """A file that ends within its header."""


def rounded(value: float) -> float:
    """The shortest decimal of a float32: 1e-06 for 9.999999974752427e-07, as a config.json has it."""
    return float(f"{value:.7g}")


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file."""
    return path.suffix == SUFFIX


def open_gguf(path: Path) -> GgufFile:
    """Reads the headers of a model's file, any of its shards named. ModelError: as `read_header`, or a shard is
    missing."""
    shards = _shards(path)
    headers = [read_header(shard) for shard in shards]
    stated = headers[0].entries.get("split.count", len(shards)) or 1
    if stated != len(shards):
        raise ModelError(
            f"{path} is one of {stated} shards, but is not called NAME-00001-of-{str(stated).zfill(5)}.gguf; give the "
            f"shards their names back"
        )
    digests = tuple(each.digest for each in headers)
    return GgufFile(path, tuple(shards), headers[0].entries, _merged(path, headers), digests)


def _shards(path: Path) -> list[Path]:
    found = SHARD.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found[3])
    shards = [path.with_name(f"{found[1]}-{number:05}-of-{found[3]}{SUFFIX}") for number in range(1, count + 1)]
    require_shards(path.parent, shards)
    return shards


def _merged(path: Path, headers: list[Header]) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ModelError(f"{name} lies in {tensors[name].file} and in {tensor.file}; download {path} again")
            tensors[name] = tensor
    stated = headers[0].entries.get("split.tensors.count", len(tensors))
    if stated != len(tensors):
        raise ModelError(f"the shards of {path} hold {len(tensors)} tensors of {stated}; download them again")
    return _with_factors(path, tensors)


def _with_factors(path: Path, tensors: dict[str, GgufTensor]) -> dict[str, GgufTensor]:
    """The tensors, those of NVFP4 with their factors, which llama.cpp's converter writes as tensors of their own."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if tensor.kind.name != "NVFP4" or suffix != "weight":
            continue
        found.pop(f"{stem}.input_scale", None)  # of activations in 4 bits, which are not computed with here
        factors = found.pop(f"{stem}.scale", None)
        if factors is not None:
            several = tensor.shape[0] if len(tensor.shape) == 3 else 1
            if factors.kind.name != "F32" or factors.shape != (several,):
                raise ModelError(
                    f"{path}: {stem}.scale is {factors.kind.name} of shape {factors.shape}, not F32 of ({several},); "
                    f"convert the model again with a current llama.cpp"
                )
            found[name] = replace(tensor, factors=factors)
    return found


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


NGRAM_TABLE = "per_layer_token_embd.weight"
"""The table of n-grams (Qwen3.8): tens of GB, of which a token needs some rows."""


def read_whole(file: GgufFile) -> list[GgufTensor]:
    """The tensors that loading reads whole, in the order of the file: all but the experts, and the tables of which a
    token needs rows: of n-grams, and the input embedding unless it is the output layer too."""
    rows = (NGRAM_TABLE, "token_embd.weight" if "output.weight" in file.tensors else "")
    found = [tensor for name, tensor in file.tensors.items() if "_exps." not in name and name not in rows]
    return sorted(found, key=lambda tensor: (file.shards.index(tensor.file), tensor.offset))
