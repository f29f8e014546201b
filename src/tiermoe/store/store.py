"""An expert store on disk: `store.json` beside safetensors files of experts. Format: docs/store-format.md.

`store.json` names only what is whole: a precision appears in it, in one atomic rename, after all its files are there.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tiermoe.errors import StoreError
from tiermoe.store.layout import ExpertFormat, format_from_names
from tiermoe.types import Extent, MoeLayer, Part, Segment

FORMAT = "tiermoe-expert-store"
VERSION = 1
TABLE = "store.json"

_DTYPE_NAMES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def precision_key(bits: int, quantizer: str) -> str:
    """The name of a precision in a store: '16', '8' (both quantisers give the same), '4-hqq', '2-linear', …"""
    return str(bits) if bits >= 8 else f"{bits}-{quantizer}"


@dataclass(slots=True)
class PackedLayer:
    """One layer's experts in one precision. `extents` holds one entry an expert, `errors` each one's relative
    quantisation error, `encodings` part name → encoding name (empty at 16 bits)."""

    encodings: dict[str, str]
    extents: list[Extent]
    errors: list[float]

    def to_json(self, root: Path) -> dict[str, Any]:
        return {
            "encodings": self.encodings,
            "experts": [
                {
                    "segments": [[_relative(s.file, root), s.offset, s.nbytes, s.at] for s in extent.segments],
                    "checksum": extent.checksum,
                    "error": round(error, 6),
                }
                for extent, error in zip(self.extents, self.errors, strict=True)
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], root: Path) -> PackedLayer:
        extents = [
            Extent(
                tuple(Segment(str(root / file), offset, nbytes, at) for file, offset, nbytes, at in entry["segments"]),
                entry["checksum"],
            )
            for entry in data["experts"]
        ]
        return cls(data["encodings"], extents, [entry["error"] for entry in data["experts"]])


@dataclass(slots=True)
class Precision:
    """One packed precision of all layers. `machine` is the layout its kernels need ('cpu-avx512', …, 'any')."""

    bits: int
    quantizer: str
    machine: str
    in_place: bool
    layers: list[PackedLayer]

    def to_json(self, root: Path) -> dict[str, Any]:
        return {
            "bits": self.bits,
            "quantizer": self.quantizer,
            "machine": self.machine,
            "in_place": self.in_place,
            "layers": [layer.to_json(root) for layer in self.layers],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], root: Path) -> Precision:
        layers = [PackedLayer.from_json(layer, root) for layer in data["layers"]]
        return cls(data["bits"], data["quantizer"], data["machine"], data["in_place"], layers)


@dataclass(slots=True)
class Source:
    """The checkpoint a store was made from. `dtype` is the model's compute dtype."""

    name: str
    fingerprint: str
    model_type: str
    dtype: str


@dataclass(slots=True)
class Store:
    """An opened store. `dense` maps dense bits ('8', '4') to the table of packed linear layers."""

    root: Path
    source: Source
    layers: list[MoeLayer]
    precisions: dict[str, Precision] = field(default_factory=dict)
    dense: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPE_NAMES[self.source.dtype]

    def expert_format(self, key: str, layer: int) -> ExpertFormat:
        """The format of MoE layer `layer` in precision `key`."""
        precision = self.precisions[key]
        return format_from_names(self.layers[layer], precision.bits, self.dtype, precision.layers[layer].encodings)

    def dense_format(self, bits: str, name: str) -> ExpertFormat:
        """The format of a packed dense layer: one matrix called 'weight'."""
        packed = self.dense[bits]["layers"][name]
        layer = one_matrix(name, *packed["shape"])
        return format_from_names(layer, int(bits), self.dtype, {"weight": packed["encoding"]})

    def dense_extent(self, bits: str, name: str) -> Extent:
        """Where a packed dense layer lies."""
        entry = self.dense[bits]
        packed = entry["layers"][name]
        nbytes = self.dense_format(bits, name).stored.nbytes
        return Extent((Segment(str(self.root / entry["file"]), packed["offset"], nbytes, 0),), packed["checksum"])

    def save(self) -> None:
        """Replaces store.json atomically: a reader sees the old table or the new one, never half of one."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "source": {
                "name": self.source.name,
                "fingerprint": self.source.fingerprint,
                "model_type": self.source.model_type,
                "dtype": self.source.dtype,
            },
            "layers": [
                {
                    "name": layer.name,
                    "experts": layer.experts,
                    "top_k": layer.top_k,
                    "parts": [[part.name, list(part.shape), part.transposed] for part in layer.parts],
                }
                for layer in self.layers
            ],
            "precisions": {key: precision.to_json(self.root) for key, precision in self.precisions.items()},
            "dense": self.dense,
        }
        write_atomically(self.root / TABLE, json.dumps(document, separators=(",", ":")).encode())


def one_matrix(name: str, out: int, in_: int) -> MoeLayer:
    """A linear layer seen as an expert of one matrix."""
    return MoeLayer(name, 1, 1, (Part("weight", (out, in_)),))


def open_store(root: Path) -> Store:
    """Reads store.json. StoreError: not a store, another format version, or a data file missing or short."""
    table = root / TABLE
    try:
        document = json.loads(table.read_text())
    except FileNotFoundError:
        raise StoreError(f"{root} holds no {TABLE}: it is not an expert store (or its packing never finished)") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{table} cannot be read ({error}); pack the model again with --force") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StoreError(f"{table} is not a tiermoe expert store")
    if document.get("version") != VERSION:
        raise StoreError(
            f"{root} has store format version {document.get('version')}, this tiermoe reads version {VERSION}; "
            f"pack the model again (tiermoe pack MODEL --force)"
        )
    try:
        store = Store(
            root,
            Source(**document["source"]),
            [_layer(entry) for entry in document["layers"]],
            {key: Precision.from_json(entry, root) for key, entry in document["precisions"].items()},
            document["dense"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{table} is damaged ({error!r}); pack the model again with --force") from error
    return store


def check_files(precision: Precision) -> None:
    """StoreError where a file of `precision` is missing or shorter than its extents need."""
    needed: dict[str, int] = {}
    for layer in precision.layers:
        for extent in layer.extents:
            for segment in extent.segments:
                needed[segment.file] = max(needed.get(segment.file, 0), segment.offset + segment.nbytes)
    for file, nbytes in needed.items():
        try:
            size = os.path.getsize(file)
        except OSError:
            raise StoreError(f"{file} is missing from the expert store; pack the model again with --force") from None
        if size < nbytes:
            raise StoreError(
                f"{file} is truncated: {size:,} bytes of at least {nbytes:,}; pack the model again with --force"
            )


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file beside `path`, syncs it and renames it over `path`."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _layer(entry: dict[str, Any]) -> MoeLayer:
    parts = tuple(Part(name, tuple(shape), transposed) for name, shape, transposed in entry["parts"])
    return MoeLayer(entry["name"], entry["experts"], entry["top_k"], parts)


def _relative(file: str, root: Path) -> str:
    """Files of the store itself are named relative to it, so that a store can be moved; a checkpoint's are absolute."""
    path = Path(file)
    return path.name if path.parent == root else str(path)
