"""Plugins: files and packages of users that add policies and presets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import Command
from tiermoe import native
from tiermoe.cli.main import COMMANDS
from tiermoe.cli.serve_models import _ask_for_budgets
from tiermoe.errors import ConfigError
from tiermoe.lab.measure import bitwidths
from tiermoe.lab.measure.compare import Case, evaluate_apart
from tiermoe.offload import plugins
from tiermoe.offload.composition import Composition
from tiermoe.offload.presets import PRESETS, compose

pytestmark = pytest.mark.usefixtures("plain_tables")

EXAMPLE = Path(__file__).parents[1] / "examples" / "preset.py"
PRESET = """
from tiermoe.offload.composition import Composition
from tiermoe.offload.presets import PRESETS
PRESETS["mine"] = Composition("mine", "one of a user's")
"""
IMPORTS = """from tiermoe.offload.composition import Composition; from tiermoe.offload.presets import PRESETS
from tiermoe.offload.policies.eviction import EVICTIONS; from tiermoe.offload.policies.allotment import ALLOTMENTS
from tiermoe.offload.policies.precision import PRECISIONS, Precision; from tiermoe.offload.policies.prediction import *
"""  # three lines


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\nx = 1 / 0", "failed in line 2: ZeroDivisionError: division by zero"),
        ("x = 1\ny = (", "is no Python in line 2: '\\(' was never closed"),
        ("\0", "is no Python"),
        ("import no_such_module", "failed in line 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)", "failed in line 1: SystemExit"),
        (
            IMPORTS + "def f():\n    EVICTIONS['lru'] = object\nf()",
            "line 5: EVICTIONS has 'lru' already; choose another",
        ),
        (IMPORTS + "PRESETS['fate'] = Composition('fate', '')", "line 4: PRESETS has 'fate' already"),
        (IMPORTS + "EVICTIONS['a'] = 3", r"EVICTIONS\['a'\] must be a class with the methods of Eviction, not 3"),
        (
            IMPORTS + "EVICTIONS['a'] = object",
            "lacks admitted, new_sequence, removed, used, victim, which Eviction asks",
        ),
        (IMPORTS + "PREDICTIONS['a'] = Precision", "must be a subclass of Predictor, not <class .*Precision'>"),
        (
            IMPORTS + "class A(Precision):\n    demands = None\nPRECISIONS['a'] = A",
            "lacks predicted, which Precision asks",
        ),
        (IMPORTS + "ALLOTMENTS['a'] = 'pool'", "must be a function, not 'pool'"),
        (IMPORTS + "PRESETS['a'] = 'fate'", "must be a Composition, not 'fate'"),
        (IMPORTS + "PRESETS['a'] = Composition('b', '')", "calls itself 'b'; give it one name"),
        (IMPORTS + "PRESETS['a'] = Composition('a', '', cache='lur')", "cache cannot be 'lur'; did you mean lru"),
        (
            IMPORTS + "PRESETS['a'] = Composition('a', '', own={'t3': 1})",
            "unknown part or setting 't3'; did you mean t",
        ),
        (IMPORTS + "PRESETS['a'] = Composition('a', '', gamma=2)", "line 4: gamma must be from 0 to 1, got 2"),
        (
            IMPORTS + "PRESETS['a'] = Composition('a', '', precision='gate-score')",
            "has no t1 and no t2, and names no cal",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_told_in_a_line(
    tiermoe_: Command, tmp_path: Path, source: str, message: str
) -> None:
    (file := tmp_path / "mine.py").write_text(source)
    cause = tiermoe_("presets", "--plugin", file).cause
    assert re.search(f"the plugin {file} .*{message}", cause), cause
    assert "a" not in PRESETS


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda file: None, "cannot be read: No such file or directory; name a Python file"),
        (Path.mkdir, "cannot be read: Is a directory"),
        (lambda file: file.write_bytes(bytes(plugins._LARGEST + 1)), "has more than 1,048,576 bytes"),
    ],
)
def test_what_is_no_file_of_python_is_told(tiermoe_: Command, tmp_path: Path, made: Any, message: str) -> None:
    made(tmp_path / "mine.py")
    assert message in tiermoe_("presets", "--plugin", tmp_path / "mine.py").cause


def test_a_file_runs_once_and_its_preset_is_one_like_any_other(tiermoe_: Command, tmp_path: Path) -> None:
    (file := tmp_path / "mine.py").write_text(PRESET)
    for _ in range(2):
        (shown,) = json.loads(tiermoe_("presets", "mine", "--json", "--plugin", file, "--plugin", EXAMPLE).out)
        assert shown["summary"] == "one of a user's"
    assert compose("mine", {"cache": "clock", "rounds": "3", "allotment": "even"})["rounds"] == 3
    assert os.environ[plugins.VARIABLE] == f"{file}:{EXAMPLE}"
    assert all(name in tiermoe_("presets", "--plugin", file).out for name in ("mine", "quick-copies", "lru"))


def test_commands_that_take_presets_take_plugins(tiermoe_: Command) -> None:
    """Those with an option --preset, --presets or --set, and those that list or prepare them."""
    for name in COMMANDS:
        told = tiermoe_(name, "--help").out
        takes = any(f"{option} " in told for option in ("--preset", "--presets", "--set"))
        assert ("--plugin" in told) == (takes or name in ("presets", "calibrate", "trace"))


# --- processes that commands start ---


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of such a process."""
    monkeypatch.setenv(plugins.VARIABLE, str(EXAMPLE))


@pytest.mark.skipif(not native.available(), reason="bench measures the native kernels")
def test_bench_measures_a_users_preset_in_a_row_for_an_issue(tiermoe_: Command, shipped: Path) -> None:
    """In a process of its own, for memory that may not be bounded here."""
    words = ("--presets", "quick-copies", "--plugin", EXAMPLE, "--groups", "4x2", "--rounds", "1", "--row")
    ended = tiermoe_("bench", shipped, *words)
    assert ended.code == 0, ended.err
    (row,) = ended.out.splitlines()
    speed = r"[\d.]+ \([\d.]+–[\d.]+\) tok/s, rounds: 1; [\d.]+ MB a token; hits \d+%"
    machine = rf".+, \d+ cores, \d+ threads, native {native.instruction_set()}"
    model = r"stories-7m, 4 bits; tiermoe \(quick-copies\), resident, 4\+2, warm; peak [\d.]+ MiB"
    assert re.fullmatch(rf"{machine}; {model}; {speed}; tiermoe [\d.]+( \([0-9a-f]{{12}}\+?\))?", row), row


def test_compare_forks_processes_with_plugins(named: None, shipped: Path) -> None:
    """From a server that may run since before."""
    text = (shipped.parents[1] / "data" / "heldout.txt").read_text()
    options = {"preset": "quick-copies", "memory": "1GiB", "cache": "25%"}
    found = evaluate_apart(Case("stories-7m", text, (8, 8, 8), options), lambda *_: None)
    assert (found["preset"], found["lossy"]) == ("quick-copies", ["precision=low-on-miss"])


def test_a_server_of_several_models_plans_with_plugins(named: None, shipped: Path) -> None:
    asked = {"models": ["stories-7m"], "options": {"preset": "quick-copies"}, "kv_memory": None, "sampling": {}}
    (found,) = _ask_for_budgets(asked)["ranges"]
    assert "problem" not in found


def test_processes_that_measure_experts_have_plugins(named: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitwidths, "BitsMeter", lambda source: source)
    source: Any = None
    bitwidths.AloneMeter(source, source, ())
    assert PRESETS["quick-copies"].lossy


# --- packages ---


def package(folder: Path, source: str) -> None:
    """An installed package whose entry point names a module."""
    (folder / "their_presets.py").write_text(source)
    (folder / "theirs-1.dist-info").mkdir()
    (folder / "theirs-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (folder / "theirs-1.dist-info" / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nours = their_presets\n")


@pytest.mark.parametrize("asked", ["compose('mine')", "compose('lru', {'cache': 'clock'})", "all_presets()"])
def test_an_installed_package_is_found_when_a_name_is_not_known(tmp_path: Path, asked: str) -> None:
    package(tmp_path, PRESET + EXAMPLE.read_text().replace("from __future__ import annotations", ""))
    script = (
        "import sys; from tiermoe.offload.presets import *\n"
        "import tiermoe.cli.main; compose('default', {'prefetch': 'none'})\n"
        "assert not {'importlib.metadata', 'their_presets'} & set(sys.modules)\n"
        f"{asked}; assert 'mine' in all_presets() and 'quick-copies' in PRESETS"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, text=True,
                          capture_output=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_package_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="the plugin ours of the package theirs failed: ZeroDivisionError"):
        compose("no-such-preset")
    with pytest.raises(ConfigError, match="unknown preset 'no-such-preset'"):  # it is not tried again
        compose("no-such-preset")


def test_registering_twice_in_python_is_refused_too() -> None:
    PRESETS["mine"] = Composition("mine", "")
    with pytest.raises(ConfigError, match="PRESETS has 'mine' already"):
        PRESETS["mine"] = Composition("mine", "")
