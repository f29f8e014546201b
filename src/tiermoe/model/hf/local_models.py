"""Models on this machine's drives: where a name lies, and what its folder's config.json says. No torch is imported for
it, so that a command refuses a name or a folder at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tiermoe.config import MIB
from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import is_gguf
from tiermoe.model.hf.gguf_models import in_folder
from tiermoe.platform.json_files import read_json

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
