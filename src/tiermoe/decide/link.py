"""The seam between decisions and transfers: the engine's real links and a simulator's virtual one both fill it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tiermoe.types import ExpertKey, Load


@dataclass(frozen=True, slots=True)
class Finished:
    """A load that ended: its slot is filled, or `error` says why not."""

    load: Load
    error: Exception | None = None


class Link(Protocol):
    """Brings experts into slots. Urgent loads go before speculative ones that have not begun, and these before those in
    the background."""

    def submit(self, load: Load) -> None:
        """Queues a load; returns at once."""

    def wait(self) -> Finished:
        """The next finished load, waiting for it."""

    def poll(self) -> Finished | None:
        """A finished load, or None without waiting."""

    def recall(self) -> list[Load]:
        """Takes back the speculative loads that have not begun, but none in the background."""

    def withdraw(self, key: ExpertKey) -> bool:
        """Takes back the background load of `key`; False where it has begun."""

    def is_idle(self) -> bool:
        """True when nothing is queued, under way or waiting to be taken, background loads apart."""

    def now(self) -> float:
        """Seconds since some moment, by the clock in which loads take their time."""
