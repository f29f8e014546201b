"""What tests ask of a loaded model's link."""

from __future__ import annotations

from typing import Any


def finish(model: Any) -> None:
    """Waits until all that was submitted has arrived, prefetches too: as if the link were fast enough."""
    controller = model.tiermoe.controller
    while not controller.link.is_idle():
        controller.settle(controller.link.wait())
