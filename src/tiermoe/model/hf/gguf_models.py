"""Models in GGUF files: those of a list of files, and the one that a user means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import SHARD, SUFFIX, is_gguf
from tiermoe.platform.json_files import stays_inside

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
