"""The seam between the GPU tier and the GPU: who copies, and how copies and computation are ordered."""

from __future__ import annotations

from typing import Any, Protocol

import torch

Mark = Any
"""A point in the order of computation, as its `Copier` has it."""
Ticket = Any
"""A copy that has been asked for, as its `Copier` has it."""


class Copier(Protocol):
    """Copies from pinned memory to the device, beside the computation."""

    def mark(self) -> Mark:
        """The point after everything that the calling thread has launched so far."""

    def copy(self, host: torch.Tensor, device: torch.Tensor, after: Mark) -> Ticket:
        """Asks for a copy that starts once `after` is reached. Returns at once; any thread may call."""

    def ready(self, ticket: Ticket) -> bool:
        """True where the copy is done."""

    def wait(self, ticket: Ticket) -> None:
        """Blocks the calling thread until the copy is done."""

    def seconds(self, ticket: Ticket) -> float:
        """How long a copy that is done took, from the moment when it could start."""

    def wait_before_use(self, ticket: Ticket) -> None:
        """Lets what the calling thread launches from now on start only after the copy; does not block."""
