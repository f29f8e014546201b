"""Nimble's prior: what a strength costs, by hand, and which is found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Command
from tiermoe.config import settings
from tiermoe.decide.profiles import Profile, profile_path, to_json
from tiermoe.engine.engine import Engine
from tiermoe.engine.load import start
from tiermoe.errors import ConfigError, ProfileError
from tiermoe.measure import prior
from tiermoe.measure.prior import STRENGTHS, Trials, cost, find_prior
from tiermoe.model.blueprint import inspect_model
from tiermoe.systems.resolved import resolve

IDS = torch.randint(3, 128, (4, 24), generator=torch.Generator().manual_seed(7))


def test_cost_by_hand() -> None:
    """Sequences that lose .1 and .3 nats a token: .2 ± .1."""
    base = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0])]
    moved = [torch.tensor([1.1, 2.1]), torch.tensor([3.4, 3.2])]
    found = cost(0.1, (moved, 3.0), (base, 4.0))
    assert found.loss == pytest.approx(math.exp(0.2) - 1)
    assert found.error == pytest.approx(0.1 * math.exp(0.2))
    assert (found.strength, found.misses) == (0.1, 0.75)
    assert cost(0.1, (moved[:1], 3.0), (base[:1], 4.0)).error is None


@pytest.fixture
def engine(tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def make(**options: Any) -> Engine:
        directory = tiny_model("qwen3_moe", torch.bfloat16)
        options = {"memory": "4GiB", "device": "cpu", "bits": 4, "cache": "50%", "warm": False, **options}
        options = {"preset": "nimble", "context": 32, **options}
        options["set"] = {"always": 1, "untouched": 0, **options.get("set", {})}
        started.append(start(inspect_model(directory, str(directory)), settings(**options)))
        return started[-1]

    yield make
    for each in started:
        each.close()


def test_the_exact_run_displaces_nothing_and_skips_nothing(engine: Callable[..., Engine]) -> None:
    running = engine(set={"precision": "gate-score", "t1": 0.3, "t2": 0.3})
    counts = running.controller.counts
    losses, misses = Trials(running, IDS, 6).exact()
    assert [len(each) for each in losses] == [18] * 4
    assert (counts.displaced, counts.skipped) == (0, 0)
    moved, fewer = Trials(running, IDS, 6).moved(0.4)
    assert counts.displaced > 0
    assert counts.skipped > 0
    assert fewer < misses
    assert any(not torch.equal(a, b) for a, b in zip(losses, moved, strict=True))


def test_the_strongest_that_costs_little_is_found(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([0.001, 0.004, 0.02, 0.003])
    real = prior.cost

    def said(*arguments: Any) -> prior.Cost:
        found = real(*arguments)
        return prior.Cost(found.strength, next(losses), found.error, found.misses)

    monkeypatch.setattr(prior, "cost", said)
    running = engine()
    steps: list[tuple[int, int]] = []
    found = find_prior(running, IDS, 6, lambda done, total: steps.append((done, total)))
    assert [each.strength for each in found.tried] == list(STRENGTHS[:3])
    assert (found.strength, found.judged.loss) == (STRENGTHS[1], 0.003)
    assert steps[-1] == (len(STRENGTHS) + 1, len(STRENGTHS) + 1)
    assert running.scheduler.prior is not None
    assert running.scheduler.prior.strength == running.composition.prior  # as it was


def test_without_misses_or_patience_there_is_none(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="every expert fits this memory"):
        find_prior(engine(cache="100%"), IDS, 6, lambda *_: None)
    monkeypatch.setattr(prior, "TOLERATED", -1.0)
    with pytest.raises(ConfigError, match="even the weakest prior"):
        find_prior(engine(), IDS, 6, lambda *_: None)


def test_a_calibration_takes_the_presets_place_and_what_is_asked_for_stays(tmp_path: Path) -> None:
    def strength(**options: Any) -> float | None:
        return resolve(settings(preset="nimble", **options), tmp_path, "abc", "m", 8).composition.prior

    preset = strength()
    path = profile_path(tmp_path, "nimble")
    path.parent.mkdir()
    path.write_bytes(to_json(Profile("nimble", "abc", {}, {"prior": 0.375}, {})))
    assert preset != 0.375
    assert strength() == 0.375
    assert strength(set={"prior": 0.05}) == 0.05
    assert strength(set={"routing": "all"}) == preset  # which nothing reads
    path.write_bytes(to_json(Profile("nimble", "another", {}, {"prior": 0.375}, {})))
    with pytest.raises(ProfileError, match="made for another checkpoint"):
        strength()


def test_it_is_among_what_calibrate_takes(tiermoe_: Command, tiny_model: Callable[..., Path]) -> None:
    failed = tiermoe_("calibrate", tiny_model("qwen3_moe", torch.bfloat16), "--text", __file__, "--for", "frugal")
    assert "'frugal' needs no calibration of its own; --for takes" in failed.err
    assert "hobbit, edgemoe, fate, corm, mobile, nimble" in failed.err
