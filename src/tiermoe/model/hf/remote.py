"""Headers of a model on the hub that is not downloaded, from which it is inspected."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import MOST_HEADER, HeaderCutError, read_header
from tiermoe.formats.safetensors import Checkpoint, FileReader, TensorEntry, entries_of
from tiermoe.model.families.fields import FREQUENCIES, LONG_FACTORS
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.model.hf.repository import Repository, hub_errors

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
    """Writes the first bytes of a GGUF file. False where its header goes on."""
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
