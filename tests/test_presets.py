"""Named compositions: what can be set, what is lossy, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import Command
from tiermoe.errors import ConfigError
from tiermoe.policy.eviction import EVICTIONS
from tiermoe.policy.precision import PRECISIONS
from tiermoe.policy.prediction import PREDICTIONS
from tiermoe.presets import CHOICES, PRESETS, compose

FIVE = ("hobbit", "edgemoe", "mobile", "fate", "corm")
BASELINES = ("io-free", "load-on-demand", "io-qexp", "sti", "eap", "lru", "mixtral-offload")


def test_every_choice_has_its_part() -> None:
    assert set(CHOICES["cache"]) - {"none", "all"} == set(EVICTIONS)
    assert set(CHOICES["precision"]) == set(PRECISIONS)
    assert set(CHOICES["prefetch"]) == set(PREDICTIONS)


def test_every_presets_parts_are_among_the_choices() -> None:
    for preset in PRESETS.values():
        for part, choices in CHOICES.items():
            assert getattr(preset, part) in (*choices, None)


def test_the_five_and_frugal_are_lossy_and_the_rest_exact() -> None:
    assert {name for name, preset in PRESETS.items() if preset.lossy} == {*FIVE, "frugal"}
    assert {*FIVE, *BASELINES, "default", "frugal"} == set(PRESETS)


def test_frugal_is_the_default_but_for_what_it_skips() -> None:
    ours, default = PRESETS["frugal"].settings(), PRESETS["default"].settings()
    assert {name for name in ours if ours[name] != default[name]} == {
        "precision", "t1", "t2", "prefetch", "ahead", "speculate",
    }  # fmt: skip


def test_exact_takes_every_lossy_part_out() -> None:
    for preset in PRESETS.values():
        assert preset.exact().lossy == []


def test_parts_and_settings_are_replaced_from_text() -> None:
    changed = compose(
        "hobbit", {"prefetch": "next-gate", "t1": "0.5", "mask": "false", "weights": "1,0,0,0", "ahead": "2"}
    )
    assert (changed.prefetch, changed.t1, changed.mask, changed.weights, changed.ahead) == (
        "next-gate", 0.5, False, (1.0, 0.0, 0.0, 0.0), 2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("hobit", {}, "unknown preset 'hobit'; did you mean hobbit"),
        ("zzz", {}, "known: default"),
        ("fate", {"prefetsch": "none"}, "unknown part or setting 'prefetsch'; did you mean prefetch"),
        ("fate", {"cache": "lruu"}, "cache cannot be 'lruu'; did you mean lru"),
        ("mobile", {"gamma": "high"}, "gamma must be a number, got 'high'"),
        ("mobile", {"gamma": "1.5"}, "gamma must be from 0 to 1, got 1.5"),
        ("mobile", {"gamma": "nan"}, "gamma must be from 0 to 1"),
        ("hobbit", {"weights": "1,2,3"}, "weights must be four numbers that sum to 1"),
        ("hobbit", {"t1": "0.9", "t2": "0.5"}, r"t1 \(0.9\) must not be above t2"),
        ("hobbit", {"low_bits": "3"}, "low_bits must be one of 2, 4, 8"),
        ("lru", {"mask": "maybe"}, "mask must be true or false"),
        ("lru", {"gamma": "0.5"}, "gamma does nothing with routing=all; it is read by routing=confident"),
        ("edgemoe", {"ahead": "2"}, "ahead does nothing with prefetch=path; it is read by prefetch=next-gate or"),
        ("hobbit", {"precision": "fixed", "t1": "0.5"}, "t1 does nothing with precision=fixed"),
    ],
)
def test_what_is_wrong_is_named(name: str, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(name, changes)


def test_the_command_lists_and_shows(tiermoe_: Command) -> None:
    listed = tiermoe_("presets").out
    assert all(name in listed for name in PRESETS)
    shown = tiermoe_("presets", "mobile").out
    assert "gamma" in shown
    assert "0.7" in shown
    assert "routing=confident" in shown
    assert "tiermoe calibrate MODEL --text FILE --for fate" in tiermoe_("presets", "fate").out
    (described,) = json.loads(tiermoe_("presets", "hobbit", "--json").out)
    assert described["lossy"] == ["precision=gate-score"]
    assert described["needs_calibration"] == "hobbit"


def test_errors_of_the_command_line(tiermoe_: Command, shipped: Path) -> None:
    failed = tiermoe_("presets", "fat")
    assert (failed.code, "did you mean fate" in failed.err) == (2, True)
    failed = tiermoe_("run", str(shipped), "x", "--set", "prefetch")
    assert "--set prefetch is not NAME=VALUE" in failed.err
    failed = tiermoe_("run", str(shipped), "x", "--preset", "fate")
    assert "tiermoe calibrate" in failed.err
    assert failed.code == 2
