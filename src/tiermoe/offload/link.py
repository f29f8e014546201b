"""The seam between decisions and transfers: the engine's links and a simulator's virtual one both fill it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tiermoe.types import ExpertKey, Load


class Finished(NamedTuple):
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
        """Takes back the background load of `key`; False if it has begun."""

    def now(self) -> float:
        """Seconds since some moment, by the clock in which loads take their time."""


class LinkCounters(NamedTuple):
    """What a link has done so far."""

    bytes_read: int  # from the drive
    busy_s: float  # seconds in which at least one thread was reading
    wait_s: float  # seconds in which the caller waited


class MeteredLink(Link, Protocol):
    """A link that counts what it does."""

    @property
    def lanes(self) -> int:
        """Reads at once, by now."""

    def counters(self) -> LinkCounters: ...

    def roll_back(self) -> None:
        """After an interruption of its caller anywhere: drops what is queued, waits for what is under way and forgets
        what nobody has taken. Only what was taken before is in its slots for sure."""

    def close(self) -> None:
        """Ends the link's threads, drops what is queued and gives the slots back."""
