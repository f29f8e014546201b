"""Opens the store of a checkpoint, packing what it lacks. One place for run, chat, pack and load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tiermoe.errors import StoreError
from tiermoe.kernels import machine_layout
from tiermoe.runtime.blueprint import Blueprint
from tiermoe.runtime.dense import pack_dense, recipe_key
from tiermoe.runtime.resolve import check_fingerprint, default_store_root
from tiermoe.store.lock import exclusive
from tiermoe.store.pack import clear, pack_experts
from tiermoe.store.store import (
    TABLE,
    Precision,
    Source,
    Store,
    check_dense_file,
    check_files,
    open_store,
    precision_key,
)
from tiermoe.types import Extent

Progress = Callable[[str, int, int], None]
"""Called with (what is packed, done, in all)."""


def store_root(blueprint: Blueprint, chosen: Path | None) -> Path:
    """The folder of the blueprint's store: the chosen one, or the one in the user's cache."""
    root = chosen or default_store_root(blueprint.directory, blueprint.name, blueprint.checkpoint.fingerprint())
    return root.expanduser().absolute()


def open_or_create(blueprint: Blueprint, root: Path, force: bool = False) -> Store:
    """The store at `root`, empty where there is none yet. StoreError where the store is damaged, another checkpoint's
    or another version's; `force` makes an empty one of it then."""
    if (root / TABLE).exists():
        try:
            return _open(blueprint, root)
        except StoreError:
            if not force:
                raise
    with exclusive(root):
        if force:
            clear(root)
        elif (root / TABLE).exists():  # another process was faster
            return _open(blueprint, root)
        store = Store(root, _source(blueprint), blueprint.layers)
        store.save()
    return store


def _source(blueprint: Blueprint) -> Source:
    dtype = str(blueprint.dtype).removeprefix("torch.")
    return Source(blueprint.name, blueprint.checkpoint.fingerprint(), blueprint.family.model_type, dtype)


def _open(blueprint: Blueprint, root: Path) -> Store:
    store = open_store(root)
    check_fingerprint(root, store.source.fingerprint, blueprint.checkpoint.fingerprint())
    if store.layers != blueprint.layers or store.dtype != blueprint.dtype:
        raise StoreError(
            f"the store in {root} does not describe the layers of {blueprint.name} as this transformers does; "
            f"pack the model again (tiermoe pack MODEL --force)"
        )
    return store


def ensure_packed(
    store: Store,
    blueprint: Blueprint,
    bits: int,
    quantizer: str,
    dense_bits: int = 16,
    progress: Progress | None = None,
    device: str = "cpu",
    unit: str = "expert",
) -> None:
    """Packs the asked precision, and the dense layers, where the store lacks them, for the kernels of `device`.
    StoreError where it holds them for another machine's kernels."""
    layout = machine_layout(device)
    key = precision_key(bits, quantizer, layout, unit)
    precision = store.precisions.get(key)
    if precision is None:
        report = (lambda done, total: progress("packing experts (once)", done, total)) if progress else None
        pack_experts(store, blueprint.experts, bits, quantizer, layout, report, unit)
    else:
        check_machine(store.root, precision.machine, layout)
        if precision.in_place:
            _follow_checkpoint(precision, blueprint)
        check_files(precision)
    if dense_bits < 16:
        dense = recipe_key(blueprint, dense_bits, layout)
        if dense not in store.dense:
            report = (lambda done, total: progress("packing dense layers (once)", done, total)) if progress else None
            pack_dense(store, blueprint, dense_bits, layout, report)
        else:
            check_machine(store.root, store.dense[dense]["machine"], layout)
            check_dense_file(store, dense)


def _follow_checkpoint(precision: Precision, blueprint: Blueprint) -> None:
    """Experts that are served from the checkpoint lie where it lies now, should it have been moved since."""
    extents = precision.layers[0].extents
    if Path(extents[0].segments[0].file).parent == blueprint.directory:
        return
    for index, layer in enumerate(precision.layers):
        for expert, extent in enumerate(layer.extents):
            segments = blueprint.experts.in_place(index, expert)
            if segments is not None:
                layer.extents[expert] = Extent(tuple(segments), extent.checksum)


def check_machine(root: Path, machine: str, layout: str) -> None:
    """StoreError where experts were packed for other kernels than those of `layout`."""
    if machine not in ("any", layout):
        raise StoreError(
            f"the store in {root} is packed for {machine}, this machine needs {layout}; "
            f"pack it here into another folder with --out, or anew with --force"
        )
