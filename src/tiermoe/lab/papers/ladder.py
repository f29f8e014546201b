"""Ladders: a system's parts switched on one after the other, from the baseline of its paper up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tiermoe.offload.composition import Composition, changed, parsed, unread


@dataclass(frozen=True, slots=True)
class Ladder:
    """The parts of a preset in the order in which its paper switches them on."""

    baseline: str  # the preset without its parts, in words
    parts: tuple[tuple[str, Mapping[str, Any]], ...]  # (part, what `--set` switches it off), first switched on first
    beyond: Mapping[str, Any] = field(default_factory=dict)  # what the last parts change in the preset

    def steps(self, preset: Composition, given: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """(part that is switched on, what `--set` changes in `preset`), the baseline first. given: parts and settings
        by name, which hold in every step that reads them. ConfigError as `changed` raises it."""
        changed(preset, {**self.beyond, **given})
        values = parsed(given)
        found = []
        for count in range(len(self.parts) + 1):
            changes = dict(self.beyond)
            for _, off in reversed(self.parts[count:]):  # where two parts share a setting, the earlier one decides
                changes |= off
            whole = preset.having(parsed(changes) | values)
            changes |= {name: value for name, value in values.items() if unread(name, whole) is None}
            found.append((self.parts[count - 1][0] if count else self.baseline, changes))
        return found


DEFAULT_LADDER = Ladder(
    "LRU, one pool",
    (
        ("eviction by next use", {"cache": "lru"}),
        ("slots by use", {"allotment": "pool"}),
        ("prefetch", {"prefetch": "none"}),
    ),
)
"""Of our `default`."""
