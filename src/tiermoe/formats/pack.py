"""Checkpoint → expert store: one expert at a time, layer by layer, resumable, never half a store taken for whole.

A layer's file is written as `….partial`, synced and renamed; a journal remembers finished layers; `store.json` names
the precision only when all are there. A second process waits for a lock and finds what the first one has packed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from tiermoe.config import CALIBRATED, format_size
from tiermoe.errors import ModelError, PackError
from tiermoe.formats.encode_experts import Inputs, encoded_experts, working_bytes
from tiermoe.formats.encoding import scratch
from tiermoe.formats.expert_format import ExpertFormat, header_of
from tiermoe.formats.gptq import SECONDS_A_WEIGHT
from tiermoe.formats.neurons import GATE, NEURONS, neuron_layer, unit_format
from tiermoe.formats.outline import NAME as OUTLINE
from tiermoe.formats.quantizers import QUANTIZERS, UNCALIBRATED
from tiermoe.formats.registry import quantizer_used
from tiermoe.formats.source import ExpertSource
from tiermoe.formats.store import (
    VERSION,
    PackedLayer,
    Precision,
    Source,
    Store,
    adding_to,
    dense_file_name,
    precision_key,
)
from tiermoe.formats.store_files import (
    TABLE,
    Pieces,
    Progress,
    Waiting,
    file_name,
    whole_or_nothing,
    write_atomically,
)
from tiermoe.platform.json_files import read_json
from tiermoe.types import Extent, MoeLayer, Segment


def pack_experts(
    store: Store,
    source: ExpertSource,
    bits: int,
    quantizer: str,
    progress: Progress | None = None,
    unit: str = "expert",
    workers: int = 1,
    inputs: Inputs | None = None,
    waiting: Waiting | None = None,
) -> Precision:
    """Adds a precision to `store` and returns it. Picks up where an interrupted run stopped.

    unit: 'expert', or 'neuron' for a precision whose neurons can be read alone (`formats.neurons`; ModelError and
    ConfigError as `unit_format`). workers: experts, or parts of large ones, that are read and encoded at a time, each
    on a thread; what is written does not depend on it. inputs: what the experts get, for quantizers that need to know
    it. progress: called with (experts done, in all). waiting: called with the progress of another process that packs
    into the folder, which is waited for. Raises PackError where the disk fills, the folder cannot be written, or a
    quantizer lacks inputs.
    """
    key = precision_key(bits, quantizer, unit)
    quantizer = quantizer_used(quantizer, bits, unit)
    inputs = _needed(inputs, quantizer, bits, store.layers)
    formats = [unit_format(unit, layer, bits, store.dtype, quantizer) for layer in store.layers]
    source = NeuronSource(source) if unit == "neuron" else source
    in_place = _in_place(source, store.layers) if bits == 16 else None
    job = _Job(store.root, source, key, formats, quantizer, in_place, workers, inputs)
    made_from = inputs.made_from if inputs is not None else ""
    with adding_to(store, waiting, progress) as report:
        if key in store.precisions:
            return store.precisions[key]
        journal = Journal(store.root, key, store.source, made_from)
        finished = journal.read(formats, in_place)
        if in_place is None:
            _make_room(store.root, key, formats, finished)
        try:
            layers = list(_pack_layers(job, journal, finished, report))
        finally:
            scratch.clear()  # what one worker alone, in this thread, has used
        quantized_by = quantizer if bits < 8 else ""
        precision = Precision(bits, quantized_by, in_place is not None, layers, made_from=made_from)
        store.precisions[key] = precision
        store.save()
        journal.remove()
    return precision


def _needed(inputs: Inputs | None, quantizer: str, bits: int, layers: Sequence[MoeLayer]) -> Inputs | None:
    """The inputs where the quantizer takes them, else None. PackError where it lacks them."""
    if quantizer not in CALIBRATED or bits >= 8:
        return None
    if inputs is None:
        minutes = sum(layer.experts * layer.expert_elements for layer in layers) * SECONDS_A_WEIGHT / 60
        raise PackError(
            f"quantizer {quantizer} has to be calibrated on a text, and the store has no experts of it: tiermoe pack "
            f"MODEL --bits {bits} --quantizer {quantizer} packs them, in about {max(1, round(minutes)):,} min of a "
            f"core; or choose --quantizer {UNCALIBRATED[quantizer]}, which needs no calibration and loses more"
        )
    return inputs


def packing_bytes(formats: Sequence[ExpertFormat], quantizer: str, reading: int | None, workers: int) -> int:
    """Largest memory of `pack_experts`, in bytes. reading: bytes of reading an expert beside the expert; None where the
    checkpoint has experts as they are, and rows of them are read."""
    return max(working_bytes(form, QUANTIZERS[quantizer], reading, workers) for form in formats)


def forget(store: Store, precision: str, dense: str | None, waiting: Waiting | None = None) -> None:
    """Removes a precision, and the dense layers packed under `dense`, from the store with their files. A precision that
    follows from the checkpoint's headers stays. waiting: as in `pack_experts`."""
    with adding_to(store, waiting):
        kept = store.precisions.get(precision)
        if kept is not None and kept.derived:
            return
        known = store.precisions.pop(precision, None), store.dense.pop(dense or "", None)
        if known != (None, None):
            store.save()
        Journal(store.root, precision, store.source).remove()
        for file in store.root.glob(file_name(precision, "*")):
            file.unlink()
        if dense is not None:
            (store.root / dense_file_name(dense)).unlink(missing_ok=True)


def clear(root: Path) -> None:
    """Removes all files of packing from a folder. The caller has the folder's lock."""
    for pattern in (TABLE, OUTLINE, Journal.NAMES, file_name("*", "*"), dense_file_name("*")):
        for file in root.glob(pattern):
            file.unlink()


class Journal:
    """What an interrupted packing of precision `key` has finished in the store at `root`: layers by index.

    A journal is believed only where the files are there and it fits what is packed: the checkpoint `source`, the format
    version, and the inputs `made_from` (`Precision`)."""

    NAMES = "packing-*.json"

    def __init__(self, root: Path, key: str, source: Source, made_from: str = "") -> None:
        self.path = root / self.NAMES.replace("*", key)
        self._root, self._key = root, key
        self._stamp: dict[str, Any] = {"version": VERSION, "fingerprint": source.fingerprint, "dtype": source.dtype}
        if made_from:
            self._stamp["made_from"] = made_from
        self._layers: dict[int, PackedLayer] = {}

    def read(self, formats: list[ExpertFormat], in_place: list[list[Extent]] | None) -> dict[int, PackedLayer]:
        """The layers that need no packing any more. in_place: where the checkpoint has the experts (checksums are not
        compared); None where they are written to the store."""
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
        """Records a finished layer."""
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


class NeuronSource:
    """Hands a checkpoint's experts to packing as the parts of the neuron unit (`source.ExpertSource`)."""

    def __init__(self, source: ExpertSource) -> None:
        self.layers = [neuron_layer(layer) for layer in source.layers]
        self._source = source
        self._parts = [tuple(part.name for part in layer.parts) for layer in source.layers]

    def read(self, layer: int, expert: int) -> Mapping[str, torch.Tensor]:
        tensors = self._source.read(layer, expert)
        gate_up, down = (tensors[name] for name in self._parts[layer])
        gate, up = gate_up.chunk(2)
        return {GATE: gate, NEURONS: torch.cat((up, down.t()), dim=1)}

    def in_place(self, layer: int, expert: int) -> list[Segment] | None:
        return None


@dataclass(frozen=True, slots=True)
class _Job:
    """What is packed."""

    root: Path
    source: ExpertSource
    key: str  # of the precision
    formats: list[ExpertFormat]  # of the layers
    quantizer: str
    in_place: list[list[Extent]] | None  # where the checkpoint has the experts; None: they are written to `root`
    workers: int
    inputs: Inputs | None


def _pack_layers(
    job: _Job, journal: Journal, finished: Mapping[int, PackedLayer], progress: Progress
) -> Iterator[PackedLayer]:
    total = sum(form.layer.experts for form in job.formats)
    done = 0
    for index, form in enumerate(job.formats):

        def report(expert: int, before: int = done) -> None:
            progress(before + expert, total)

        packed = finished.get(index)
        if packed is None:
            if job.in_place is not None:
                packed = _checksum_layer(job.in_place[index], report)
            else:
                quantizer = QUANTIZERS[job.quantizer]
                encoded = encoded_experts(form, quantizer, job.source, index, job.workers, job.inputs)
                packed = write_layer(job.root, job.key, index, form, encoded, report)
            journal.add(index, packed)
        else:
            report(form.layer.experts)
        done += form.layer.experts
        yield packed


def write_layer(
    root: Path,
    key: str,
    index: int,
    form: ExpertFormat,
    encoded: Iterable[tuple[memoryview, float]],
    report: Callable[[int], None] = lambda done: None,
) -> PackedLayer:
    """Writes the file of layer `index` in precision `key`, whole or not at all. encoded: of each expert the
    `form.stored.nbytes` bytes and the relative error. report: called with the experts done. The caller has the
    folder's lock."""
    path = root / file_name(key, index)
    extents: list[Extent] = []
    errors: list[float] = []
    with whole_or_nothing(path) as handle:
        file = Pieces(handle)
        offset = file.write(header_of(form.stored, index, form.layer.experts))
        for content, error in encoded:
            errors.append(error)
            file.write(content)
            segment = Segment(str(path), offset, len(content), 0)
            extents.append(Extent((segment,), xxhash.xxh3_64_hexdigest(content)))
            offset += len(content)
            report(len(extents))
        file.finish()
    names = {part: encoding.name for part, encoding in form.encodings.items()}
    return PackedLayer(names, extents, errors)


def _in_place(source: ExpertSource, layers: list[MoeLayer]) -> list[list[Extent]] | None:
    """Extents (without checksums) of all experts where the checkpoint can serve every one of them, else None."""
    found: list[list[Extent]] = []
    for index, layer in enumerate(layers):
        extents = []
        for expert in range(layer.experts):
            segments = source.in_place(index, expert)
            if segments is None:
                return None
            extents.append(Extent(tuple(segments), ""))
        found.append(extents)
    return found


def _checksum_layer(extents: list[Extent], report: Callable[[int], None]) -> PackedLayer:
    checked: list[Extent] = []
    for expert, extent in enumerate(extents):
        digest = xxhash.xxh3_64()
        for segment in extent.segments:
            digest.update(_bytes_of(segment))
        checked.append(Extent(extent.segments, digest.hexdigest()))
        report(expert + 1)
    return PackedLayer({}, checked, [0.0] * len(checked))


def _bytes_of(segment: Segment) -> bytes:
    try:
        with open(segment.file, "rb") as handle:
            handle.seek(segment.offset)
            content = handle.read(segment.nbytes)
    except OSError as error:
        raise ModelError(f"cannot read {segment.file}: {error.strerror}") from error
    if len(content) < segment.nbytes:
        raise ModelError(
            f"{segment.file} is truncated: it ends {segment.nbytes - len(content):,} bytes early; download it again"
        )
    return content


def _make_room(root: Path, key: str, formats: list[ExpertFormat], finished: Mapping[int, PackedLayer]) -> None:
    """Removes files of layers that are not finished, and checks that these fit on the disk."""
    missing = [index for index in range(len(formats)) if index not in finished]
    for index in missing:
        (root / file_name(key, index)).unlink(missing_ok=True)
    needed = sum(formats[index].stored.nbytes * formats[index].layer.experts for index in missing)
    free = shutil.disk_usage(root).free
    if needed > free:
        raise PackError(
            f"packing needs {format_size(needed)} in {root}, {format_size(free)} are free; free some space or choose "
            f"another folder with --store"
        )
