"""MoBiLE's gamma for a model: what is measured at each, beside loading the model with it; and which is taken."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from tiermoe.config import settings
from tiermoe.engine.engine import Engine
from tiermoe.engine.load import load_blueprint
from tiermoe.errors import ConfigError, ProfileError
from tiermoe.lab.measure.calibrate import CalibrationOptions, MadeProfile, make_profiles, prepare
from tiermoe.lab.measure.searches import GAMMAS, find_gamma, find_gamma_for, scored_at, written
from tiermoe.lab.measure.texts import Feed, SequenceShape
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.tokenizer import load_tokenizer
from tiermoe.offload.profiles import Profile, profile_path, read_profile, to_json

PROMPT, LENGTH, SEQUENCES = 8, 20, 4


@pytest.fixture(scope="module")
def ids(shipped: Path) -> torch.Tensor:
    text = (shipped.parents[1] / "data" / "heldout.txt").read_text()[:4000]
    tokens = load_tokenizer(shipped)(text, add_special_tokens=False).input_ids
    return torch.tensor(tokens[: SEQUENCES * LENGTH]).view(SEQUENCES, LENGTH)


@pytest.fixture(scope="module")
def engine(shipped: Path) -> Iterator[Engine]:
    changes = {"routing": "confident", "gamma": 1.0}
    options = settings(preset="lru", set=changes, memory="4GiB", device="cpu", threads=1, warm=False)
    model = load_blueprint(inspect_model(shipped, "stories-7m"), options)
    yield model.tiermoe
    model.tiermoe.close()


def quiet(done: int, total: int) -> None:
    assert 0 <= done <= total


@pytest.mark.parametrize("gamma", [0.3, 0.0])
def test_a_gamma_costs_what_a_model_loaded_with_it_costs(
    gamma: float, engine: Engine, ids: torch.Tensor, shipped: Path
) -> None:
    """The same answers fed to a model with all experts and to one with that gamma; torch's own cross-entropy."""
    answers = written(engine, ids, PROMPT)
    found = scored_at(engine, answers, gamma)
    options: dict[str, Any] = {"memory": "4GiB", "device": "cpu", "threads": 1, "warm": False}
    whole, _ = tiermoe.load(shipped, preset="lru", **options)
    little, _ = tiermoe.load(shipped, preset="mobile", set={"gamma": gamma, "prefetch": "none"}, **options)
    differences = []
    for answer in answers:
        losses = []
        for model in (whole, little):
            feed = Feed(model, torch.tensor(answer.prompt + answer.tokens), PROMPT)
            with torch.inference_mode():
                feed.prompt()
                logits = torch.stack([feed.token(PROMPT + at) for at in range(len(answer.tokens))])[:-1]
            losses.append(torch.nn.functional.cross_entropy(logits.double(), torch.tensor(answer.tokens[1:])))
        # the first token follows the prompt, which both read alike
        differences.append(float(losses[1] - losses[0]) * (len(answer.tokens) - 1) / len(answer.tokens))
    mean, spread = torch.tensor(differences).mean(), torch.tensor(differences).std()
    assert found.loss.value == pytest.approx(math.expm1(float(mean)), abs=1e-4)
    assert found.loss.error == pytest.approx(
        math.exp(float(mean)) * float(spread) / math.sqrt(len(differences)), abs=1e-4
    )
    assert found.ratio == pytest.approx(little.tiermoe.stats()["fallback_ratio"])
    assert (found.ratio == 0) == (gamma == 0)
    whole.tiermoe.close()
    little.tiermoe.close()


def test_the_least_gamma_within_a_loss_on_both_halves(engine: Engine, ids: torch.Tensor) -> None:
    answers = written(engine, ids, PROMPT)
    halves = answers[::2], answers[1::2]
    tolerated = max(scored_at(engine, halves[0], 0.4).loss.value, 0.01)
    found = find_gamma(engine, ids, PROMPT, tolerated, quiet)
    place = GAMMAS.index(found.gamma)
    assert place > 0

    def holds(gamma: float) -> bool:
        even, odd = (scored_at(engine, half, gamma).loss for half in halves)
        return even.value <= tolerated and odd.value + odd.error <= tolerated

    assert holds(found.gamma)
    assert not holds(GAMMAS[place - 1])
    assert found.loss == pytest.approx(scored_at(engine, halves[1], found.gamma).loss)
    assert set(found.tried) <= set(GAMMAS)


def test_the_largest_gamma_of_a_share_of_fallbacks(engine: Engine, ids: torch.Tensor) -> None:
    answers = written(engine, ids, PROMPT)
    found = find_gamma_for(engine, ids, PROMPT, 0.4, quiet)
    assert 0 < found.gamma < 1
    above = GAMMAS[GAMMAS.index(found.gamma) + 1]
    ratios = {
        gamma: [scored_at(engine, half, gamma).ratio for half in (answers[::2], answers[1::2])]
        for gamma in (found.gamma, above)
    }
    assert max(ratios[found.gamma]) <= 0.4
    assert max(ratios[above]) > 0.4
    assert found.ratio == ratios[found.gamma][1]
    with pytest.raises(ConfigError, match="4 answers of at least 8 tokens are needed, there are 3; raise --tokens"):
        find_gamma(engine, ids[:3], PROMPT, 0.05, quiet)


def test_another_gamma_counts_for_itself(engine: Engine, ids: torch.Tensor) -> None:
    confident = engine.confident
    assert confident is not None
    before = confident.passes, confident.fallbacks
    with confident.at(0.0) as counted:
        scored_at(engine, written(engine, ids[:4], PROMPT), 1.0)
        assert counted.passes == 0
    assert (confident.passes, confident.fallbacks) == before


def test_the_preset_takes_what_was_found_or_set_and_else_the_papers_gamma(shipped: Path, tmp_path: Path) -> None:
    text = (shipped.parents[1] / "data" / "heldout.txt").read_text()
    options = {"store": tmp_path, "memory": "4GiB", "device": "cpu", "threads": 1}
    asked = CalibrationOptions(fallback_ratio=0.3)
    calibration = prepare(str(shipped), "heldout.txt", text, SequenceShape(1024, 112, 128), options, asked)
    (made,) = make_profiles(calibration, ["mobile"], lambda what, done, total: None)
    assert isinstance(made, MadeProfile)
    gamma = made.profile.settings["gamma"]
    assert gamma != 0.7
    assert made.profile.data["fallback_ratio"] <= 0.3
    bare = tmp_path / "bare"
    for changes, store, expected in (({}, tmp_path, gamma), ({"gamma": 0.6}, tmp_path, 0.6), ({}, bare, 0.7)):
        model, _ = tiermoe.load(shipped, preset="mobile", set=changes, **{**options, "store": store})
        assert model.tiermoe.composition.gamma == expected
        model.tiermoe.close()
    path = profile_path(tmp_path, "mobile")
    profile = read_profile(path, None, "")
    path.write_bytes(to_json(Profile("mobile", "of another", {}, profile.settings, {})))
    with pytest.raises(ProfileError, match="was made for another checkpoint"):
        tiermoe.load(shipped, preset="mobile", **options)
