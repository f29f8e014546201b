"""Opens the store of a checkpoint, packing what it lacks. One place for run, chat, pack and load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tiermoe.errors import StoreError
from tiermoe.quant.encodings import cpu_layout
from tiermoe.runtime.blueprint import Blueprint
from tiermoe.runtime.dense import pack_dense
from tiermoe.runtime.resolve import check_fingerprint, default_store_root
from tiermoe.store.pack import exclusive, pack_experts
from tiermoe.store.store import TABLE, Source, Store, check_files, open_store, precision_key

Progress = Callable[[str, int, int], None]
"""Called with (what is packed, done, in all)."""


def store_root(blueprint: Blueprint, chosen: Path | None) -> Path:
    """The folder of the blueprint's store: the chosen one, or the one in the user's cache."""
    return chosen or default_store_root(blueprint.directory, blueprint.name, blueprint.checkpoint.fingerprint())


def open_or_create(blueprint: Blueprint, root: Path, force: bool = False) -> Store:
    """The store at `root`, empty where there is none yet. `force` forgets what is packed. StoreError where the
    store is another checkpoint's or another version's."""
    fingerprint = blueprint.checkpoint.fingerprint()
    if (root / TABLE).exists() and not force:
        store = open_store(root)
        check_fingerprint(root, store.source.fingerprint, fingerprint)
        return store
    source = Source(blueprint.name, fingerprint, blueprint.family.model_type, str(blueprint.dtype).removeprefix("torch."))
    store = Store(root, source, blueprint.layers)
    with exclusive(root):
        if force:
            for journal in root.glob("packing-*.json"):
                journal.unlink()
        store.save()
    return store


def ensure_packed(
    store: Store, blueprint: Blueprint, bits: int, quantizer: str, dense_bits: int = 16, progress: Progress | None = None
) -> None:
    """Packs the asked precision, and the dense layers, where the store lacks them. StoreError where it holds them for
    another machine's kernels."""
    key = precision_key(bits, quantizer)
    precision = store.precisions.get(key)
    if precision is None:
        report = (lambda done, total: progress("packing experts (once)", done, total)) if progress else None
        pack_experts(store, blueprint.experts, bits, quantizer, progress=report)
    else:
        check_machine(store.root, precision.machine)
        check_files(precision)
    if dense_bits < 16:
        dense = store.dense.get(str(dense_bits))
        if dense is None:
            report = (lambda done, total: progress("packing dense layers (once)", done, total)) if progress else None
            pack_dense(store, blueprint, dense_bits, report)
        else:
            check_machine(store.root, dense["machine"])


def check_machine(root: Path, machine: str) -> None:
    """StoreError where experts were packed for other kernels than this machine's."""
    if machine not in ("any", cpu_layout()):
        raise StoreError(
            f"the store in {root} is packed for {machine}, this machine needs {cpu_layout()}; "
            f"pack it here into another folder with --out, or anew with --force"
        )
