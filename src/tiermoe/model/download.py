"""Downloads a model's weights from the hub: what is needed and nothing else, said beforehand, and gone on with after an
interruption.

The hub's own client keeps the files that are finished. A shard has gigabytes, so the one that was interrupted is kept
too: beside the cache's blobs until it is whole, then as one of them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from tiermoe.config import format_size
from tiermoe.errors import ModelError
from tiermoe.model.repository import Repository, fetch, first_line, hub_errors, read_repository
from tiermoe.process import system_files

_PART = ".tiermoe-part"


def to_stderr(text: str) -> None:
    """Says it on standard error."""
    print(text, file=sys.stderr, flush=True)


def download(name: str, tell: Callable[[str], None] = to_stderr) -> Path:
    """The folder in the hub's cache with a model's config, tokenizer and weights. tell: takes a line that says how much
    is going to be downloaded. ModelError where the hub cannot be asked, the model has no safetensors, or the drive no
    room."""
    repository = read_repository(name)
    folder = fetch(name, repository.beside)
    weights = repository.weights(folder)
    missing = [file for file in weights if not (folder / file).exists()]
    if missing:
        blobs = folder.parent.parent / "blobs"
        blobs.mkdir(parents=True, exist_ok=True)
        begun = sum(_size(part) for part in blobs.glob(f"*{_PART}"))
        left = max(repository.nbytes(missing) - begun, 0)
        _check_room(name, left, folder)
        tell(_announcement(name, left, len(missing), repository.nbytes(weights) - left))
        for file in missing:
            _fetch_blob(repository, file, blobs)
    return fetch(name, [*repository.beside, *weights])


def _check_room(name: str, left: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if left > free:
        raise ModelError(
            f"'{name}' needs {format_size(left)} more on the drive of {folder}, which has {format_size(free)} free; "
            f"make room, or set HF_HUB_CACHE to a folder on another drive"
        )


def _announcement(name: str, left: int, files: int, here: int) -> str:
    known = f" ({format_size(here)} are here already)" if here else ""
    count = f"{files} files" if files > 1 else "1 file"
    return f"downloading {name}: {format_size(left)} in {count}{known}; if it is interrupted, run this again"


def _fetch_blob(repository: Repository, file: str, blobs: Path) -> None:
    """Puts a file where the hub's client looks for it, from the byte where an earlier run stopped."""
    import httpx2
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    with hub_errors(repository.name):
        url = hf_hub_url(repository.name, file, revision=repository.commit)
        about = get_hf_file_metadata(url)
    if not about.etag or not about.size or about.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return  # left to the hub's client, which has other ways for files that are larger than this one takes
    blob = blobs / about.etag
    if blob.exists():
        return
    with open(blobs / f"{about.etag}{_PART}", "ab") as part:
        try:
            system_files.lock(part.fileno())
        except OSError as error:
            raise ModelError(
                f"{file} of '{repository.name}' is being downloaded by another process; run this again when it is done"
            ) from error
        headers = build_hf_headers(headers={"Accept-Encoding": "identity"})
        try:
            http_get(
                url, part, resume_size=part.tell(), headers=headers, expected_size=about.size, displayed_filename=file
            )
        except (httpx2.HTTPError, OSError) as error:
            raise ModelError(
                f"the download of {file} of '{repository.name}' stopped after {format_size(part.tell())} "
                f"({first_line(error)}); run this again: it goes on from there"
            ) from error
        part.flush()
        os.replace(part.name, blob)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
