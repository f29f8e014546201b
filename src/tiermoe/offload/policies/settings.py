"""Settings: how a part of a composition declares what `--set` may give. A setting is a field of the part's dataclass.

A policy is made with its context, then its settings by name. Where some do not go together, the policy's static method
`check(settings)` raises ConfigError.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tiermoe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Setting:
    """The values that a setting may have."""

    read: Callable[[Any], Any] = float  # makes a value of what is given; ValueError, TypeError, KeyError if impossible
    kind: str = "a number"  # what `read` takes, for people
    low: float = -math.inf  # range of a number
    high: float = math.inf
    one_of: Collection[Any] = ()  # all values there are; empty: any
    calibrated: bool = False  # has no value until one is given or a calibration has found one
    # (part, whether a composition with its value of the part reads the setting), for every part that matters; empty:
    # always read, or by the policy that declares it
    read_by: tuple[tuple[str, Callable[[Any], bool]], ...] = ()
    off: bool = False  # the default changes nothing, and may be given if nothing reads the setting

    def value(self, name: str, given: Any) -> Any:
        """The value that was `given` for the setting `name`. ConfigError for one that the setting cannot have."""
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


def setting(default: Any, **values: Any) -> Any:
    """A dataclass field that `--set` reaches by its name. values: fields of `Setting`."""
    return dataclasses.field(default=default, kw_only=True, metadata={"setting": Setting(**values)})


@functools.cache
def declared(part: Any) -> Mapping[str, tuple[Setting, Any]]:
    """The settings of a part: name → possible values, and the default (None if calibrated)."""
    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    found = {field.name: (field.metadata["setting"], field.default) for field in fields if "setting" in field.metadata}
    return {name: (each, None if each.calibrated else default) for name, (each, default) in found.items()}


def near(name: str, known: Iterable[str]) -> str:
    """The end of a message about a wrong `name`: similar known names, else all."""
    known = list(known)
    alike = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(alike)}?" if alike else f"; known: {', '.join(known)}"
