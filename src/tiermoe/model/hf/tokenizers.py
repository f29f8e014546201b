"""Tokenizers of checkpoints and GGUF files, as transformers makes them and as a store keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import is_gguf, open_gguf
from tiermoe.formats.outline import Origin
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.hf.configs import TOKENIZER_CONFIG, files_with_code, origin_of
from tiermoe.model.hf.repository import first_line
from tiermoe.model.tokenizer import files_digest, keep_tokenizer, read_tokenizer
from tiermoe.platform import process_memory


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
