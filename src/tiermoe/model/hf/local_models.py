"""Models on this machine: folders, GGUF files of a folder, the hub's cache and what leaves it. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from tiermoe.config import MIB
from tiermoe.errors import ModelError, first_line
from tiermoe.formats.gguf_file import SHARD, SUFFIX, is_gguf
from tiermoe.platform import file_io
from tiermoe.platform.json_files import read_json, stays_inside

CONFIG = "config.json"
LARGEST_CONFIG = 16 * MIB
"""Bytes of a JSON file that is read."""
SHIPPED = Path(__file__).parents[2] / "stories-7m"
"""The model that is part of the package; its name alone names it."""


def check_local(model: str | os.PathLike[str]) -> Path | None:
    """`find_local`, whose directory has the config of a MoE model: else ModelError."""
    found = find_local(model)
    if found is not None and not is_gguf(found):
        read_moe_fields(found)
    return found


def find_local(model: str | os.PathLike[str]) -> Path | None:
    """The directory of a checkpoint, or a GGUF file; None for a hub id, or HUB-ID:FILE. ModelError for anything else,
    and for a folder of several models in GGUF files."""
    text = os.fspath(model)
    path = Path(text).expanduser()
    if path.is_dir():
        return in_folder(path.resolve()) or path.resolve()
    if path.exists() and is_gguf(path):
        return path.resolve()
    if text == SHIPPED.name and SHIPPED.is_dir():
        return SHIPPED.resolve()
    if path.exists():
        raise ModelError(f"{path} is a file; name the directory that holds config.json and the weights, or a GGUF file")
    repository, file = split_name(text)
    if text.startswith((".", "/", "~")) or repository.count("/") != 1 or (is_gguf(path) and not file):
        raise ModelError(
            f"{text} does not exist; name a model directory, a GGUF file, or a hub id like Qwen/Qwen3-30B-A3B "
            f"({SHIPPED.name} is the shipped model)"
        )
    return None


def local_model(model: str | os.PathLike[str]) -> Path | None:
    """The directory of a local checkpoint, or its GGUF file; None for a hub id, or HUB-ID:FILE, that is not complete in
    the local hub cache. ModelError as `find_local`."""
    found = find_local(model)
    if found is not None:
        return found
    repository, file = split_name(os.fspath(model))
    snapshot = _snapshot(repository)
    if snapshot is None or file:
        return snapshot and in_snapshot(snapshot, file)
    return snapshot if _is_complete(snapshot) else None


def _snapshot(repository: str) -> Path | None:
    """The folder of a repository in the local hub cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:  # of the folder alone: its index names the files that are needed
        return Path(snapshot_download(repository, allow_patterns=["config.json"], local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ModelError(f"'{repository}' is neither a directory nor a valid hub id: {first_line(error)}") from error


def _is_complete(snapshot: Path) -> bool:
    """True if all weights that a snapshot names are there: the hub's cache holds interrupted downloads too."""
    from tiermoe.formats.safetensors import Checkpoint

    try:
        return bool(Checkpoint(snapshot).tensors)
    except ModelError:
        return False


def split_name(name: str) -> tuple[str, str]:
    """(hub id, FILE) of HUB-ID:FILE; FILE is empty if the hub id is alone."""
    repository, _, file = name.partition(":")
    return repository, file


def read_moe_fields(directory: Path) -> dict[str, Any]:
    """The fields of config.json in a checkpoint directory. ModelError if there is none, or no MoE model's."""
    file = directory / CONFIG
    if not file.exists():
        raise ModelError(
            f"{directory} has no config.json: it is not a Hugging Face model directory; name the folder that has "
            "config.json and the weights, or a GGUF file"
        )
    try:
        fields: dict[str, Any] = read_json(file, LARGEST_CONFIG)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({error}); download it again") from error
    model_type = fields.get("model_type") if isinstance(fields, dict) else None
    if not model_type or not isinstance(model_type, str):
        raise ModelError(f"{file} names no model_type: transformers cannot tell what model it is")
    if not _looks_like_moe(fields):
        raise ModelError(
            f"{directory} is a '{model_type}' model without experts: tiermoe runs Mixture-of-Experts models; "
            f"transformers itself or llama.cpp run a dense one"
        )
    return fields


def _looks_like_moe(raw: dict[str, Any]) -> bool:
    inside = [value for value in raw.values() if isinstance(value, dict)]
    named = any("expert" in key for key in raw) or raw.get("model_type") in ("mixtral", "switch_transformers")
    return named or any(map(_looks_like_moe, inside))


_NO_MODELS = ("mmproj", "imatrix")
"""Parts of names of GGUF files that have no model, by llama.cpp's conventions."""


def gguf_models(files: Iterable[str]) -> dict[str, list[str]]:
    """The models in GGUF files among `files`: name without the number of a shard → its files, in their order. Encoders
    of pictures and importance matrices, which lie beside some models, are none."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        shard = SHARD.fullmatch(file)
        if is_gguf(Path(file)) and stays_inside(file) and not any(each in file.lower() for each in _NO_MODELS):
            models.setdefault(f"{shard[1]}{SUFFIX}" if shard else file, []).append(file)
    return models


def matching(models: Mapping[str, list[str]], file: str) -> list[str]:
    """The names of the models that a user means by `file`: a name, a shard, or the end of a name, as 'Q4_K_M'."""
    ends = file.lower().removesuffix(SUFFIX)
    return [name for name, files in models.items() if file in (name, *files)] or [
        name for name in models if name.lower().removesuffix(SUFFIX).endswith((f"-{ends}", f".{ends}", f"/{ends}"))
    ]


def named(models: Mapping[str, list[str]], file: str, where: str) -> str:
    """The name of the model that a user means by `file` (`matching`). where: what has the models, for a message.
    ModelError if that is none, or several."""
    found = matching(models, file)
    if len(found) != 1:
        have = ", ".join(found or models) or "no GGUF files"
        what = f"'{file}' names {len(found)} files" if found else f"there is no GGUF file '{file}'"
        raise ModelError(f"{what} in '{where}'; it has {have}")
    return found[0]


def in_folder(folder: Path) -> Path | None:
    """The first file of the one model in GGUF files that a folder has; None if it has safetensors, or no GGUF file.
    ModelError if it has several."""
    names = [path.name for path in folder.iterdir()]
    models = gguf_models(names)
    if not models or any(PurePosixPath(name).suffix == ".safetensors" for name in names):
        return None
    if len(models) > 1:
        raise ModelError(f"{folder} has {len(models)} models in GGUF files; name one of them: {', '.join(models)}")
    (files,) = models.values()
    return folder / files[0]


def in_snapshot(snapshot: Path, file: str) -> Path | None:
    """The first file of the model that a user means by `file`, in a folder of the hub's cache; None if it, or a
    shard of it, is not there."""
    models = gguf_models(path.relative_to(snapshot).as_posix() for path in snapshot.rglob(f"*{SUFFIX}"))
    found = matching(models, file)
    if len(found) != 1:
        return None
    files = models[found[0]]
    shard = SHARD.fullmatch(files[0])
    return snapshot / files[0] if shard is None or int(shard[3]) == len(files) else None


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
    """Removes a model from the hub's cache, all revisions. ModelError if another process downloads it, or it cannot
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
