"""The benchmarks: what they share, compare, read and print. No time is asserted."""

from __future__ import annotations

import math
import os
import re
import sys
import textwrap
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from benchmark_commands import Printed, benchmark_runner, command_of
from benchmarks import kernels, rounds
from benchmarks.llamacpp import Peer, convert
from benchmarks.load import broken_rules, drift, hostile_broken
from benchmarks.load_clients import Tally
from benchmarks.rounds import ratios, timed
from benchmarks.surprisals import surprisals
from commands import Command
from tiermoe import native
from tiermoe.config import NATIVE_SWITCH
from tiermoe.lab.bench.child import CaseFailed
from tiermoe.platform import built


def test_surprisals_are_cross_entropies_of_windows_that_do_not_overlap() -> None:
    generator = torch.Generator().manual_seed(0)
    table = 5 * torch.randn(11, 11, generator=generator)
    ids = torch.randint(0, 11, (50,), generator=generator)

    def logits_fn(window: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        array: npt.NDArray[np.float32] = (1000 + table[torch.from_numpy(window)]).numpy()
        return array

    found = list(surprisals(logits_fn, ids.numpy(), context=7))
    assert [len(window) for window in found] == [6] * 7  # the last token stands alone and is not scored
    for window, tokens in zip(found, ids[:49].view(7, 7), strict=True):
        expected = torch.nn.functional.cross_entropy(table[tokens[:-1]], tokens[1:], reduction="none")
        assert window == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-4)


CONVERTER = """
import sys
model, _, kind, _, out = sys.argv[1:]
open(out, "w").write(f"{kind} of {model}")
"""
PEER = """#!{python}
import json, sys
command, gguf, _, ftype, _, out, *rest = sys.argv[3:]
open(out, "w").write(f"{{ftype}} of {{open(gguf).read()}}")
print(json.dumps({{"out": out}}))
"""


@pytest.mark.parametrize(("kind", "written"), [("f32", "f32 of "), ("q4_k_m", "MOSTLY_Q4_K_M of bf16 of ")])
def test_a_gguf_is_written_by_llama_cpps_own_programs(kind: str, written: str, shipped: Path, tmp_path: Path) -> None:
    (tmp_path / "convert_hf_to_gguf.py").write_text(f"def main():{textwrap.indent(CONVERTER, '    ')}")
    (tmp_path / "conversion").mkdir()
    (tmp_path / "conversion/base.py").write_text("class TextModel:\n    get_vocab_base_pre = _set_vocab_glm = None\n")
    python, out = tmp_path / "python", tmp_path / "files/out.gguf"
    python.write_text(PEER.format(python=sys.executable))
    python.chmod(0o755)
    out.parent.mkdir()
    convert(shipped, tmp_path, kind, out, Peer(str(python), 1))
    assert out.read_text() == f"{written}{shipped}"
    assert [path.name for path in out.parent.iterdir()] == ["out.gguf"]


def test_where_the_converter_fails_or_is_not_there_nothing_is_written(shipped: Path, tmp_path: Path) -> None:
    peer = Peer("false", 1)
    with pytest.raises(CaseFailed, match=r"has no convert_hf_to_gguf\.py"):
        convert(shipped, tmp_path, "bf16", tmp_path / "out.gguf", peer)
    (tmp_path / "convert_hf_to_gguf.py").write_text("raise SystemExit(3)")
    with pytest.raises(CaseFailed, match="ended with code 3"):
        convert(shipped, tmp_path, "bf16", tmp_path / "out.gguf", peer)
    assert [path.name for path in tmp_path.iterdir()] == ["convert_hf_to_gguf.py"]


@pytest.fixture
def run_(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    return benchmark_runner(monkeypatch, capsys)


FOLDER = Path(__file__).parents[1] / "benchmarks"


SHARED = {"__init__", "rounds", "serving", "surprisals", "load_clients", "load_dialects", "hostile_clients",
          "run_converter", "peer", "full_size_child", "recorded_routing", "gpu_run", "gpu_steps", "gpu_models",
          "llama_bench", "random_store", "free_graphs"}  # fmt: skip


MAKES = {"llamacpp", "random_gguf", "random_model", "widen"}
"""Commands that measure nothing."""


COMMANDS = sorted({path.stem for path in FOLDER.glob("*.py")} - SHARED)


@pytest.mark.parametrize("module", COMMANDS)
def test_every_command_says_how_it_is_called(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"benchmarks.{module}"
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        command_of(module)()
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"python -m {module}" in out
    assert ("--without-kernels" in out) == (module.removeprefix("benchmarks.") not in MAKES)


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a checkout that was not built. What is done to the environment is undone."""
    monkeypatch.setattr(built, "_compiled", lambda sources: None)
    monkeypatch.setenv(NATIVE_SWITCH, "1")


@pytest.mark.usefixtures("not_built")
def test_nothing_is_measured_without_kernels_unless_that_is_asked_for(
    tiermoe_: Command, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "the compiled kernels are missing from .*'pip install -e .' in the checkout, .* --without-kernels"
    text = ("--text", shipped.parents[1] / "README.md")
    for words in (("bench", shipped, "--peers", "none"), ("compare", shipped, *text, "--presets", "lru")):
        assert re.search(told, tiermoe_(*words).cause)
    parser = rounds.parser_of("what it measures")
    with pytest.raises(SystemExit, match=told):
        parser.parse_args([])
    parser.parse_args(["--without-kernels"])
    assert os.environ[NATIVE_SWITCH] == "0"  # for processes that it starts
    parser.parse_args([])  # which name nothing
    monkeypatch.setenv(NATIVE_SWITCH, "1")
    rounds.parser_of("what it makes", measures=False).parse_args([])


def test_calls_alternate_after_one_that_does_not_count() -> None:
    order: list[str] = []
    found = timed({name: lambda name=name: order.append(name) for name in "ab"}, 2, lambda: order.append("-"))
    assert "".join(order) == "-a-b" + "-a-b" + "-b-a"
    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 2, "b": 2}
    assert ratios({"a": [1.0, 2.0, 4.0], "b": [3.0, 2.0, 2.0]}, "a") == {"b": {"median": 1.0, "low": 0.5, "high": 3.0}}


def positive(spread: dict[str, float]) -> bool:
    return 0 < spread["low"] <= spread["median"] <= spread["high"] < math.inf


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_kernels_prints_every_part(run_: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "plain": kernels.Shape(128, 64, 2, 4, 2, 32, 320),
        "clamped": kernels.Shape(128, 64, 2, 4, 2, 32, 320, clamped=True),
    }
    monkeypatch.setattr(kernels, "SHAPES", small)
    words = {"shapes": "plain,clamped", "threads": "1", "megabytes": 1, "rounds": 2}
    found, err = run_("benchmarks.kernels", *(f"--{name}={value}" for name, value in words.items()))
    for name in small:
        read, *rest = found[name]
        assert read["part"] == kernels.READ
        assert [row["part"] for row in rest] == ["experts", "query", "key", "attention's output", "output layer"]
        assert all(positive(row["gb_s"]) and positive(row["share"]) for row in rest)
    assert "clamped, output layer" in err
    monkeypatch.setattr(kernels, "SHAPES", {"small": kernels.Shape(256, 64, 2, 4, 2, 32, 320)})
    types = ["q8_0", "iq2_xxs", "tcq2/cpu-avx512/g128"]
    found, _ = run_("benchmarks.kernels", "--shapes=small", "--types", ",".join(types), "--threads=1", "--megabytes=1")
    assert [row["part"] for row in found["small"][1:]] == types
    assert all(positive(row["gb_s"]) for row in found["small"][1:])


ENDED = {"exit": 0, "oom_kills": 0}


def test_drift_is_that_of_the_last_fifth_to_the_second() -> None:
    assert drift([50, 100, 100, 100, 103]) == pytest.approx(0.03)
    assert drift([1, 1, 1]) is None


@pytest.mark.parametrize(
    ("first", "last", "ended", "drifted", "rule"),
    [
        (Tally(), Tally(), {"exit": -9, "oom_kills": 1}, 0.0, "killed"),
        (Tally(), Tally(), ENDED, 0.03, "drift"),
        (Tally(longest_silence_s=11), Tally(), ENDED, 0.0, "standstill"),
        (Tally(longest_standstill_s=11), Tally(), ENDED, 0.0, "standstill"),
        (Tally(told=1), Tally(), ENDED, 0.0, "lost"),
        (Tally(), Tally(lost=1), ENDED, 0.0, "lost"),
    ],
)
def test_each_rule_is_told_of(first: Tally, last: Tally, ended: dict[str, int], drifted: float, rule: str) -> None:
    (line,) = broken_rules(first, last, ended, drifted)
    assert line.startswith(f"{rule}: ")


def test_answers_that_end_with_a_word_when_the_server_does_break_no_rule() -> None:
    assert broken_rules(Tally(longest_wait_s=30), Tally(told=3, refused=9), ENDED, -0.01) == []


@pytest.mark.parametrize(
    ("unexpected", "beside", "peak", "said"),
    [
        (["schema: 200", "schema: 200"], (1.0, 0.1), 100, "schema: 200"),
        ([], (1.7, 0.1), 100, "1.70 s to a first token after 1.00"),
        ([], (1.0, 0.8), 100, "0.80 s to a next token after 0.10"),
        ([], (1.0, 0.1), 101, "101 bytes resident"),
    ],
)
def test_what_hostile_clients_cost_others_is_told_of(
    unexpected: list[str], beside: tuple[float, float], peak: int, said: str
) -> None:
    names = ("first token", "next token")
    alone = dict(zip(names, (1.0, 0.1), strict=True))
    (line,) = hostile_broken(unexpected, alone, dict(zip(names, beside, strict=True)), 0.3, peak, 100)
    assert line.startswith("hostile: ")
    assert said in line


def test_hostile_clients_that_cost_two_steps_break_no_rule() -> None:
    assert hostile_broken([], {"first token": 1.0}, {"first token": 1.6}, 0.31, 100, 100) == []
