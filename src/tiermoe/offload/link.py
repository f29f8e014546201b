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
    """What a link has done so far. Before a GPU it reads from the drive and copies from main memory."""

    bytes_read: int  # from the drive
    busy_s: float  # seconds in which at least one thread was reading
    wait_s: float  # seconds in which computing waited: the caller for reads, a GPU's stream for copies
    bytes_copied: int = 0  # to a GPU, by copies that are over
    copy_s: float = 0.0  # seconds of these copies; of two at once each counts

    @property
    def bandwidth(self) -> float:
        """Bytes per second into the slots of which kernels read: the bus's before a GPU, else the drive's while it was
        reading; 0 before anything has come."""
        moved, seconds = (self.bytes_copied, self.copy_s) if self.bytes_copied else (self.bytes_read, self.busy_s)
        return moved / seconds if seconds else 0.0

    @property
    def read_bandwidth(self) -> float:
        """Bytes per second of the drive while it was reading; 0 before it has read."""
        return self.bytes_read / self.busy_s if self.busy_s else 0.0


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
