"""Store of a checkpoint: opened, and packed if it lacks the chosen precision; for run, chat, pack and load alike."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from tiermoe.errors import StoreError
from tiermoe.formats.encode_experts import Inputs
from tiermoe.formats.in_place import OWN_BITS
from tiermoe.formats.pack import clear, pack_experts, packing_bytes
from tiermoe.formats.store import (
    MTP_FOLDER,
    Precision,
    Source,
    Store,
    check_dense_file,
    check_files,
    joined,
    open_store,
    pack_anew,
    precision_key,
)
from tiermoe.formats.store_files import TABLE, exclusive
from tiermoe.model.hf.blueprint import Blueprint, chosen_store_root
from tiermoe.model.packing import pack_dense, recipe_key
from tiermoe.model.packing import packing_bytes as dense_packing_bytes
from tiermoe.offload.presets import Resolved
from tiermoe.platform.process_memory import PACKING_HEAP, heap_for_packing
from tiermoe.types import Extent, Need, Phase

Progress = Callable[[str, int, int], None]
"""Called with (what is packed, or which process is waited for, done, in all)."""


def is_store(path: Path) -> bool:
    """True for the directory of an expert store."""
    return (path / TABLE).exists()


def store_root(blueprint: Blueprint, chosen: Path | None) -> Path:
    """The folder of the blueprint's store: the chosen one, or the one in the user's cache; of an MTP head, a folder in
    its model's."""
    root = chosen_store_root(blueprint.directory, blueprint.name, blueprint.checkpoint.fingerprint(), chosen)
    return root if blueprint.trunk is None else root / MTP_FOLDER


def found_store(blueprint: Blueprint, chosen: Path | None) -> Store | None:
    """The store in the folder of the blueprint's, whichever checkpoint it is of; None if none can be read. Where
    experts are used as they were published, the store need not be there. The stores of a model's parts are one
    (`store.joined`)."""
    if blueprint.parts:
        trunk, head = (found_store(part, chosen) for part in blueprint.parts)
        return None if trunk is None or head is None else joined(trunk, head)
    root = store_root(blueprint, chosen)
    try:
        return _with_own(open_store(root), blueprint)
    except StoreError:
        if blueprint.own_experts is None or (root / TABLE).exists():
            return None
        return _with_own(_new(blueprint, root), blueprint)


def open_or_create(
    blueprint: Blueprint, root: Path, force: bool = False, found: Store | None = None, waiting: Progress | None = None
) -> Store:
    """The store at `root`, empty if there is none yet, with the checkpoint's outline beside it. found: what was just
    read there, which is not read again. waiting: called with the progress of another process that packs there.
    StoreError if the store is damaged, another checkpoint's or another version's; `force` makes an empty one of it
    then."""
    store = _opened_or_new(blueprint, root, force, waiting) if found is None else _checked(found, blueprint)
    with contextlib.suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)
    blueprint.leave_outline(root)
    return _with_own(store, blueprint)


def _with_own(store: Store, blueprint: Blueprint) -> Store:
    """The store, with experts that are used as they were published, where they lie."""
    if blueprint.own_experts is not None and store.source.fingerprint == blueprint.checkpoint.fingerprint():
        store.precisions[precision_key(OWN_BITS, "")] = blueprint.own_experts
    return store


def _opened_or_new(blueprint: Blueprint, root: Path, force: bool, waiting: Progress | None) -> Store:
    if (root / TABLE).exists():
        try:
            return _checked(open_store(root), blueprint)
        except StoreError:
            if not force:
                raise
    with exclusive(root, waiting):
        if force:
            clear(root)
        elif (root / TABLE).exists():  # another process was faster
            return _checked(open_store(root), blueprint)
        store = _new(blueprint, root)
        store.save()
    return store


def _new(blueprint: Blueprint, root: Path) -> Store:
    dtype = str(blueprint.dtype).removeprefix("torch.")
    source = Source(blueprint.name, blueprint.checkpoint.fingerprint(), blueprint.family.model_type, dtype)
    return Store(root, source, blueprint.layers)


def _checked(store: Store, blueprint: Blueprint) -> Store:
    check_fingerprint(store.root, store.source.fingerprint, blueprint.checkpoint.fingerprint())
    if store.layers != blueprint.layers or store.dtype != blueprint.dtype:
        raise _described_otherwise(store, blueprint)
    return store


def _check_dense_layers(store: Store, key: str, blueprint: Blueprint) -> None:
    """StoreError if the model has not all of the dense layers packed under `key`: another transformers may call them
    otherwise."""
    tensors = blueprint.outline.tensors
    for name, packed in store.dense[key]["layers"].items():
        weight = tensors.get(f"{name}.weight")
        if weight is None or weight.shape != tuple(packed["shape"]):
            raise _described_otherwise(store, blueprint)


def _described_otherwise(store: Store, blueprint: Blueprint) -> StoreError:
    return StoreError(
        f"the store in {store.root} does not describe the layers of {blueprint.name} as this transformers does; "
        f"{pack_anew(store.root)}"
    )


def ensure_packed(
    store: Store,
    blueprint: Blueprint,
    bits: int,
    quantizer: str,
    dense_bits: int = 16,
    progress: Progress | None = None,
    unit: str = "expert",
    workers: int | None = None,
    inputs: Inputs | None = None,
) -> None:
    """Packs the asked precision, and the dense layers, if the store lacks them; `workers` pieces at a time, None: one
    more than torch has threads, for one of them reads. Where another process packs into the store, it is waited for,
    and its result is used. inputs: the experts', for quantizers that need to know them."""
    workers = workers or torch.get_num_threads() + 1
    key = precision_key(bits, quantizer, unit)
    precision = store.precisions.get(key)
    if not store.layers:  # an MTP head without experts
        pass
    elif precision is None:
        report = (lambda done, total: progress("packing experts (once)", done, total)) if progress else None
        with heap_for_packing():
            pack_experts(store, blueprint.experts, bits, quantizer, report, unit, workers, inputs, progress)
    else:
        if precision.in_place and not precision.derived:
            _follow_checkpoint(precision, blueprint)
        check_files(store, key)
    if dense_bits < 16:
        dense = recipe_key(blueprint, dense_bits)
        if dense not in store.dense:
            what = f"packing dense layers (once{_instead_of(store, dense)})"
            report = (lambda done, total: progress(what, done, total)) if progress else None
            with heap_for_packing():
                pack_dense(store, blueprint, dense_bits, report, workers, progress)
        else:
            _check_dense_layers(store, dense, blueprint)
            check_dense_file(store, dense)


def _instead_of(store: Store, key: str) -> str:
    """The reason for packing dense layers that the store has under another key than `key`; empty if it has none of
    such bits."""
    bits = key.partition("-")[0]
    older = [other for other in store.dense if other.partition("-")[0] == bits]
    return f": the store has them as {' and '.join(older)}, this version takes {key}" if older else ""


def is_packed(store: Store | None, blueprint: Blueprint, resolved: Resolved) -> bool:
    """Whether the checkpoint's store (`found_store`) has all that is asked for, and experts that are served from the
    checkpoint where they lie."""
    if store is None or missing(store, blueprint, resolved) != ([], False):
        return False
    settings, unit = resolved.settings, resolved.composition.unit
    found = (store.precisions[precision_key(bits, settings.quantizer_used, unit)] for bits in resolved.precisions)
    return not any(precision.in_place and _moved(precision, blueprint) for precision in found)


def missing(store: Store | None, blueprint: Blueprint, resolved: Resolved) -> tuple[list[int], bool]:
    """Precisions of experts that the checkpoint's store (`found_store`) lacks, and whether it lacks dense layers."""
    settings, unit = resolved.settings, resolved.composition.unit
    precisions: Collection[str] = store.precisions if store else ()
    dense: Collection[str] = store.dense if store else ()
    keys = {bits: precision_key(bits, settings.quantizer_used, unit) for bits in resolved.precisions}
    bits = settings.dense_bits_used
    lacks_dense = bits < 16 and recipe_key(blueprint, bits) not in dense
    return [bits for bits, key in keys.items() if key not in precisions], lacks_dense


def packing_needs(store: Store | None, blueprint: Blueprint, resolved: Resolved, workers: int) -> list[Need]:
    """Memory of packing into the checkpoint's store (`found_store`) by so many workers, at its largest step; empty
    if the store lacks nothing."""
    settings, unit = resolved.settings, resolved.composition.unit
    precisions, dense = missing(store, blueprint, resolved)
    steps = []
    for bits in precisions:
        if bits == 16:  # checksums at the most, or copies
            largest = max(sum(math.prod(part.shape) for part in layer.parts) for layer in blueprint.layers)
            steps.append(workers * 2 * largest * blueprint.dtype.itemsize)
            continue
        formats = blueprint.expert_formats(bits, unit, settings.quantizer_used)
        placed = unit == "expert" and blueprint.experts.in_place(0, 0) is not None
        reading = None if placed else blueprint.experts.reading_bytes()
        steps.append(packing_bytes(formats, settings.quantizer_used, reading, workers))
    if dense:
        steps.append(workers * dense_packing_bytes(blueprint, settings.dense_bits_used))
    step = max(steps, default=0)
    return [Need("packing", step + min(step, workers * PACKING_HEAP), Phase.PACKING)] if steps else []


def _follow_checkpoint(precision: Precision, blueprint: Blueprint) -> None:
    """Updates the places of experts that are served from the checkpoint, which may have been moved since."""
    if not _moved(precision, blueprint):
        return
    for index, layer in enumerate(precision.layers):
        for expert, extent in enumerate(layer.extents):
            segments = blueprint.experts.in_place(index, expert)
            if segments is not None:
                layer.extents[expert] = Extent(tuple(segments), extent.checksum)


def _moved(precision: Precision, blueprint: Blueprint) -> bool:
    """Whether experts that are served from the checkpoint lie in other files, by the table, than it has now."""
    if precision.derived:
        return False
    shards = {str(shard) for shard in blueprint.checkpoint.shards}
    extents = (extent for layer in precision.layers for extent in layer.extents)
    return any(segment.file not in shards for extent in extents for segment in extent.segments)


def check_fingerprint(root: Path, stored: str, actual: str) -> None:
    """StoreError if a store was made from another checkpoint."""
    if stored != actual:
        raise StoreError(
            f"the store in {root} was packed from another checkpoint (fingerprint {stored}, this model's is {actual}); "
            f"choose another folder with --store, or {pack_anew(root)}"
        )
