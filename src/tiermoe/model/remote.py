"""A model on the hub that is planned before it is downloaded: config and headers alone are read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from tiermoe.errors import ModelError
from tiermoe.model.blueprint import Blueprint, inspect_model, read_fields
from tiermoe.model.hub import local_model
from tiermoe.model.repository import Repository, fetch, hub_errors, read_repository
from tiermoe.store.checkpoint import Checkpoint, Descriptors, entries_of
from tiermoe.store.entry import TensorEntry

_REQUESTS = 8  # headers that are asked for at once


@dataclass(frozen=True, slots=True)
class Download:
    """What running a model that is not here would fetch first."""

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
        self._descriptors = Descriptors()
        for shard, header in headers.items():
            self.tensors |= entries_of(directory / shard, header, 0, sizes[shard])

    def _read(self, name: str, entry: TensorEntry, first: int, last: int) -> torch.Tensor:
        raise ModelError(
            f"{name} cannot be read, '{self._name}' is not downloaded; 'tiermoe pack {self._name}' downloads and packs"
        )

    def fingerprint(self) -> str:
        """Of config and headers: samples of the values are not here, so it is another one than after a download."""
        return xxhash.xxh3_64(b"".join([(self.directory / "config.json").read_bytes(), *self._headers])).hexdigest()


def inspect_without_download(model: str | os.PathLike[str], store: Path | None) -> tuple[Blueprint, Download | None]:
    """`inspect_model` of a directory or a hub id, and what would be downloaded: None where all is here. Of a model on
    the hub config, index and the headers of its shards are read. ModelError as `resolve_model`."""
    found, name = local_model(model), os.fspath(model)
    if found is not None:
        return inspect_model(found, name, store), None
    repository = read_repository(name)
    folder = fetch(name, repository.planned)
    read_fields(folder)  # says what is wrong with it before headers are asked for
    shards = repository.weights(folder)
    checkpoint = RemoteCheckpoint(folder, name, _headers(repository, shards), repository.sizes)
    download = Download(len(shards), repository.nbytes(shards))
    return inspect_model(folder, name, store, checkpoint), download


def _headers(repository: Repository, shards: list[str]) -> dict[str, bytes]:
    with ThreadPoolExecutor(_REQUESTS) as threads:
        return dict(zip(shards, threads.map(lambda shard: _header(repository, shard), shards), strict=True))


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
