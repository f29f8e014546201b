"""The user's cache folder and the stores in it: found, named, and removed where nobody uses them. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiermoe.errors import ConfigError, StoreError
from tiermoe.platform import file_io
from tiermoe.platform.json_files import read_json

FORMAT = "tiermoe-expert-store"
TABLE = "store.json"
LOCK = ".lock"
"""File that a process locks while it packs into the folder."""
_EXPERTS = "experts-*"  # all that an interrupted removal may have left


@dataclass(frozen=True, slots=True)
class CachedStore:
    """A store in the user's cache folder."""

    root: Path
    name: str  # of the model, as the user named it; of the folder where the table cannot be read
    precisions: tuple[str, ...]  # of experts, by their keys; none where they run where the checkpoint has them
    dense: tuple[str, ...]  # of packed dense layers, by their keys
    nbytes: int  # of all files
    used: float  # when it was last packed into or run from; seconds since the epoch
    profiles: int  # number of calibration profiles
    problem: str  # why its table cannot be read; empty for a whole store

    @property
    def label(self) -> str:
        """The model's name in the folder's name, which also has the checkpoint's fingerprint."""
        return self.root.name.rpartition("-")[0]

    def answers_to(self, name: str) -> bool:
        """Whether a user's name stands for this store: the model's, or that of the folder without the fingerprint."""
        return name == self.name or name.replace("/", "--") == self.label


def cache_folder() -> Path:
    """The user's cache folder: TIERMOE_CACHE, or XDG_CACHE_HOME/tiermoe, or ~/.cache/tiermoe. Empty variables count as
    none. ConfigError where nothing names a folder of the user's."""
    if own := os.environ.get("TIERMOE_CACHE"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "tiermoe"
    try:
        home = None if os.environ.get("HOME") == "" else Path.home()  # Python takes / for an empty one
    except RuntimeError:
        home = None
    if home is None:
        raise ConfigError(
            "there is no folder for packed experts: HOME and XDG_CACHE_HOME are empty; set one of them, or "
            "TIERMOE_CACHE"
        )
    return home / ".cache" / "tiermoe"


def cached_stores() -> list[CachedStore]:
    """The stores in the user's cache folder, the one that was used last first; those too that are damaged."""
    try:
        folders = [each for each in cache_folder().absolute().iterdir() if each.is_dir()]
    except OSError:
        return []
    stores = [_described(each) for each in folders if (each / TABLE).exists() or next(each.glob(_EXPERTS), None)]
    return sorted(stores, key=lambda store: -store.used)


def _described(root: Path) -> CachedStore:
    name, precisions, dense, problem = root.name, (), (), ""
    try:
        table: Any = read_json(root / TABLE)
        if table["format"] != FORMAT:
            raise ValueError("it is another program's")
        name, precisions, dense = str(table["source"]["name"]), tuple(table["precisions"]), tuple(table["dense"])
    except FileNotFoundError:
        problem = "its removal, or its packing, was interrupted"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"its table cannot be read ({error})"
    files = [(each, each.lstat()) for each in root.rglob("*") if not each.is_dir()]
    used = max(
        (about.st_mtime for each, about in files if each.parent == root and each.name != LOCK),
        default=root.stat().st_mtime,
    )
    profiles = sum(1 for _ in (root / "profiles").glob("*"))
    return CachedStore(
        root, name, precisions, dense, sum(about.st_size for _, about in files), used, profiles, problem
    )  # fmt: skip


def hold(root: Path) -> int | None:
    """Keeps a store from being removed until the descriptor is closed, or the process ends. None where the system locks
    no folders. StoreError while it is being removed."""
    try:
        return file_io.lock_folder(root, shared=True)
    except BlockingIOError as error:
        raise StoreError(f"the store in {root} is being removed by another process; run this again") from error


def removable(store: CachedStore) -> bool:
    """Whether a store is no link, and no process packs into it or runs from it now."""
    try:
        with _alone(store.root):
            return not store.root.is_symlink()
    except (StoreError, OSError):
        return False


def remove_store(store: CachedStore) -> None:
    """Removes a store's folder. StoreError where it is a link or cannot be removed, or where a process packs into it or
    runs from it."""
    root = store.root
    if root.is_symlink():
        raise StoreError(f"{root} is a link to a folder elsewhere, of which nothing is removed; remove it by hand")
    try:
        with _alone(root):
            (root / TABLE).unlink(missing_ok=True)  # first: nobody takes what is left for a store
            for entry in root.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name != LOCK:
                    entry.unlink()
        shutil.rmtree(root)
    except OSError as error:
        raise StoreError(f"{root} cannot be removed: {error.strerror}; check its permissions") from error


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """While no other process packs into a store or has it open."""
    packing = file_io.open_to_write(root / LOCK)
    opened = None
    try:
        try:
            file_io.lock(packing)
        except BlockingIOError as error:
            raise StoreError(f"a process packs into {root}; end it, or wait until it is done") from error
        try:
            opened = file_io.lock_folder(root, shared=False)
        except BlockingIOError as error:
            raise StoreError(f"a running process uses the store in {root}; end it first") from error
        yield
    finally:
        os.close(packing)
        if opened is not None:
            os.close(opened)
