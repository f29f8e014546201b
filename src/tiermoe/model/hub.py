"""From what the user typed to a directory: a local path, or a hub id (from the local hub cache when offline)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tiermoe.errors import ConfigError, ModelError, StoreError
from tiermoe.model.download import download
from tiermoe.model.repository import first_line
from tiermoe.process.json_files import read_json
from tiermoe.store.checkpoint import Checkpoint
from tiermoe.store.gguf.file import SUFFIX, is_gguf, open_gguf
from tiermoe.store.store import TABLE, pack_anew

OWN_CODE = "auto_map"
"""The entry by which a checkpoint's files name Python code of its own."""
TOKENIZER_CONFIG = "tokenizer_config.json"


def resolve_model(model: str | os.PathLike[str]) -> Path:
    """The directory of a checkpoint, or its GGUF file. A hub id is looked up in the local hub cache first and
    downloaded only where it is not complete there; a line on standard error says how much beforehand. ModelError says
    what was looked for."""
    return local_model(model) or download(os.fspath(model))


def local_model(model: str | os.PathLike[str]) -> Path | None:
    """The directory of a checkpoint that is here, or its GGUF file; None for a hub id that is not complete in the local
    hub cache. ModelError for what is neither."""
    text = os.fspath(model)
    path = Path(text).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists() and is_gguf(path):
        return path.resolve()
    if path.exists():
        raise ModelError(f"{path} is a file; name the directory that holds config.json and the weights, or a GGUF file")
    if text.startswith((".", "/", "~")) or text.count("/") != 1 or is_gguf(path):
        raise ModelError(
            f"{text} does not exist; name a model directory, a GGUF file, or a hub id like Qwen/Qwen3-30B-A3B"
        )
    return _in_cache(text)


def _in_cache(repository: str) -> Path | None:
    """The folder of a repository in the local hub cache, if its weights are there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:  # the folder alone: which of its files are needed its index says
        found = Path(snapshot_download(repository, allow_patterns=["config.json"], local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ModelError(f"'{repository}' is neither a directory nor a valid hub id: {first_line(error)}") from error
    return found if _is_complete(found) else None


def _is_complete(snapshot: Path) -> bool:
    """True where the weights that a snapshot speaks of are there: the hub's cache holds interrupted downloads too."""
    try:
        return bool(Checkpoint(snapshot).tensors)
    except ModelError:
        return False


def load_tokenizer(directory: Path) -> Any:
    """The model's tokenizer. ModelError where the directory, or the GGUF file, has none."""
    if is_gguf(directory):
        return _from_gguf(directory)
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


def files_with_code(directory: Path) -> list[str]:
    """Which files of a checkpoint's folder name Python code in it, for config, model or tokenizer. It never runs."""
    return [name for name in ("config.json", TOKENIZER_CONFIG) if OWN_CODE in _fields(directory / name)]


def _fields(file: Path) -> dict[str, Any]:
    """What a JSON file says; nothing where there is none that can be read."""
    try:
        document = read_json(file)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _from_gguf(file: Path) -> Any:
    from tiermoe.model.gguf.tokenizer import load_tokenizer as from_entries

    try:
        return from_entries(open_gguf(file))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"the tokenizer in {file} cannot be used ({first_line(error)}); download it again") from error


def is_store(path: Path) -> bool:
    """True for the directory of an expert store."""
    return (path / TABLE).exists()


def cache_folder() -> Path:
    """The user's cache folder: TIERMOE_CACHE, or XDG_CACHE_HOME/tiermoe, or ~/.cache/tiermoe. Empty variables count as
    none. ConfigError where nothing names a folder of the user's."""
    if own := os.environ.get("TIERMOE_CACHE"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "tiermoe"
    try:
        home = None if os.environ.get("HOME") == "" else Path.home()  # Python takes / for an empty one
    except RuntimeError:
        home = None
    if home is None:
        raise ConfigError(
            "there is no folder for packed experts: HOME and XDG_CACHE_HOME are empty; set one of them, or "
            "TIERMOE_CACHE"
        )
    return home / ".cache" / "tiermoe"


def default_store_root(directory: Path, name: str, fingerprint: str) -> Path:
    """Where a checkpoint's store lives: in the user's cache folder, in a folder named for the model and the
    checkpoint's fingerprint."""
    return cache_folder() / f"{_label(directory, name)}-{fingerprint}"


def chosen_store_root(directory: Path, name: str, fingerprint: str, chosen: Path | None) -> Path:
    """The folder of a checkpoint's store: the chosen one, or the one in the user's cache."""
    return (chosen or default_store_root(directory, name, fingerprint)).expanduser().absolute()


def _label(directory: Path, name: str) -> str:
    text = name if "/" in name and not Path(name).exists() else directory.name.removesuffix(SUFFIX)
    if directory.parent.name == "snapshots":  # a hub cache folder: models--org--name/snapshots/revision
        text = directory.parent.parent.name.removeprefix("models--")
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text).strip("-.") or "model"


def check_fingerprint(root: Path, stored: str, actual: str) -> None:
    """StoreError where a store was made from another checkpoint."""
    if stored != actual:
        raise StoreError(
            f"the store in {root} was packed from another checkpoint (fingerprint {stored}, this model's is {actual}); "
            f"choose another folder with --store, or {pack_anew(root)}"
        )
