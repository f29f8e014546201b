"""Named compositions: what can be set, what is lossy, what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import Command
from tiermoe.errors import ConfigError
from tiermoe.offload.composition import POLICIES, Composition, declarations, unread
from tiermoe.offload.policies.settings import declared
from tiermoe.offload.presets import PRESETS, compose

FIVE = ("hobbit", "edgemoe", "mobile", "fate", "corm")
LATER = ("moe-infinity", "adapmoe", "hybrimoe", "pregated", "moe-stream", "fiddler", "llama-cpu-moe")
BASELINES = ("io-free", "load-on-demand", "io-qexp", "sti", "eap", "lru", "mixtral-offload")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_could_be_given(name: str) -> None:
    """Each of its values is one that `--set` would take, and each setting of its own is read."""
    preset = PRESETS[name]
    changed = {part: value for part, value in preset.settings().items() if value != PRESETS["lru"][part]}
    assert compose("lru", changed).settings() == preset.settings()
    known = declarations()
    assert all(known[own].part and unread(own, preset) is None for own in preset.own)


def test_no_two_parts_declare_a_setting_of_one_name() -> None:
    parts = {part: {name for policy in table.values() for name in declared(policy)} for part, table in POLICIES.items()}
    names = [*declared(Composition), *(name for found in parts.values() for name in found)]
    assert len(names) == len(set(names))


def test_the_documents_name_parts_and_settings_that_there_are() -> None:
    docs = Path(__file__).parent.parent / "docs"
    known, found = declarations(), 0
    pages = "".join((docs / page).read_text() for page in ("systems.md", "later-systems.md"))
    for name, value in re.findall(r"`(\w+)=([\w.-]+)", pages):
        if name in known:
            known[name].setting.value(name, value)
            found += 1
    assert found > 50


def test_what_is_lossy_says_so_and_the_rest_is_exact() -> None:
    ours = ("frugal", "nimble", "nimble-3bit")
    later = ("adapmoe", "fiddler", "llama-cpu-moe")
    assert {name for name, preset in PRESETS.items() if preset.lossy} == {*FIVE, *ours, *later}
    assert {*FIVE, *LATER, *BASELINES, *ours, "default"} == set(PRESETS)


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
    assert tuple(changed[name] for name in ("prefetch", "t1", "mask", "weights", "ahead")) == (
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
        ("hobbit", {"low_bits": "5"}, "low_bits must be one of 2, 3, 4, 8"),
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
    (described,) = json.loads(tiermoe_("presets", "edgemoe", "--json").out)
    assert (described["dense_bits"], described["quantizer"]) == (16, "linear")


@pytest.mark.parametrize("name", PRESETS)
def test_the_first_run_asks_for_what_the_list_says(tiermoe_: Command, tiny: Path, tmp_path: Path, name: str) -> None:
    """Or for nothing. A pack that it asks for is enough; `tests/test_calibrate.py` runs presets that are calibrated."""
    store = ("--store", tmp_path)
    words = ("run", tiny, "hi", "--preset", name, "--max-tokens", "1", "--memory", "4GiB", "--lanes", "1", *store)
    if PRESETS[name].misses != "load":  # computes beside a GPU
        words = (*words, "--set", "misses=load")
    (told,) = json.loads(tiermoe_("presets", name, "--json").out)
    shown = " ".join(tiermoe_("presets", name).out.split())
    for step in told["first_steps"]:
        assert f"before the first run: {step}" in shown
    if told["first_steps"]:
        first, *others = told["first_steps"]
        assert first in tiermoe_(*words).cause.replace(str(tiny), "MODEL")
        if "pack" not in first:
            return
        assert others == []
        assert tiermoe_(*(tiny if word == "MODEL" else word for word in first.split()[1:]), *store).code == 0
    assert tiermoe_(*words).code == 0


def test_errors_of_the_command_line(tiermoe_: Command, shipped: Path) -> None:
    failed = tiermoe_("presets", "fat")
    assert (failed.code, "did you mean fate" in failed.err) == (2, True)
    failed = tiermoe_("run", str(shipped), "x", "--set", "prefetch")
    assert "--set prefetch is not NAME=VALUE" in failed.err
    failed = tiermoe_("run", str(shipped), "x", "--preset", "fate")
    assert "tiermoe calibrate" in failed.err
    assert failed.code == 2


def test_a_preset_that_stands_elsewhere_is_imported_when_it_is_asked_for() -> None:
    script = (
        "import sys; from tiermoe.offload.presets import PRESETS\n"
        "def lab(): return [name for name in sys.modules if name.startswith('tiermoe.lab')]\n"
        "assert 'corm' in PRESETS and PRESETS['default'].name == 'default'; print(lab())\n"
        "PRESETS.data['mine'] = 'tiermoe.lab.papers.corm:PRESET'; assert PRESETS['mine'].name == 'corm'\n"
        "print(bool(lab()))"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert printed.stdout.split() == ["[]", "True"]
