"""What an interrupted packing has finished. Believed only where it fits what is packed and the files are there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tiermoe.process.json_files import read_json
from tiermoe.store.files import file_name, write_atomically
from tiermoe.store.layout import ExpertFormat
from tiermoe.store.store import VERSION, PackedLayer, Source
from tiermoe.types import Extent

Layers = dict[int, PackedLayer]


class Journal:
    """The finished layers of precision `key` in the store at `root`.

    source: the checkpoint; a journal of another one, or of another format version, is not believed; nor is one of
    other inputs than `made_from` (`Precision`).
    """

    NAMES = "packing-*.json"

    def __init__(self, root: Path, key: str, source: Source, made_from: str = "") -> None:
        self.path = root / self.NAMES.replace("*", key)
        self._root, self._key = root, key
        self._stamp: dict[str, Any] = {"version": VERSION, "fingerprint": source.fingerprint, "dtype": source.dtype}
        if made_from:
            self._stamp["made_from"] = made_from
        self._layers: Layers = {}

    def read(self, formats: list[ExpertFormat], in_place: list[list[Extent]] | None) -> Layers:
        """The layers that need no packing any more. in_place: where experts served from the checkpoint lie (checksums
        are not compared), None where they are written to the store."""
        try:
            document = read_json(self.path)
            if {name: document[name] for name in self._stamp} != self._stamp:
                return {}
            layers = {
                int(index): PackedLayer.from_json(entry, self._root, in_place is not None)
                for index, entry in document["layers"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        self._layers = {
            index: layer
            for index, layer in layers.items()
            if 0 <= index < len(formats) and self._fits(index, layer, formats[index], in_place)
        }
        return dict(self._layers)

    def add(self, index: int, layer: PackedLayer) -> None:
        self._layers[index] = layer
        entries = {str(number): finished.to_json(self._root) for number, finished in self._layers.items()}
        write_atomically(self.path, json.dumps({**self._stamp, "layers": entries}).encode())

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _fits(self, index: int, layer: PackedLayer, form: ExpertFormat, in_place: list[list[Extent]] | None) -> bool:
        names = {part: encoding.name for part, encoding in form.encodings.items()}
        if len(layer.extents) != form.layer.experts or layer.encodings != names:
            return False
        if in_place is not None:
            return [extent.segments for extent in layer.extents] == [extent.segments for extent in in_place[index]]
        file, nbytes = self._root / file_name(self._key, index), form.stored.nbytes
        try:
            size = os.path.getsize(file)
        except OSError:
            return False
        segments = [segment for extent in layer.extents for segment in extent.segments]
        return len(segments) == len(layer.extents) and all(
            segment.file == str(file) and segment.nbytes == nbytes and segment.offset + nbytes <= size
            for segment in segments
        )
