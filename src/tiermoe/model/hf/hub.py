"""Hub: repositories, and what is downloaded of them. A hub id, or a GGUF file of one (HUB-ID:FILE), is downloaded, or
inspected before it is downloaded, by its headers.

The hub's own client keeps the files that are finished. A shard has gigabytes, so an interrupted one is kept too: beside
the cache's blobs until it is whole, then as one of them."""

from __future__ import annotations

import atexit
import glob
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from tiermoe.config import format_size
from tiermoe.errors import ModelError, first_line
from tiermoe.formats.gguf_header import MOST_HEADER, HeaderCutError, read_header
from tiermoe.formats.safetensors import INDEX, SINGLE, Checkpoint, FileReader, TensorEntry, entries_of, indexed
from tiermoe.model.families.gguf import FREQUENCIES, LONG_FACTORS
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.model.hf.configs import read_fields
from tiermoe.model.hf.local_models import PART, gguf_models, local_model, named, split_name
from tiermoe.platform import file_io

_PLANNED = ("config.json", "generation_config.json", INDEX)
_BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Endings of config, tokenizer and chat template. Code, pictures and weights in other formats stay where they are."""
_OTHERS = {".gguf": "a GGUF file", ".bin": "PyTorch's own format", ".pth": "PyTorch's own format"}


@dataclass(frozen=True, slots=True)
class Repository:
    """One commit of a repository. sizes: file → bytes."""

    name: str
    commit: str
    sizes: Mapping[str, int]

    @property
    def planned(self) -> list[str]:
        """The files that a plan reads."""
        return [file for file in _PLANNED if file in self.sizes]

    @property
    def beside(self) -> list[str]:
        """The small files that go with the weights."""
        return [file for file in self.sizes if "/" not in file and file.endswith(_BESIDE)]

    @property
    def has_safetensors(self) -> bool:
        """Whether its weights may be safetensors."""
        return any("/" not in file and file.endswith((".safetensors", INDEX)) for file in self.sizes)

    def gguf_models(self) -> dict[str, list[str]]:
        """The models in GGUF files, as `gguf_models`, the largest first."""
        models = gguf_models(self.sizes).items()
        return dict(sorted(models, key=lambda each: -self.nbytes(each[1])))

    def gguf_files(self, file: str) -> list[str]:
        """The files of the model that a user means by `file`. ModelError as `named`."""
        models = self.gguf_models()
        return models[named(models, file, self.name)]

    def weights(self, folder: Path) -> list[str]:
        """The files of the weights, none of which is there twice in another format. folder: holds the small files.
        ModelError if there are no safetensors, or the index names a file that the repository lacks."""
        if INDEX in self.sizes:
            files = indexed(folder / INDEX)
        elif SINGLE in self.sizes:
            files = [SINGLE]
        else:
            files = sorted(file for file in self.sizes if "/" not in file and file.endswith(".safetensors"))
        if not files:
            raise self.without_safetensors()
        missing = [file for file in files if file not in self.sizes]
        if missing:
            raise ModelError(
                f"'{self.name}' lacks {len(missing)} of the {len(files)} shards that its index names, the first is "
                f"{missing[0]}; choose another repository"
            )
        return files

    def nbytes(self, files: Iterable[str]) -> int:
        """Bytes of some files together."""
        return sum(self.sizes[file] for file in files)

    def without_safetensors(self) -> ModelError:
        """The error where a repository has no safetensors."""
        return ModelError(f"'{self.name}' holds no safetensors weights{self._instead()}; choose another repository")

    def _instead(self) -> str:
        found = {kind for file in self.sizes for ending, kind in _OTHERS.items() if file.endswith(ending)}
        named = f"name one of them as {self.name}:FILE, or let 'tiermoe pull {self.name}' choose one"
        pulled = f"; {named}" if self.gguf_models() else ""
        return f" (it has {' and '.join(sorted(found))}{pulled})" if found else ""


def read_repository(name: str) -> Repository:
    """The repository as the hub describes it. ModelError as `hub_errors`."""
    from huggingface_hub import HfApi

    with hub_errors(name):
        info = HfApi().model_info(name, files_metadata=True)
    return Repository(name, str(info.sha), {file.rfilename: int(file.size or 0) for file in info.siblings or []})


def fetch(name: str, files: list[str]) -> Path:
    """The folder in the hub's cache that holds files of a repository, fetched where they are not there. ModelError as
    `hub_errors`."""
    from huggingface_hub import snapshot_download

    with hub_errors(name), _quiet():
        return Path(snapshot_download(name, allow_patterns=[glob.escape(file) for file in files]))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars, for small files."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    if shown:
        disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turns what a call to the hub raises into a ModelError that says what to do: no such repository, a gated one, no
    connection, offline mode."""
    import httpx2
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(
            f"'{name}' is gated: accept its terms at {constants.ENDPOINT}/{name}, log in with 'hf auth login', and run "
            f"this again"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no model '{name}' on the hub, or it is private; check the name, or log in with 'hf auth login'"
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, httpx2.TransportError) as error:
        why, remedy = f"{constants.ENDPOINT} does not answer ({first_line(error)})", "check the connection"
        if constants.HF_HUB_OFFLINE:
            why, remedy = "HF_HUB_OFFLINE is set", "unset it"
        raise ModelError(
            f"'{name}' cannot be downloaded: {why}. There is neither a folder of this name nor a whole copy in the hub "
            f"cache, {constants.HF_HUB_CACHE}; {remedy}, or name a model directory"
        ) from error
    except (errors.HfHubHTTPError, errors.SafetensorsParsingError, OSError) as error:
        raise ModelError(f"'{name}' cannot be read from the hub ({first_line(error)}); try again later") from error


def resolve_model(model: str | os.PathLike[str]) -> Path:
    """The directory of a checkpoint, or its GGUF file. What is not complete in the local hub cache is
    downloaded; a line on standard error says how much beforehand. ModelError names what was not found."""
    return local_model(model) or download(os.fspath(model))


def to_stderr(text: str) -> None:
    """Prints a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def download(name: str, notify: Callable[[str], None] = to_stderr) -> Path:
    """The folder in the hub's cache with a model's config, tokenizer and weights; the GGUF file where the name has one.
    notify: called with a line that says how much is going to be downloaded. ModelError if the hub cannot be reached,
    the model has no safetensors, tiermoe does not run the GGUF file, or the drive has no room."""
    hub_id, file = split_name(name)
    repository = read_repository(hub_id)
    if file:
        files = repository.gguf_files(file)
        inspect_headers(repository, fetch_headers(repository, files), name)
        return download_files(repository, files, notify) / files[0]
    folder = fetch(name, repository.beside)
    weights = repository.weights(folder)
    return download_files(repository, weights, notify)


def download_files(repository: Repository, files: Sequence[str], notify: Callable[[str], None] = to_stderr) -> Path:
    """The folder in the hub's cache with files of a repository, and the small ones beside them. notify, ModelError: as
    `download`."""
    name, folder = repository.name, fetch(repository.name, repository.beside)
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        blobs = folder.parent.parent / "blobs"
        blobs.mkdir(parents=True, exist_ok=True)
        begun = sum(_size(part) for part in blobs.glob(f"*{PART}"))
        left = max(repository.nbytes(missing) - begun, 0)
        _check_room(name, left, blobs)  # the folder is not there yet where no small files are
        here = repository.nbytes(files) - left
        known = f" ({format_size(here)} are here already)" if here else ""
        count = f"{len(missing)} files" if len(missing) > 1 else "1 file"
        notify(f"downloading {name}: {format_size(left)} in {count}{known}; if it is interrupted, run this again")
        for file in missing:
            _fetch_blob(repository, file, blobs)
    return fetch(name, [*repository.beside, *files])


def _check_room(name: str, left: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if left > free:
        raise ModelError(
            f"'{name}' needs {format_size(left)} more on the drive of {folder}, which has {format_size(free)} free; "
            f"make room, or set HF_HUB_CACHE to a folder on another drive"
        )


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
    with open(blobs / f"{about.etag}{PART}", "ab") as part:
        try:
            file_io.lock(part.fileno())
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


@dataclass(frozen=True, slots=True)
class Download:
    """The files that running a model which is not here would fetch first."""

    files: int
    nbytes: int


def inspect_without_download(model: str | os.PathLike[str], store: Path | None) -> tuple[Blueprint, Download | None]:
    """`inspect_model` of a directory or a hub id, and the download that running it begins with; None for a local model.
    Of a model on the hub config, index and the headers of its shards are read. ModelError as `resolve_model`."""
    found, name = local_model(model), os.fspath(model)
    if found is not None:
        return inspect_model(found, name, store), None
    hub_id, file = split_name(name)
    repository = read_repository(hub_id)
    if file:
        files = repository.gguf_files(file)
        blueprint = inspect_headers(repository, fetch_headers(repository, files), name, store)
        return blueprint, Download(len(files), repository.nbytes(files))
    if not repository.has_safetensors:
        raise repository.without_safetensors()
    folder = fetch(name, repository.planned)
    read_fields(folder)  # says what is wrong with it before headers are asked for
    shards = repository.weights(folder)
    checkpoint = RemoteCheckpoint(folder, name, safetensors_headers(repository, shards), repository.sizes)
    download = Download(len(shards), repository.nbytes(shards))
    return inspect_model(folder, name, store, checkpoint), download


_GGUF_HEADER = 8 << 20  # bytes asked for first: a vocabulary of 150,000 tokens and its merges take 6 MB
_MOST_FACTORS = 4096  # bytes: of heads of 2,048 columns
_REQUESTS = 8  # headers that are asked for at once


class RemoteCheckpoint(Checkpoint):
    """A checkpoint of which the headers alone are known: names, dtypes, shapes and sizes of its tensors. Reading a
    value raises ModelError. headers: shard → its JSON header; sizes: shard → bytes."""

    def __init__(self, directory: Path, name: str, headers: Mapping[str, bytes], sizes: Mapping[str, int]) -> None:
        self.directory = directory
        self.shards = [directory / shard for shard in headers]
        self.tensors = {}
        self._name = name
        self._headers = list(headers.values())
        self._fingerprint = None
        self._files = FileReader()
        for shard, header in headers.items():
            self.tensors |= entries_of(directory / shard, header, 0, sizes[shard])

    def _read(self, name: str, entry: TensorEntry, first: int, last: int) -> torch.Tensor:
        raise ModelError(
            f"{name} cannot be read, '{self._name}' is not downloaded; 'tiermoe pack {self._name}' downloads and packs"
        )

    def fingerprint(self) -> str:
        """Fingerprint of config and headers. Samples of the values are missing, so it differs from that of the
        download."""
        return xxhash.xxh3_64(b"".join([(self.directory / "config.json").read_bytes(), *self._headers])).hexdigest()


def safetensors_headers(repository: Repository, shards: list[str]) -> dict[str, bytes]:
    """Shard → its JSON header, by range requests. ModelError as `hub_errors`."""
    with ThreadPoolExecutor(_REQUESTS) as threads:
        return dict(zip(shards, threads.map(lambda shard: _header(repository, shard), shards), strict=True))


def fetch_headers(repository: Repository, files: Sequence[str]) -> Path:
    """The first of a model's GGUF files, in a folder that is removed when this process ends: of each file the header,
    its size, and the tensor whose values its config has; zeros where others lie. ModelError as `hub_errors`."""
    folder = Path(tempfile.mkdtemp(prefix="tiermoe-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for file in files:
        nbytes = _GGUF_HEADER
        while not _fetch_header(repository, file, folder / file, nbytes):
            nbytes *= 2
        _fetch_factors(repository, file, folder / file)
    return folder / files[0]


def inspect_headers(repository: Repository, fetched: Path, name: str, store: Path | None = None) -> Blueprint:
    """`inspect_model` of what `fetch_headers` gave; ModelErrors name the repository."""
    try:
        return inspect_model(fetched, name, store)
    except ModelError as error:
        raise ModelError(str(error).replace(str(fetched.parent), repository.name)) from error


def _fetch_header(repository: Repository, file: str, path: Path, nbytes: int) -> bool:
    """Writes the first bytes of a GGUF file. False if its header goes on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_fetched(repository, file, 0, nbytes))
    try:
        read_header(path)
    except HeaderCutError:
        if nbytes < min(repository.sizes[file], MOST_HEADER):
            return False
    except ModelError:  # of the tensors that are not there; any other is raised again where the file is opened
        pass
    os.truncate(path, repository.sizes[file])
    return True


def _fetch_factors(repository: Repository, file: str, path: Path) -> None:
    """Writes the factors of a rotary embedding where a GGUF file with its header has zeros."""
    try:
        tensors = read_header(path).tensors
    except ModelError:  # raised again where the file is opened
        return
    for name in (FREQUENCIES, *LONG_FACTORS):
        factors = tensors.get(name)
        if factors is not None and factors.nbytes <= _MOST_FACTORS:
            with path.open("r+b") as opened:
                opened.seek(factors.offset)
                opened.write(_fetched(repository, file, factors.offset, factors.nbytes))


def _fetched(repository: Repository, file: str, first: int, nbytes: int) -> bytes:
    """So many bytes of a file from byte `first` on, or those up to its end."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    url = hf_hub_url(repository.name, file, revision=repository.commit)
    with hub_errors(repository.name):
        answer = get_session().get(url, headers={**build_hf_headers(), "Range": f"bytes={first}-{first + nbytes - 1}"})
        hf_raise_for_status(answer)
    return bytes(answer.content)


def _header(repository: Repository, shard: str) -> bytes:
    """By a range request: the first bytes of a shard."""
    from huggingface_hub import parse_safetensors_file_metadata

    with hub_errors(repository.name):
        found = parse_safetensors_file_metadata(repository.name, shard, revision=repository.commit)
    tensors: dict[str, Any] = {
        name: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": tensor.data_offsets}
        for name, tensor in found.tensors.items()
    }
    return json.dumps(tensors).encode()
