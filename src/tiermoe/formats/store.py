"""An expert store on disk: `store.json` beside safetensors files of experts. Format: docs/formats.md.

`store.json` names only what is whole: a precision appears in it, in one atomic rename, after all its files are there.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tiermoe.errors import StoreError
from tiermoe.formats.encoding import FLOATS, ORDER
from tiermoe.formats.expert_format import ExpertFormat, format_from_names
from tiermoe.formats.neurons import is_neuron_key, neuron_format_from_names, neuron_key
from tiermoe.formats.registry import quantizer_used
from tiermoe.formats.store_files import FORMAT, TABLE, Progress, Waiting, exclusive, write_atomically
from tiermoe.platform.json_files import read_json, stays_inside
from tiermoe.types import Extent, MoeLayer, Part, Segment

VERSION = 1

_DENSE_ENTRY = {"encoding", "shape", "offset", "checksum", "error"}

MTP_FOLDER = "mtp"
"""The folder of an MTP head's store, in its model's."""

_ANY = "any"


def precision_key(bits: int, quantizer: str, unit: str = "expert") -> str:
    """The name of a precision in a store: '16', '8' (all quantisers give the same), '3-nonlinear', '2-linear', …;
    '4-hqq-neuron' in the neuron unit: all can lie in one store."""
    key = str(bits) if bits >= 8 else f"{bits}-{quantizer_used(quantizer, bits, unit)}"
    return neuron_key(key) if unit == "neuron" else key


def dense_key(bits: int, more: Sequence[str] = ()) -> str:
    """The name of packed dense layers in a store: '8', '4'. more: kinds of layers with other bits and these, as in
    '4-lm_head8'."""
    return "-".join([str(bits), *more])


def dense_file_name(key: str) -> str:
    """The file of the dense layers packed under `key`."""
    return f"dense-{key}.bin"


def order_of(bits: int) -> str:
    """What a table records as `machine`: the order of codes of 4, 3 and 2 bits, the only ones that had several."""
    return ORDER if bits in (4, 3, 2) else _ANY


@dataclass(slots=True)
class PackedLayer:
    """One layer's experts in one precision."""

    encodings: dict[str, str]  # part name → encoding name; empty at 16 bits
    extents: list[Extent]  # an entry an expert
    errors: list[float]  # each expert's relative quantisation error
    in_page: list[dict[str, int]] = field(default_factory=list)
    """`ExpertFormat.in_page` of each expert, in a precision that is not kept in the table; else empty."""

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
    def from_json(cls, data: dict[str, Any], root: Path, in_place: bool) -> PackedLayer:
        """Reads `to_json`. in_place: whether the experts are in a checkpoint's shards, not in the store's own files;
        ValueError where they are not."""
        entries = data["experts"]
        files = {file for entry in entries for file, *_ in entry["segments"]}
        where = {file: _located(file, root, in_place) for file in files}
        extents = [
            Extent(tuple(Segment(where[file], *place) for file, *place in entry["segments"]), entry["checksum"])
            for entry in entries
        ]
        return cls(data["encodings"], extents, [entry["error"] for entry in data["experts"]])


@dataclass(slots=True)
class Precision:
    """One packed precision of all layers."""

    bits: int
    quantizer: str
    in_place: bool  # whether the experts are in a checkpoint's shards
    layers: list[PackedLayer]
    derived: bool = False  # whether it follows from the checkpoint's headers; then it is not kept in the table
    made_from: str = ""  # the text on which the quantizer was calibrated; empty where it needs none

    def to_json(self, root: Path) -> dict[str, Any]:
        made_from = {"made_from": self.made_from} if self.made_from else {}
        return {
            "bits": self.bits,
            "quantizer": self.quantizer,
            "machine": order_of(self.bits),
            "in_place": self.in_place,
            **made_from,
            "layers": [layer.to_json(root) for layer in self.layers],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], root: Path) -> Precision:
        layers = [PackedLayer.from_json(layer, root, data["in_place"]) for layer in data["layers"]]
        made_from = data.get("made_from", "")
        return cls(data["bits"], data["quantizer"], data["in_place"], layers, made_from=made_from)


@dataclass(slots=True)
class Source:
    """The checkpoint from which a store was made."""

    name: str
    fingerprint: str
    model_type: str
    dtype: str  # the model's compute dtype


@dataclass(slots=True)
class Store:
    """An opened store."""

    root: Path
    source: Source
    layers: list[MoeLayer]
    precisions: dict[str, Precision] = field(default_factory=dict)  # by `precision_key`
    dense: dict[str, dict[str, Any]] = field(default_factory=dict)  # `dense_key` → table of packed linear layers
    drafting: int = 0  # MoE layers of an MTP head, the last ones, in two stores that are `joined`

    @property
    def dtype(self) -> torch.dtype:
        return FLOATS[self.source.dtype]

    def refresh(self) -> None:
        """Reads the table again, with what another process has packed meanwhile. StoreError where the folder now has
        another checkpoint's store."""
        if not (self.root / TABLE).exists():
            return
        current = open_store(self.root)
        if current.source.fingerprint != self.source.fingerprint:
            raise StoreError(f"{self.root} was packed from another checkpoint meanwhile; run again")
        derived = {key: precision for key, precision in self.precisions.items() if precision.derived}
        self.precisions, self.dense = current.precisions | derived, current.dense

    def expert_format(self, key: str, layer: int) -> ExpertFormat:
        """The format of MoE layer `layer` in precision `key`, of its first expert."""
        precision = self.precisions[key]
        packed, described = precision.layers[layer], (self.layers[layer], precision.bits, self.dtype)
        if is_neuron_key(key):
            return neuron_format_from_names(*described, packed.encodings)
        return format_from_names(*described, packed.encodings, packed.in_page[0] if packed.in_page else {})

    def expert_formats(self, key: str, layer: int) -> list[ExpertFormat]:
        """The format of each expert of a MoE layer, the same object for experts that are stored alike. All experts take
        as many bytes."""
        first, packed = self.expert_format(key, layer), self.precisions[key].layers[layer]
        if not packed.in_page:
            return [first] * len(packed.extents)
        known: dict[frozenset[tuple[str, int]], ExpertFormat] = {}
        return [known.setdefault(frozenset(each.items()), replace(first, in_page=each)) for each in packed.in_page]

    def dense_format(self, key: str, name: str) -> ExpertFormat:
        """The format of a packed dense layer: one matrix called 'weight'."""
        packed = self.dense[key]["layers"][name]
        layer = one_matrix(name, *packed["shape"])
        return format_from_names(layer, int(key.partition("-")[0]), self.dtype, {"weight": packed["encoding"]})

    def dense_extent(self, key: str, name: str) -> Extent:
        """Where a packed dense layer is."""
        entry = self.dense[key]
        packed = entry["layers"][name]
        file = packed.get("file", entry["file"])
        nbytes = self.dense_format(key, name).stored.nbytes
        return Extent((Segment(str(self.root / file), packed["offset"], nbytes, 0),), packed["checksum"])

    def dense_files(self, key: str) -> list[str]:
        """The files of the dense layers packed under `key`."""
        places = (self.dense_extent(key, name).segments[0].file for name in self.dense[key]["layers"])
        return list(dict.fromkeys(places))

    def save(self) -> None:
        """Replaces store.json atomically: a reader sees the old table or the new one, never half of one."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "source": asdict(self.source),
            "layers": [layer_to_json(layer) for layer in self.layers],
            "precisions": {
                key: precision.to_json(self.root) for key, precision in self.precisions.items() if not precision.derived
            },
            "dense": self.dense,
        }
        write_atomically(self.root / TABLE, json.dumps(document, separators=(",", ":")).encode())


def joined(trunk: Store, head: Store) -> Store:
    """A model's store with that of its MTP head, which lies in a folder of it, as one that is read and never saved: the
    head's layer is the last one. It has what both have; a head without experts has every precision."""
    precisions = {
        key: replace(found, layers=[*found.layers, *head.precisions[key].layers]) if head.layers else found
        for key, found in trunk.precisions.items()
        if key in head.precisions or not head.layers
    }
    dense = {
        key: {**found, "layers": {**found["layers"], **_inside(head, key, trunk.root)}}
        for key, found in trunk.dense.items()
        if key in head.dense
    }
    return Store(trunk.root, trunk.source, [*trunk.layers, *head.layers], precisions, dense, len(head.layers))


def _inside(head: Store, key: str, root: Path) -> dict[str, Any]:
    """Packed dense layers of a store in a folder of `root`, as the table of the store at `root` would have them."""
    file = str((head.root / head.dense[key]["file"]).relative_to(root))
    return {name: {**entry, "file": file} for name, entry in head.dense[key]["layers"].items()}


@contextlib.contextmanager
def adding_to(store: Store, waiting: Waiting | None = None, progress: Progress | None = None) -> Iterator[Progress]:
    """`exclusive`, after reading the store's table again: another process may have packed meanwhile. Yields a function
    that records progress, and calls `progress`."""
    with exclusive(store.root, waiting) as record:
        store.refresh()

        def report(done: int, total: int) -> None:
            record(done, total)
            if progress is not None:
                progress(done, total)

        yield report


def one_matrix(name: str, out: int, in_: int) -> MoeLayer:
    """A linear layer seen as an expert of one matrix."""
    return MoeLayer(name, 1, 1, (Part("weight", (out, in_)),))


def pack_anew(root: Path) -> str:
    """Advice for a message about an unusable store in `root`."""
    if root.name == MTP_FOLDER and (root.parent / TABLE).exists():
        return f"remove the folder {root}, and the next run with --draft mtp packs the head anew"
    return f"'tiermoe pack MODEL --store {root} --force' packs the model anew"


def open_store(root: Path) -> Store:
    """Reads store.json. StoreError: not a store, another format version, or a damaged table."""
    table = root / TABLE
    try:
        document = read_json(table)
    except FileNotFoundError:
        raise StoreError(
            f"{root} holds no {TABLE}: it is not an expert store (or its packing never finished)"
        ) from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{table} cannot be read ({error}); {pack_anew(root)}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StoreError(f"{table} is not the table of a tiermoe expert store; name another folder")
    if document.get("version") != VERSION:
        raise StoreError(
            f"{root} has store format version {document.get('version')}, this tiermoe reads version {VERSION}; "
            f"{pack_anew(root)}"
        )
    try:
        store = Store(
            root,
            Source(**document["source"]),
            [layer_from_json(entry) for entry in document["layers"]],
            {key: Precision.from_json(entry, root) for key, entry in _readable(document["precisions"]).items()},
            _readable(document["dense"]),
        )
        _check_table(store)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{table} is damaged ({error!r}); {pack_anew(root)}") from error
    return store


def _readable(table: dict[str, Any]) -> dict[str, Any]:
    """The entries of a table without those of codes in another order, which older versions packed for GPUs: no kernel
    takes them, and the next `save` leaves them out."""
    return {key: entry for key, entry in table.items() if entry["machine"] in (_ANY, ORDER)}


def _check_table(store: Store) -> None:
    """ValueError where the table contradicts itself, KeyError where it names an unknown dtype."""
    assert store.dtype
    for key, precision in store.precisions.items():
        if [len(layer.extents) for layer in precision.layers] != [layer.experts for layer in store.layers]:
            raise ValueError(f"precision {key} does not hold every expert")
    for key, dense in store.dense.items():
        whole = {"file", "layers"} <= dense.keys()
        if not whole or not all(entry.keys() >= _DENSE_ENTRY for entry in dense["layers"].values()):
            raise ValueError(f"dense layers {key} are not whole")
        _located(dense["file"], store.root, in_place=False)


def check_files(store: Store, key: str) -> None:
    """StoreError where a file of precision `key` is missing or shorter than its extents need."""
    _check_extents(store.root, (extent for layer in store.precisions[key].layers for extent in layer.extents))


def check_dense_file(store: Store, key: str) -> None:
    """StoreError where the file of the dense layers packed under `key` is missing or too short."""
    _check_extents(store.root, (store.dense_extent(key, name) for name in store.dense[key]["layers"]))


def _check_extents(root: Path, extents: Iterable[Extent]) -> None:
    needed: dict[str, int] = {}
    for extent in extents:
        for segment in extent.segments:
            needed[segment.file] = max(needed.get(segment.file, 0), segment.offset + segment.nbytes)
    for file, nbytes in needed.items():
        try:
            size = os.path.getsize(file)
        except OSError:
            raise StoreError(f"{file} is missing from the expert store; {pack_anew(root)}") from None
        if size < nbytes:
            raise StoreError(f"{file} is truncated: {size:,} bytes of at least {nbytes:,}; {pack_anew(root)}")


def layer_to_json(layer: MoeLayer) -> dict[str, Any]:
    """A MoE layer as tables hold it."""
    parts = [[part.name, list(part.shape), part.transposed] for part in layer.parts]
    return {"name": layer.name, "experts": layer.experts, "top_k": layer.top_k, "parts": parts}


def layer_from_json(entry: dict[str, Any]) -> MoeLayer:
    """What `layer_to_json` wrote."""
    parts = tuple(Part(name, tuple(shape), transposed) for name, shape, transposed in entry["parts"])
    return MoeLayer(entry["name"], entry["experts"], entry["top_k"], parts)


def _located(file: str, root: Path, in_place: bool) -> str:
    """The path of a file that a table names: one in the store's folder or, of experts that are served from a
    checkpoint, a shard. ValueError for any other."""
    if not (Path(file).is_absolute() and file.endswith(".safetensors") if in_place else stays_inside(file)):
        raise ValueError(f"{file!r} lies outside of the store")
    return str(root / file)


def _relative(file: str, root: Path) -> str:
    """Files of the store itself are named relative to it, so that a store can be moved; a checkpoint's are absolute."""
    path = Path(file)
    return path.name if path.parent == root else str(path)
