"""Checkpoint → expert store: one expert at a time, layer by layer, resumable, never half a store taken for whole.

A layer's file is written as `….partial`, synced and renamed; a journal remembers finished layers; `store.json` names
the precision only when all are there. A lock keeps a second process out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
import xxhash

from tiermoe.config import format_size
from tiermoe.errors import PackError
from tiermoe.quant.encodings import cpu_layout
from tiermoe.quant.quantizers import QUANTIZERS
from tiermoe.store.layout import ExpertFormat, expert_format
from tiermoe.store.safetensors_file import file_name, partial_path, write_header
from tiermoe.store.store import PackedLayer, Precision, Store, precision_key, write_atomically
from tiermoe.types import Extent, MoeLayer, Segment

Progress = Callable[[int, int], None]
"""Called with (experts done, experts in all)."""


class ExpertSource(Protocol):
    """What packing reads: the experts of a checkpoint, one at a time, through transformers' own conversion."""

    layers: list[MoeLayer]

    def read(self, layer: int, expert: int) -> Mapping[str, torch.Tensor]:
        """Part name → values, each of the part's shape, in the model's compute dtype."""

    def in_place(self, layer: int, expert: int) -> list[Segment] | None:
        """Where the checkpoint holds the expert's bytes just as a slot wants them at 16 bits; None where it does not."""


def pack_experts(
    store: Store, source: ExpertSource, bits: int, quantizer: str, machine: str | None = None, progress: Progress | None = None
) -> Precision:
    """Adds a precision to `store` and returns it. Picks up where an interrupted run stopped.

    machine: layout of the kernels, by default this CPU's. Raises PackError where the disk fills, the folder cannot be
    written or another process is packing into it.
    """
    key = precision_key(bits, quantizer)
    machine = machine or cpu_layout()
    formats = [expert_format(layer, bits, store.dtype, machine, quantizer) for layer in store.layers]
    in_place = bits == 16 and all(source.in_place(i, 0) is not None for i in range(len(store.layers)))
    with exclusive(store.root), _disk_errors(store.root):
        if not in_place:
            _check_space(store.root, key, formats)
        layers = list(_pack_layers(store, source, key, formats, quantizer, in_place, progress))
        precision = Precision(bits, quantizer if bits < 8 else "", machine if bits < 16 else "any", in_place, layers)
        store.precisions[key] = precision
        store.save()
        _journal_path(store.root, key).unlink(missing_ok=True)
    return precision


def _pack_layers(
    store: Store,
    source: ExpertSource,
    key: str,
    formats: list[ExpertFormat],
    quantizer: str,
    in_place: bool,
    progress: Progress | None,
) -> Iterator[PackedLayer]:
    journal = _read_journal(store.root, key)
    total = sum(layer.experts for layer in store.layers)
    done = 0
    for index, layer in enumerate(store.layers):

        def report(expert: int, before: int = done) -> None:
            if progress is not None:
                progress(before + expert, total)

        packed = journal.get(index)
        if packed is None:
            if in_place:
                packed = _checksum_layer(source, index, layer.experts, report)
            else:
                packed = _write_layer(store.root, source, key, index, formats[index], quantizer, report)
            journal[index] = packed
            _write_journal(store.root, key, journal)
        done += layer.experts
        report(0, done)
        yield packed


def _write_layer(
    root: Path,
    source: ExpertSource,
    key: str,
    index: int,
    form: ExpertFormat,
    quantizer: str,
    report: Callable[[int], None],
) -> PackedLayer:
    path = root / file_name(key, index)
    buffer = torch.empty(form.stored.nbytes, dtype=torch.uint8)
    extents: list[Extent] = []
    errors: list[float] = []
    with open(partial_path(path), "wb") as handle:
        offset = write_header(handle, form.stored, index, form.layer.experts)
        for expert in range(form.layer.experts):
            errors.append(form.encode(source.read(index, expert), QUANTIZERS[quantizer], buffer))
            content = memoryview(buffer.numpy())
            handle.write(content)
            segment = Segment(str(path), offset, len(content), 0)
            extents.append(Extent((segment,), xxhash.xxh3_64_hexdigest(content)))
            offset += len(content)
            report(expert + 1)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(partial_path(path), path)
    names = {part: encoding.name for part, encoding in form.encodings.items()}
    return PackedLayer(names, extents, errors)


def _checksum_layer(source: ExpertSource, index: int, experts: int, report: Callable[[int], None]) -> PackedLayer:
    extents: list[Extent] = []
    for expert in range(experts):
        segments = source.in_place(index, expert)
        assert segments is not None, "one expert of a layer lies in place and another does not"
        digest = xxhash.xxh3_64()
        for segment in segments:
            with open(segment.file, "rb", buffering=0) as handle:
                digest.update(os.pread(handle.fileno(), segment.nbytes, segment.offset))
        extents.append(Extent(tuple(segments), digest.hexdigest()))
        report(expert + 1)
    return PackedLayer({}, extents, [0.0] * experts)


@contextlib.contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Holds the store's lock; PackError names the process that has it."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _cannot_write(root, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise PackError(
                f"process {holder} is packing into {root} right now; wait until it is done and run again, or name "
                f"another folder with --out"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = shutil.disk_usage(root).free
            raise PackError(
                f"the disk filled while packing into {root} ({format_size(free)} free; {error.strerror}); free some "
                f"space and run again: finished layers are kept, or choose another folder with --out"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise _cannot_write(root, error) from error
        raise


def _cannot_write(root: Path, error: OSError) -> PackError:
    return PackError(f"cannot write to {root}: {error.strerror}; choose another folder with --out (or --store)")


def _check_space(root: Path, key: str, formats: list[ExpertFormat]) -> None:
    needed = sum(
        form.stored.nbytes * form.layer.experts
        for index, form in enumerate(formats)
        if not (root / file_name(key, index)).exists()
    )
    free = shutil.disk_usage(root).free
    if needed > free:
        raise PackError(
            f"packing needs {format_size(needed)} in {root}, {format_size(free)} are free; free some space or choose "
            f"another folder with --out"
        )


def _journal_path(root: Path, key: str) -> Path:
    return root / f"packing-{key}.json"


def _read_journal(root: Path, key: str) -> dict[int, PackedLayer]:
    try:
        entries = json.loads(_journal_path(root, key).read_text())
        return {int(index): PackedLayer.from_json(entry, root) for index, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write_journal(root: Path, key: str, journal: dict[int, PackedLayer]) -> None:
    entries = {index: layer.to_json(root) for index, layer in journal.items()}
    write_atomically(_journal_path(root, key), json.dumps(entries).encode())
