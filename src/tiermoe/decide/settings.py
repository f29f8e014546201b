"""How a part declares its settings: each is a field of the part's own dataclass, with what `--set` may give for it.

A policy is made with its context, then these by name. Where some do not go together, a static method of it,
`check(settings)`, raises the ConfigError.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from tiermoe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Setting:
    """What may be given for a setting. read: makes a value of a text or another value; ValueError, TypeError or
    KeyError where it cannot. kind: what that is, for people. low, high: the range of a number. one_of: all there is to
    choose from. calibrated: has no value until it is given or a calibration has found one. read_by: (a part, whether a
    composition with its value reads the setting), for every part that this takes; empty: whatever is chosen, or the
    policy that declares it. off: the default changes nothing, and may be given where nothing reads it."""

    read: Callable[[Any], Any] = float
    kind: str = "a number"
    low: float = -math.inf
    high: float = math.inf
    one_of: Collection[Any] = ()
    calibrated: bool = False
    read_by: tuple[tuple[str, Callable[[Any], bool]], ...] = ()
    off: bool = False

    def value(self, name: str, given: Any) -> Any:
        """What was given for the setting `name`, as its type. ConfigError for what it cannot be."""
        try:
            value = self.read(given)
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{name} must be {self.kind}, got '{given}'") from None
        if self.one_of and value not in self.one_of:
            if isinstance(value, str):
                raise ConfigError(f"{name} cannot be '{value}'{near(value, self.one_of)}")
            raise ConfigError(f"{name} must be one of {', '.join(map(str, self.one_of))}, got {value}")
        if isinstance(value, float | int) and not self.low <= value <= self.high:
            raise ConfigError(f"{name} must be from {self.low:g} to {self.high:g}, got {value:g}")
        return value


def setting(default: Any, **told: Any) -> Any:
    """A dataclass field that `--set` reaches by its name; told: the fields of `Setting`."""
    return dataclasses.field(default=default, kw_only=True, metadata={"setting": Setting(**told)})


def declared(part: Any) -> dict[str, tuple[Setting, Any]]:
    """The settings of a part: name → what may be given, and the default (None where calibrated)."""
    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    found = {field.name: (field.metadata["setting"], field.default) for field in fields if "setting" in field.metadata}
    return {name: (told, None if told.calibrated else default) for name, (told, default) in found.items()}


def near(name: str, known: Iterable[str]) -> str:
    """The end of a message about a wrong name: the names that are like it, else all."""
    known = list(known)
    alike = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(alike)}?" if alike else f"; known: {', '.join(known)}"
