"""The benchmarks: what they share, compare, read and print. No time is asserted."""

from __future__ import annotations

import math
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmark_commands import Printed, benchmark_runner, command_of
from benchmarks import first_run, kernels, rounds
from benchmarks.first_run import FIGURES, measure, ours, summary
from benchmarks.kernels import Turns
from benchmarks.llamacpp import Peer, convert
from benchmarks.load import broken_rules, drift, hostile_broken
from benchmarks.load_clients import Tally
from benchmarks.perplexity import load_eager, logits_of, perplexity, token_ids, windows
from benchmarks.rounds import ratios, timed
from tests import tiny
from tiermoe import native
from tiermoe.lab.bench.child import CaseFailed


@given(st.integers(2, 200), st.integers(2, 40), st.data())
def test_windows_score_every_token_once(length: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context))
    found = list(windows(length, context, stride))
    scored = [position for _, end, first in found for position in range(first, end)]
    unscored = set(range(context, length, context)) if stride == context else set()
    assert scored == [position for position in range(1, length) if position not in unscored]
    for begin, end, first in found:
        assert end - begin <= context
        assert first > begin
        assert begin == 0 or stride == context or first - begin == context - stride


def test_perplexity_is_that_of_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    table = 5 * torch.randn(11, 11, generator=generator)
    ids = torch.randint(0, 11, (50,), generator=generator)

    def logits_fn(window: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        array: npt.NDArray[np.float32] = (1000 + table[torch.from_numpy(window)]).numpy()
        return array

    result = perplexity(logits_fn, ids.numpy(), context=8, stride=3)
    expected = torch.nn.functional.cross_entropy(table[ids[:-1]], ids[1:]).exp()
    assert result.tokens == 49
    assert result.value == pytest.approx(expected.item(), rel=1e-4)


def test_perplexity_refuses_what_it_cannot_score() -> None:
    one = np.zeros(1, dtype=np.int64)
    with pytest.raises(ValueError, match="1 tokens leave nothing"):
        perplexity(lambda ids: np.zeros((len(ids), 4), dtype=np.float32), one, 8, 4)
    with pytest.raises(ValueError, match="stride 9"):
        list(windows(20, 8, 9))


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


@pytest.mark.parametrize("words", [["transformers"], ["tiermoe", "--bits", "16", "--cache", "50%"]])
def test_both_engines_score_the_same_tokens(
    words: list[str], tmp_path: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text((shipped.parents[1] / "data/heldout.txt").read_text()[:1500])
    run_ = benchmark_runner(monkeypatch, capsys)
    engine, *options = words
    found, _ = run_("benchmarks.perplexity", engine, shipped, "--text", text, "--context", 64, "--stride", 32,
                    "--threads", 1, *options)  # fmt: skip
    assert found["engine"] == engine
    assert found["tokens"] > 200
    model = load_eager(shipped, torch.float32)
    expected = perplexity(logits_of(model), token_ids(shipped, text), 64, 32)
    assert found["tokens"] == expected.tokens
    assert found["value"] == pytest.approx(expected.value, rel=0.01)


@pytest.fixture
def run_(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    return benchmark_runner(monkeypatch, capsys)


FOLDER = Path(__file__).parents[1] / "benchmarks"


SHARED = {"__init__", "rounds", "serving", "load_clients", "load_dialects", "hostile_clients", "first_run_child",
          "run_converter", "peer", "full_size_child", "recorded_routing"}  # fmt: skip


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


@pytest.mark.parametrize("built", [True, False])
def test_a_checkout_that_was_not_built_is_told_of(
    built: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "available", lambda: built)
    rounds.parser_of("what it measures")
    told = capsys.readouterr().err
    assert ("without kernels" in told) == (not built)
    assert len(told.splitlines()) == (not built)


def test_calls_alternate_after_one_that_does_not_count() -> None:
    order: list[str] = []
    found = timed({name: lambda name=name: order.append(name) for name in "ab"}, 2, lambda: order.append("-"))
    assert "".join(order) == "-a-b" + "-a-b" + "-b-a"
    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 2, "b": 2}
    assert ratios({"a": [1.0, 2.0, 4.0], "b": [3.0, 2.0, 2.0]}, "a") == {"b": {"median": 1.0, "low": 0.5, "high": 3.0}}


def test_turns_come_round() -> None:
    turns = Turns([1, 2, 3])
    assert [*turns.take(2), *turns.take(2)] == [1, 2, 3, 1]


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


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_kernels_prints_types(run_: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SHAPES", {"small": kernels.Shape(256, 64, 2, 4, 2, 32, 320)})
    types = ["q8_0", "iq2_xxs", "tcq2/cpu-avx512/g128"]
    words = {"shapes": "small", "types": ",".join(types), "threads": "1", "megabytes": 1, "rounds": 2}
    found, _ = run_("benchmarks.kernels", *(f"--{name}={value}" for name, value in words.items()))
    _, *rest = found["small"]
    assert [row["part"] for row in rest] == types
    assert all(positive(row["gb_s"]) for row in rest)


def test_packing_prints_its_speed_and_memory(tmp_path: Path, run_: Printed) -> None:
    model = tiny.write(tmp_path / "model", "qwen3_moe", torch.bfloat16)
    words = ["--layers", "1", "--dense-bits", "4", "--rounds", "1", "--workers", "2", "--out", tmp_path]
    found, err = run_("benchmarks.packing", model, *words)
    assert 0 < found["dense_weights"] < found["weights"]
    assert found["bytes"] > 2 * found["dense_weights"]
    assert all(map(positive, [found["weights_per_s"], *found["gb_s"].values(), *found["ratios"].values()]))
    assert found["peak_bytes_above"] >= 0
    assert "packing / plain read" in err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model"]


def test_a_run_and_its_replay_stand_side_by_side(shipped: Path, run_: Printed) -> None:
    text = shipped.parents[1] / "data" / "heldout.txt"
    words = ["--tokens", "16", "--sequence", "16", "--prompt", "8", "--lanes", "1"]
    found, err = run_("benchmarks.replay", shipped, "--text", text, *words, "--preset", "lru")
    assert found["hits_agree"]
    assert found["run"]["decode"]["misses"] == found["replay"]["decode"]["misses"] > 0
    assert all(ratio > 0 for ratio in found["replay_to_run"].values())
    assert found["start"] >= 0
    assert "points" in err


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


def figures(seconds: float) -> dict[str, Any]:
    return {**dict.fromkeys(FIGURES, 1.0), "seconds": seconds}


def test_engines_alternate_and_files_are_dropped_before_the_cold_run(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def run(name: str) -> dict[str, Any]:
        order.append(name)
        return figures({"tiermoe": 2.0, "llama.cpp": 6.0}[name])

    monkeypatch.setattr(first_run, "drop_from_page_cache", lambda files: order.append(f"drop {files[0]}"))
    runs = {name: (lambda name=name: run(name)) for name in ("tiermoe", "llama.cpp")}
    found = measure(runs, {"tiermoe": [Path("store")], "llama.cpp": [Path("gguf")]}, 2, lambda _: None)
    mine, theirs = ["drop store", "tiermoe", "tiermoe"], ["drop gguf", "llama.cpp", "llama.cpp"]
    assert order == [*mine, *theirs, *theirs, *mine]
    said = summary(found["cold"])
    assert said["seconds_ratio"] == {"median": 3.0, "low": 3.0, "high": 3.0}
    assert said["tiermoe"]["seconds"]["median"] == 2.0


def test_our_side_answers_with_as_many_tokens(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERMOE_CACHE", str(tmp_path))
    found = ours(shipped, "Once upon a time", 6, 300)()
    assert found["completion_tokens"] == 6
    assert found["seconds"] == pytest.approx(found["load_s"] + found["ttft_s"] + 5 / found["decode_tok_s"])
    assert found["imports_s"] + found["seconds"] < found["process_s"]
    monkeypatch.setattr(first_run, "run_child", lambda *_: {**found, "completion_tokens": 1})
    with pytest.raises(CaseFailed, match="ended after 1 of 6"):
        ours(shipped, "Once upon a time", 6, 300)()
