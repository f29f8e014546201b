"""Values of a GGUF file's entries."""

from __future__ import annotations

from typing import Any

from tiermoe.errors import ModelError
from tiermoe.store.gguf.file import GgufFile


def decimal(value: float) -> float:
    """The shortest decimal of a float32: 1e-06 for 9.999999974752427e-07, as a config.json has it."""
    return float(f"{value:.7g}")


def whole(file: GgufFile, key: str, default: int | None = None) -> int:
    """An entry of the architecture's own that newer files may have layer by layer. ModelError where layers differ."""
    value: Any = file.of_model(key, default)
    values = value if isinstance(value, list) else [file.needed(key) if value is None else value]
    if len(set(values)) != 1:
        raise ModelError(f"{file.path}: {key} differs between layers, which tiermoe does not compute from GGUF files")
    return int(values[0])
