"""Models on this machine: folders, the hub's cache, GGUF files of a folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tiermoe.config import MIB
from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import SHARD, SUFFIX, is_gguf
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


def split_name(name: str) -> tuple[str, str]:
    """(hub id, FILE) of HUB-ID:FILE; FILE is empty where the hub id is alone."""
    repository, _, file = name.partition(":")
    return repository, file


def read_moe_fields(directory: Path) -> dict[str, Any]:
    """The fields of config.json in a checkpoint directory. ModelError where there is none, or no MoE model's."""
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
    ModelError where that is none, or several."""
    found = matching(models, file)
    if len(found) != 1:
        have = ", ".join(found or models) or "no GGUF files"
        what = f"'{file}' names {len(found)} files" if found else f"there is no GGUF file '{file}'"
        raise ModelError(f"{what} in '{where}'; it has {have}")
    return found[0]


def in_folder(folder: Path) -> Path | None:
    """The first file of the one model in GGUF files that a folder has; None where it has safetensors, or no GGUF file.
    ModelError where it has several."""
    names = [path.name for path in folder.iterdir()]
    models = gguf_models(names)
    if not models or any(PurePosixPath(name).suffix == ".safetensors" for name in names):
        return None
    if len(models) > 1:
        raise ModelError(f"{folder} has {len(models)} models in GGUF files; name one of them: {', '.join(models)}")
    (files,) = models.values()
    return folder / files[0]


def in_snapshot(snapshot: Path, file: str) -> Path | None:
    """The first file of the model that a user means by `file`, in a folder of the hub's cache; None where it, or a
    shard of it, is not there."""
    models = gguf_models(path.relative_to(snapshot).as_posix() for path in snapshot.rglob(f"*{SUFFIX}"))
    found = matching(models, file)
    if len(found) != 1:
        return None
    files = models[found[0]]
    shard = SHARD.fullmatch(files[0])
    return snapshot / files[0] if shard is None or int(shard[3]) == len(files) else None
