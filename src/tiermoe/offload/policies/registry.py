"""Registry of names: what a part of a composition can be, or presets. A user's plugin adds its own."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from tiermoe.errors import ConfigError

Entry = TypeVar("Entry")

Fault = Callable[[str, Any], str]
"""(name, value) → what keeps the value from being the entry of that name, as 'must be a class'; empty: nothing."""


class Registry(UserDict[str, Entry]):
    """Name → entry. ConfigError for a name that it has already, and for a value that is no entry.

    name: of the registry, for messages. entries: those that it begins with, which are not looked at."""

    def __init__(self, name: str, fault: Fault, entries: Mapping[str, Entry]) -> None:
        self.name, self._fault = name, fault
        self.data = dict(entries)

    def __setitem__(self, name: str, entry: Entry) -> None:
        if name in self.data:
            raise ConfigError(f"{self.name} has '{name}' already; choose another name")
        if fault := self._fault(name, entry):
            raise ConfigError(f"{self.name}['{name}'] {fault}")
        self.data[name] = entry


def subclass_of(base: type) -> Fault:
    """An entry is a class that has all that the abstract class `base` asks for."""

    def fault(name: str, value: Any) -> str:
        if isinstance(value, type) and issubclass(value, base):
            return _lacking(base, value.__abstractmethods__)  # type: ignore[attr-defined]
        return f"must be a subclass of {base.__name__}, not {value!r}"

    return fault


def with_methods(protocol: type) -> Fault:
    """An entry is a class with the methods of `protocol`."""
    methods = [name for name in vars(protocol) if not name.startswith("_")]

    def fault(name: str, value: Any) -> str:
        if isinstance(value, type):
            return _lacking(protocol, [name for name in methods if not hasattr(value, name)])
        return f"must be a class with the methods of {protocol.__name__}, not {value!r}"

    return fault


def a_function(name: str, value: Any) -> str:
    """An entry is a function."""
    return "" if callable(value) else f"must be a function, not {value!r}"


def _lacking(base: type, names: Iterable[str]) -> str:
    missing = ", ".join(sorted(names))
    return f"lacks {missing}, which {base.__name__} asks for" if missing else ""
