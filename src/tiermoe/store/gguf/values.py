"""Values of a GGUF file's entries, of the kind that they must have."""

from __future__ import annotations

import math
from typing import Any

from tiermoe.errors import ModelError
from tiermoe.store.gguf.file import GgufFile

_NEEDED: Any = object()


def count(file: GgufFile, key: str, default: int = _NEEDED, least: int = 0) -> int:
    """An entry of the architecture's own: a whole number of at least `least`. ModelError where it is no such number, or
    is missing and has no default."""
    value = _entry(file, key, default)
    if not isinstance(value, int) or value < least:
        raise _wrong(file, key, value, f"a whole number of at least {least}")
    return value


def decimal(file: GgufFile, key: str, default: Any = _NEEDED) -> Any:
    """An entry of the architecture's own, `rounded`, or the default. ModelError where it is no finite number from 0 on,
    or is missing and has no default."""
    value = _entry(file, key, default)
    if value is default:
        return value
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise _wrong(file, key, value, "a finite number of at least 0")
    return rounded(value)


def rounded(value: float) -> float:
    """The shortest decimal of a float32: 1e-06 for 9.999999974752427e-07, as a config.json has it."""
    return float(f"{value:.7g}")


def whole(file: GgufFile, key: str, default: int = _NEEDED) -> int:
    """`count`, at least 1, of an entry that newer files may have layer by layer. ModelError where layers differ."""
    value = file.of_model(key, default)
    if not isinstance(value, list):
        return count(file, key, default, least=1)
    if not value or any(each != value[0] for each in value):
        raise ModelError(f"{file.path}: {key} differs between layers, which tiermoe does not compute from GGUF files")
    if not isinstance(value[0], int) or value[0] < 1:
        raise _wrong(file, key, value[0], "a whole number of at least 1")
    return value[0]


def _entry(file: GgufFile, key: str, default: Any) -> Any:
    value = file.of_model(key, default)
    return file.require(f"{file.architecture}.{key}") if value is _NEEDED else value


def _wrong(file: GgufFile, key: str, value: Any, instead: str) -> ModelError:
    return ModelError(f"{file.path} says that {key} is {str(value)[:80]}, which is not {instead}; download it again")
