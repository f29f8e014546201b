"""Training state on disk, so that an interrupted run goes on where it stopped."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from training.settings import Settings


class OtherSettings(Exception):
    """The state on disk belongs to a run with other settings."""


def save_state(path: Path, settings: Settings, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write step, weights and optimizer state; the file is replaced only when the new one is complete."""
    partial = path.with_suffix(".partial")
    state = {"settings": asdict(settings), "step": step, "model": model.state_dict()}
    torch.save({**state, "optimizer": optimizer.state_dict()}, partial)
    partial.replace(path)


def load_state(path: Path, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore model and optimizer and return the number of steps done: 0 where there is no state yet.

    Raises OtherSettings, naming the differences, rather than mix two runs.
    """
    if not path.exists():
        return 0
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    wanted, found = asdict(settings), state["settings"]
    different = [f"{name} {found.get(name)} (now {wanted[name]})" for name in wanted if found.get(name) != wanted[name]]
    if different:
        raise OtherSettings(f"{path} is of a run with {', '.join(different)}: use its settings or another --work")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
