"""Puts the tiers of a device together: slots, and the link that fills them. Outside `tiers` nobody knows which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tiermoe.link import Link
from tiermoe.store.layout import ExpertFormat
from tiermoe.tiers.disk import DiskLink, Slots
from tiermoe.tiers.probe import DriveProbe
from tiermoe.tiers.reader import ExtentReader
from tiermoe.tiers.slots import HostSlots
from tiermoe.types import Extent, ExpertKey


class MeteredLink(Link, Protocol):
    """A link that counts what it did. `wait_s`: seconds the caller waited; `busy_s`: seconds in which it was reading;
    `bytes_read`: bytes from the drive."""

    wait_s: float
    busy_s: float

    @property
    def bytes_read(self) -> int: ...

    def close(self) -> None:
        """Ends the link's threads; what is queued is dropped."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """The slots that kernels compute from, and the link that fills them."""

    slots: Slots
    link: MeteredLink


def assemble(
    count: int,
    slot_bytes: int,
    drive: DriveProbe,
    extent_of: Callable[[ExpertKey], Extent],
    format_of: Callable[[ExpertKey], ExpertFormat],
) -> Tiers:
    """Disk → main memory: `count` slots of `slot_bytes`, read as the drive's probe advises."""
    slots = HostSlots(count, slot_bytes)
    return Tiers(slots, DiskLink(ExtentReader(drive.direct), slots, extent_of, format_of, drive.lanes))
