"""Hub: from the model's name to a directory or GGUF file. A hub id, or a GGUF file of one (HUB-ID:FILE), is found in
the local hub cache, downloaded, or planned by its headers alone before it is downloaded.

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
from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import MOST_HEADER, HeaderCutError, is_gguf, open_gguf
from tiermoe.formats.gguf_file import read_header as read_gguf_header
from tiermoe.formats.outline import Origin
from tiermoe.formats.safetensors import INDEX, SINGLE, Checkpoint, FileReader, TensorEntry, entries_of, indexed
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.model.hf.configs import TOKENIZER_CONFIG, files_with_code, origin_of, read_fields
from tiermoe.model.hf.downloads import PART
from tiermoe.model.hf.gguf_models import gguf_models, in_snapshot, named
from tiermoe.model.hf.local_models import find_local, split_name
from tiermoe.model.tokenizer import files_digest, keep_tokenizer, read_tokenizer
from tiermoe.platform import file_io, process_memory

_PLANNED = ("config.json", "generation_config.json", INDEX)
_BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Endings of config, tokenizer and chat template. Code, pictures and weights in other formats stay where they are."""
_OTHERS = {".gguf": "a GGUF file", ".bin": "PyTorch's own format", ".pth": "PyTorch's own format"}
_GGUF_HEADER = 8 << 20  # bytes asked for first: a vocabulary of 150,000 tokens and its merges take 6 MB
_REQUESTS = 8  # headers that are asked for at once


def resolve_model(model: str | os.PathLike[str]) -> Path:
    """The directory of a checkpoint, or its GGUF file. What is not complete in the local hub cache is
    downloaded; a line on standard error says how much beforehand. ModelError names what was not found."""
    return local_model(model) or download(os.fspath(model))


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
    """True where all weights that a snapshot names are there: the hub's cache holds interrupted downloads too."""
    try:
        return bool(Checkpoint(snapshot).tensors)
    except ModelError:
        return False


def load_tokenizer(directory: Path) -> Any:
    """The model's tokenizer. ModelError where the directory, or the GGUF file, has none."""
    if is_gguf(directory):
        return _from_gguf(directory)
    process_memory.import_transformers()
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", TOKENIZER_CONFIG)
    if not any((directory / name).exists() for name in names):
        raise ModelError(
            f"{directory} has no tokenizer (none of {', '.join(names)}); download it again with its tokenizer"
        )
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        own = TOKENIZER_CONFIG in files_with_code(directory)
        raise ModelError(
            f"the tokenizer in {directory} needs code of its own, and tiermoe never runs a checkpoint's code: choose "
            f"another model"
            if own
            else f"the tokenizer in {directory} cannot be loaded ({first_line(error)}); download it again"
        ) from error


def kept_tokenizer(blueprint: Blueprint, root: Path) -> Any:
    """The model's tokenizer without transformers, as its store at `root` keeps it; None where it keeps none that can be
    used."""
    return read_tokenizer(root, _tokenizer_origin(blueprint))


def leave_tokenizer(blueprint: Blueprint, root: Path, tokenizer: Any) -> None:
    """Keeps transformers' tokenizer of the model in its store at `root`, where that can be written."""
    keep_tokenizer(root, _tokenizer_origin(blueprint), tokenizer)


def _tokenizer_origin(blueprint: Blueprint) -> Origin:
    return blueprint.origin if blueprint.in_gguf else origin_of(files_digest(blueprint.directory))


def _from_gguf(file: Path) -> Any:
    from tiermoe.model.gguf.tokenizer import load_tokenizer as from_entries

    try:
        return from_entries(open_gguf(file))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"the tokenizer in {file} cannot be used ({first_line(error)}); download it again") from error


# a repository


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
        """The files of the model that a user means by `file`. ModelError as `gguf_models.named`."""
        models = self.gguf_models()
        return models[named(models, file, self.name)]

    def weights(self, folder: Path) -> list[str]:
        """The files of the weights, none of which is there twice in another format. folder: holds the small files.
        ModelError where there are no safetensors, or the index names a file that the repository lacks."""
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
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else first_line(error)
        raise ModelError(
            f"'{name}' is no local directory, is not in the local hub cache, and {constants.ENDPOINT} cannot be asked "
            f"({why}); check the name, go online, or name a model directory"
        ) from error
    except (errors.HfHubHTTPError, errors.SafetensorsParsingError, OSError) as error:
        raise ModelError(f"'{name}' cannot be read from the hub ({first_line(error)}); try again later") from error


def first_line(error: Exception) -> str:
    """The first line of an exception's text."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


# downloading


def to_stderr(text: str) -> None:
    """Prints a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def download(name: str, notify: Callable[[str], None] = to_stderr) -> Path:
    """The folder in the hub's cache with a model's config, tokenizer and weights; the GGUF file where the name has one.
    notify: called with a line that says how much is going to be downloaded. ModelError where the hub cannot be reached,
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
        notify(_announcement(name, left, len(missing), repository.nbytes(files) - left))
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


# planning before a download


@dataclass(frozen=True, slots=True)
class Download:
    """The files that running a model which is not here would fetch first."""

    files: int
    nbytes: int


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
    checkpoint = RemoteCheckpoint(folder, name, _headers(repository, shards), repository.sizes)
    download = Download(len(shards), repository.nbytes(shards))
    return inspect_model(folder, name, store, checkpoint), download


def _headers(repository: Repository, shards: list[str]) -> dict[str, bytes]:
    with ThreadPoolExecutor(_REQUESTS) as threads:
        return dict(zip(shards, threads.map(lambda shard: _header(repository, shard), shards), strict=True))


def fetch_headers(repository: Repository, files: Sequence[str]) -> Path:
    """The first of a model's GGUF files, in a folder that is removed when this process ends: of each file the header
    and its size, zeros where its tensors lie. ModelError as `hub_errors`."""
    folder = Path(tempfile.mkdtemp(prefix="tiermoe-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for file in files:
        nbytes = _GGUF_HEADER
        while not _fetch_header(repository, file, folder / file, nbytes):
            nbytes *= 2
    return folder / files[0]


def inspect_headers(repository: Repository, fetched: Path, name: str, store: Path | None = None) -> Blueprint:
    """`inspect_model` of what `fetch_headers` gave; ModelErrors name the repository."""
    try:
        return inspect_model(fetched, name, store)
    except ModelError as error:
        raise ModelError(str(error).replace(str(fetched.parent), repository.name)) from error


def _fetch_header(repository: Repository, file: str, path: Path, nbytes: int) -> bool:
    """Writes the first bytes of a GGUF file. False where its header goes on."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    url = hf_hub_url(repository.name, file, revision=repository.commit)
    with hub_errors(repository.name):
        answer = get_session().get(url, headers={**build_hf_headers(), "Range": f"bytes=0-{nbytes - 1}"})
        hf_raise_for_status(answer)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(answer.content)
    try:
        read_gguf_header(path)
    except HeaderCutError:
        if nbytes < min(repository.sizes[file], MOST_HEADER):
            return False
    except ModelError:  # of the tensors that are not there; any other is raised again where the file is opened
        pass
    os.truncate(path, repository.sizes[file])
    return True


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
