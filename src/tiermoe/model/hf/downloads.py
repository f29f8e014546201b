"""Models in the hub's cache on this machine: found and removed. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiermoe.errors import ModelError
from tiermoe.platform import file_io

PART = ".tiermoe-part"
"""Ending of a file whose download has not ended."""


@dataclass(frozen=True, slots=True)
class CachedDownload:
    """A model in the hub's cache."""

    name: str
    root: Path
    weights: tuple[str, ...]  # files of weights, by their names
    nbytes: int  # of all files, unfinished ones too
    used: float  # when a file was last read or written; seconds since the epoch


def cached_downloads() -> list[CachedDownload]:
    """Models in the hub's cache, the one that was used last first. What is no repository of the hub's is left out."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    found = [_described(each) for each in repositories if each.repo_type == "model"]
    return sorted(found, key=lambda download: -download.used)


def _described(repository: Any) -> CachedDownload:
    files = {file.file_name for revision in repository.revisions for file in revision.files}
    weights = sorted(name for name in files if name.endswith((".safetensors", ".gguf")))
    unfinished = sum(part.stat().st_size for part in _parts(repository.repo_path))
    used = max(repository.last_accessed, repository.last_modified)
    return CachedDownload(
        repository.repo_id, repository.repo_path, tuple(weights), repository.size_on_disk + unfinished, used
    )  # fmt: skip


def _parts(root: Path) -> list[Path]:
    return list((root / "blobs").glob(f"*{PART}"))


def remove_download(download: CachedDownload) -> None:
    """Removes a model from the hub's cache, all revisions. ModelError where another process downloads it, or it cannot
    be removed."""
    from huggingface_hub import scan_cache_dir

    info = scan_cache_dir()
    # alone: a copy of a repository has commits of the same names
    own = frozenset(each for each in info.repos if each.repo_path == download.root)
    revisions = [revision.commit_hash for each in own for revision in each.revisions]
    with _nobody_downloads(download):
        replace(info, repos=own).delete_revisions(*revisions).execute()
    if download.root.exists():  # the hub's client only warns
        raise ModelError(f"{download.root} cannot be removed; check its permissions")


@contextlib.contextmanager
def _nobody_downloads(download: CachedDownload) -> Iterator[None]:
    with contextlib.ExitStack() as opened:
        for part in _parts(download.root):
            descriptor = file_io.open_to_write(part)
            opened.callback(os.close, descriptor)
            try:
                file_io.lock(descriptor)
            except BlockingIOError as error:
                raise ModelError(
                    f"'{download.name}' is being downloaded by another process; end it, or wait until it is done"
                ) from error
        yield
