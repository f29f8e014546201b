"""Layers that are routed by the token alone (DeepSeek-V4's first ones) are prefetched exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from links import finish
from tiermoe.decide.counts import Counts
from tiermoe.decide.scheduler import Scheduler
from tiermoe.types import Routed
from tiny import oracle, write
from watching import OnRoute

FAMILY = "deepseek_v4"
HASHED = 2  # of three layers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp(FAMILY), FAMILY, torch.float32)


@pytest.fixture
def model(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Prefetches two layers ahead into a cache of less than half the experts, over a link that is fast enough."""
    loaded, _ = tiermoe.load(
        checkpoint, memory="4GiB", device="cpu", bits=16, cache="40%", chunk=4, preset="lru",
        set={"prefetch": "hash", "ahead": HASHED}, warm=False,
    )  # fmt: skip
    begin = Scheduler.begin_pass

    def prefetched(self: Scheduler, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        finish(loaded)

    monkeypatch.setattr(Scheduler, "begin_pass", prefetched)
    yield loaded
    loaded.tiermoe.close()


def counted(model: Any) -> list[Counts]:
    """The counts when the hashed layers of each pass begin, and when the first layer after them does."""
    seen: list[Counts] = []
    controller = model.tiermoe.controller

    def note(routed: Routed, _: torch.Tensor) -> None:
        if routed.layer in (0, HASHED):
            seen.append(controller.counts.copy())

    model.tiermoe.observe(OnRoute(note))
    return seen


def test_every_expert_of_a_hashed_layer_is_there_when_it_is_asked_for(model: Any, checkpoint: Path) -> None:
    seen = counted(model)
    with torch.no_grad():
        model(input_ids=torch.tensor([[5]]))
    first = seen[1].minus(seen[0])
    assert (first.hits, first.prefetched, first.misses) == (HASHED * 3, HASHED * 3, 0), "an empty cache before"

    seen.clear()
    ids = torch.tensor([[7, 11, 90, 4, 33, 60, 21, 8, 70]])
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(
        model.generate(ids, **options), oracle(checkpoint, FAMILY, torch.float32).generate(ids, **options)
    )
    decoded = [after.minus(before) for before, after in zip(seen[::2], seen[1::2], strict=True)][3:]
    assert len(decoded) == 11
    assert sum(counts.misses for counts in decoded) == 0
    assert sum(counts.prefetched for counts in decoded) > 0


def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, "olmoe", torch.float32)
    with pytest.raises(tiermoe.ConfigError, match="routed by a hash of the token, and this model has none"):
        tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, preset="lru", set={"prefetch": "hash"})
