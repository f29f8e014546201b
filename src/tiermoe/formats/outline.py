"""The outline of a checkpoint's model, in a small file beside its store: what transformers' modelling code says of the
model, so that a later start need not import that code. A file that is damaged, of another checkpoint or of another
transformers is ignored; a file that cannot be written is done without."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import xxhash

from tiermoe.formats.safetensors import DTYPES
from tiermoe.formats.store import layer_from_json, layer_to_json
from tiermoe.platform.json_files import read_json, replace_unlocked
from tiermoe.types import MoeLayer

VERSION = 6
NAME = "outline.json"

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A parameter or buffer that is not an expert's."""

    key: str | None  # of the checkpoint's tensor with the same values; None where tensors are converted into it
    shape: tuple[int, ...]
    read_as: torch.dtype
    dtype: torch.dtype  # in which it is kept


@dataclass(frozen=True, slots=True)
class Outline:
    """A model's MoE layers and its other tensors."""

    layers: list[MoeLayer]
    sources: tuple[Mapping[str, tuple[str, ...]], ...]  # of each layer's parts (`formats.source`)
    tensors: Mapping[str, DenseTensor]  # by path in the model
    tied: Mapping[str, str]  # path → the path whose tensor it shares
    packable: tuple[str, ...]  # paths of the linear layers that `--dense-bits` packs
    table: str | None  # path of the input embedding's weight where its rows can be read one by one
    tables: Mapping[str, tuple[str, ...]]
    """Paths of other embeddings (of each layer, of several tokens) → the checkpoint's tensors that have their rows, one
    after another."""
    joined: Mapping[str, tuple[str, ...]]  # the same of parameters that are no embedding's
    dense_bytes: int  # of tensors that stay at 16 bits, tied ones once
    dense_keys: tuple[str, ...]  # of the checkpoint's tensors that are not experts'
    gate: tuple[Any, ...] | None  # name and settings (`kernels.gates.gate_named`); None: one that is not in its table
    whole: bool  # whether our own decoders need nothing but these tensors

    def keys_of(self, path: str) -> tuple[str, ...]:
        """The checkpoint's tensors that have a tensor's rows, one after another; none of tensors that are converted
        otherwise."""
        key = self.tensors[path].key
        return (self.tables.get(path) or self.joined.get(path, ())) if key is None else (key,)

    def tensor(self, path: str) -> DenseTensor:
        """A tensor, or the one that it is tied to."""
        return self.tensors[self.tied.get(path, path)]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where what a store keeps of a model comes from: the checkpoint's fingerprint, and the versions that made it."""

    fingerprint: str
    versions: str


def read_outline(root: Path, origin: Origin) -> Outline | None:
    """The outline in the store at `root`; None where there is none of this origin that can be used."""
    document = read_kept(root / NAME, origin)
    try:
        return None if document is None else _from_json(document)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def write_outline(root: Path, origin: Origin, outline: Outline) -> None:
    """Replaces the outline: a reader sees the old or the new one. Where it cannot be written nothing happens."""
    document = {each.name: getattr(outline, each.name) for each in fields(outline)}
    document["layers"] = [layer_to_json(layer) for layer in outline.layers]
    document["tensors"] = {path: _tensor_to_json(tensor) for path, tensor in outline.tensors.items()}
    write_kept(root / NAME, origin, document)


def read_kept(file: Path, origin: Origin) -> dict[str, Any] | None:
    """The document in a small file of a store (`write_kept`); None where it is damaged, or of another origin or
    version."""
    try:
        document = read_json(file)
        checksum = document.pop("checksum")
        whole = document.pop("made") == _made(file, origin) and checksum == _checksum(document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return document if whole else None


def write_kept(file: Path, origin: Origin, document: Mapping[str, Any]) -> None:
    """Replaces a small file of a store: what transformers says of a model. Where it cannot be written nothing
    happens."""
    more = {"made": _made(file, origin), "checksum": _checksum(document)}
    replace_unlocked(file, _json({**document, **more}))


def _made(file: Path, origin: Origin) -> list[Any]:
    return [f"tiermoe-{file.stem}", VERSION, origin.fingerprint, origin.versions]


def _checksum(document: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64(_json(document)).hexdigest()


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _from_json(document: dict[str, Any]) -> Outline:
    return Outline(
        layers=[layer_from_json(entry) for entry in document["layers"]],
        sources=tuple({part: tuple(map(str, names)) for part, names in each.items()} for each in document["sources"]),
        tensors={str(path): _tensor_from_json(entry) for path, entry in document["tensors"].items()},
        tied=dict(document["tied"]),
        packable=tuple(document["packable"]),
        table=document["table"],
        tables=_keys_from_json(document["tables"]),
        joined=_keys_from_json(document["joined"]),
        dense_bytes=int(document["dense_bytes"]),
        dense_keys=tuple(map(str, document["dense_keys"])),
        gate=None if document["gate"] is None else tuple(document["gate"]),
        whole=bool(document["whole"]),
    )


def _keys_from_json(entry: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    return {str(path): tuple(map(str, keys)) for path, keys in entry.items()}


def _tensor_to_json(tensor: DenseTensor) -> list[Any]:
    dtypes = [str(dtype).removeprefix("torch.") for dtype in (tensor.read_as, tensor.dtype)]
    return [tensor.key, list(tensor.shape), *dtypes]


def _tensor_from_json(entry: list[Any]) -> DenseTensor:
    key, shape, read_as, dtype = entry
    return DenseTensor(key, tuple(map(int, shape)), _DTYPES[read_as], _DTYPES[dtype])
