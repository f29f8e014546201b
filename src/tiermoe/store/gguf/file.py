"""A GGUF model: one file, or its shards."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiermoe.errors import ModelError
from tiermoe.store.gguf.header import GgufTensor, Header, Strings, read_header

SUFFIX = ".gguf"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class GgufFile:
    """path: the file that was named. shards: all files, in their order. entries: of the first shard's header. tensors:
    of all, by llama.cpp's names. digests: of the headers, a shard each."""

    path: Path
    shards: tuple[Path, ...]
    entries: dict[str, Any]
    tensors: dict[str, GgufTensor]
    digests: tuple[bytes, ...]

    @functools.cached_property
    def longest(self) -> int:
        """The longest dimension of a tensor."""
        return max((size for tensor in self.tensors.values() for size in tensor.shape), default=0)

    @property
    def architecture(self) -> str:
        """`general.architecture`. ModelError where there is none."""
        return str(self.require("general.architecture"))

    def require(self, key: str) -> Any:
        """The value of an entry. ModelError where the file has none."""
        if key not in self.entries:
            raise ModelError(f"{self.path} says nothing of {key}; convert the model again with a current llama.cpp")
        return self.entries[key]

    def strings(self, key: str) -> list[str]:
        """The strings of an entry, read from the file; none where it has no such entry."""
        found = self.entries.get(key)
        return found.read() if isinstance(found, Strings) else []

    def of_model(self, key: str, default: Any = None) -> Any:
        """The value of an entry of the architecture's own: 'expert_count' for 'qwen3moe.expert_count'."""
        return self.entries.get(f"{self.architecture}.{key}", default)


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
    found = _SHARD.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found[3])
    shards = [path.with_name(f"{found[1]}-{number:05}-of-{found[3]}{SUFFIX}") for number in range(1, count + 1)]
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing:
        raise ModelError(
            f"{len(missing)} of {count} shards are missing in {path.parent}: {', '.join(missing[:3])}"
            f"{' …' if len(missing) > 3 else ''}; download them again"
        )
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
    return tensors
