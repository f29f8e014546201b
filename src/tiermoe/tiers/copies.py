"""Copies from main memory to a GPU that are under way."""

from __future__ import annotations

import contextlib
import threading
from collections import deque

import torch

from tiermoe.decide.misses import averaged
from tiermoe.tiers.copier import Copier, Mark, Ticket
from tiermoe.types import ExpertKey


class CopyQueue:
    """Asks for copies and tells which are over. `lock` guards the queue; `changed`, its condition, is notified when a
    copy begins. Whoever takes part in the same waiting may guard state of its own with them. `bytes_copied`: asked
    for so far. `seconds`: what the last copies took on average, None before the first."""

    def __init__(self, copier: Copier) -> None:
        self.lock = threading.RLock()  # taken by itself: see `Lanes`
        self.changed = threading.Condition(self.lock)
        self.bytes_copied = 0
        self.seconds: float | None = None
        self._copier = copier
        self._under_way: deque[tuple[ExpertKey, Ticket]] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    def mark(self) -> Mark:
        """The point after everything that the calling thread has launched so far."""
        return self._copier.mark()

    def start(self, key: ExpertKey, source: torch.Tensor, target: torch.Tensor, after: Mark) -> Ticket:
        """Asks for the copy of an expert, which starts once `after` is reached."""
        ticket = self._copier.copy(source, target, after)
        with self.lock:
            self.bytes_copied += source.nbytes
            self._under_way.append((key, ticket))
            self.changed.notify_all()
        return ticket

    def take_ended(self) -> list[ExpertKey]:
        """The experts whose copies are over since the last call. The caller holds `lock`."""
        ended = [(key, ticket) for key, ticket in self._under_way if self.is_over(ticket)]
        self._under_way = deque(copy for copy in self._under_way if copy not in ended)
        for _, ticket in ended:
            with contextlib.suppress(Exception):  # of a copy that failed: `wait_before_use` meets it
                self.seconds = averaged(self.seconds, self._copier.seconds(ticket))
        return [key for key, _ in ended]

    def oldest(self) -> Ticket | None:
        """None where no copy is under way. The caller holds `lock`."""
        return self._under_way[0][1] if self._under_way else None

    def is_over(self, ticket: Ticket | None) -> bool:
        """True where there is nothing to wait for: no copy, one that is done, or one that has failed."""
        try:
            return ticket is None or self._copier.ready(ticket)
        except Exception:  # `wait_before_use` meets it again
            return True

    def wait_out(self, ticket: Ticket) -> None:
        """Blocks until the copy is done or has failed; who takes the load meets the error."""
        with contextlib.suppress(Exception):
            self._copier.wait(ticket)

    def wait_before_use(self, ticket: Ticket | None) -> None:
        """Lets what the calling thread launches from now on start only after the copy; raises what it failed of."""
        self._copier.wait_before_use(ticket)

    def finish(self) -> None:
        """Waits for the copies under way."""
        for _, ticket in self._under_way:
            self.wait_out(ticket)
