"""What the owners of memory say they need. Each says it in its own file; the plan adds up (`plan.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tiermoe.config import format_size


class Phase(StrEnum):
    """When memory is held. A process packs (only where the store lacks something), loads, then runs."""

    PACKING = "packing"
    LOADING = "loading"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Need:
    """`nbytes` that the owner called `name` holds at the most in a phase."""

    name: str
    nbytes: int
    phase: Phase


def total(needs: Iterable[Need], phase: Phase) -> int:
    """Bytes that all owners together hold in a phase."""
    return sum(need.nbytes for need in needs if need.phase is phase)


def in_words(needs: Iterable[Need], phase: Phase) -> str:
    """'interpreter 240 MiB, dense 1.2 GiB', the parts of a phase."""
    return ", ".join(f"{need.name} {format_size(need.nbytes)}" for need in needs if need.phase is phase)
