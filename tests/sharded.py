"""A checkpoint in several shards with its store beside it, for tests that damage copies of either."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from tiny import write


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint in three shards or so, its store packed at 4 bits in `store` beside it."""
    directory = write(tmp_path_factory.mktemp("errors") / "tiny", "qwen3_moe", torch.float32, shard="200KB")
    model, _ = tiermoe.load(directory, memory="4GiB", lanes=1, store=directory.parent / "store")
    model.tiermoe.close()
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
