"""Shared fixtures. Tests run on one compute thread: the machine that runs them may have no more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from commands import Command, command_runner

torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"

SHIPPED = Path(__file__).parent.parent / "models" / "stories-7m"


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Stores of the tests go to a temporary cache folder."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["TIERMOE_CACHE"] = str(folder)
    yield folder
    del os.environ["TIERMOE_CACHE"]


@pytest.fixture(scope="session")
def shipped() -> Path:
    """The model that the project ships."""
    return SHIPPED


@pytest.fixture
def tiermoe_(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line in this process: arguments → how it ended."""
    return command_runner(monkeypatch, capsys)
