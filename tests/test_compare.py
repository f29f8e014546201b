"""`tiermoe compare`: rounds, medians and ratios by hand, the picture, and the command."""

from __future__ import annotations

import json
import multiprocessing
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import Command
from tiermoe.bench.plots import missing_plots
from tiermoe.cli import output
from tiermoe.errors import ConfigError, TiermoeError
from tiermoe.measure.compare import Case, Measured, evaluate_apart, measure_all, presets_asked, summarise
from tiermoe.systems import PRESETS

TEXT = Path(__file__).parent.parent / "data" / "heldout.txt"
SVG = "{http://www.w3.org/2000/svg}"


def result(preset: str, decode: float, prefill: float = 100.0, kl: float = 0.01, **more: Any) -> dict[str, Any]:
    return {
        "preset": preset, "lossy": [], "decode_tok_s": decode, "prefill_tok_s": prefill, "kl": kl, "bits": 4,
        "cache_fraction": 0.45, "tokens": 1024, "perplexity": 10.0, **more,
    }  # fmt: skip


def test_presets_by_name() -> None:
    assert presets_asked("all") == list(PRESETS)
    assert presets_asked("lru, hobbit,lru") == ["lru", "hobbit"]
    with pytest.raises(ConfigError, match="did you mean hobbit"):
        presets_asked("lru,hobit")
    with pytest.raises(ConfigError, match="no preset is named"):
        presets_asked(" ,")


def test_rounds_go_back_and_forth_and_a_failure_stays_alone() -> None:
    asked: list[str] = []
    steps: list[tuple[int, int]] = []

    def measure(preset: str) -> dict[str, Any]:
        asked.append(preset)
        if preset == "fate":
            raise TiermoeError("no calibration")
        return result(preset, 1.0)

    rows = measure_all(["lru", "fate", "mobile"], 3, measure, lambda done, total: steps.append((done, total)))
    assert asked == ["lru", "fate", "mobile", "mobile", "lru", "lru", "mobile"]
    assert [(len(row.rounds), row.error) for row in rows] == [(3, None), (0, "no calibration"), (3, None)]
    assert steps == [(done, 9) for done in range(10)]


def test_medians_ranges_and_ratios_within_a_round() -> None:
    rows = [
        Measured("load-on-demand", [result("load-on-demand", speed) for speed in (2.0, 4.0, 1.0)]),
        Measured("fate", error="no calibration"),
        Measured("mobile", [result("mobile", speed, 50.0) for speed in (6.0, 8.0, 5.0)]),
    ]
    fast, slow, failed = summarise(rows)
    assert (fast["preset"], slow["preset"]) == ("mobile", "load-on-demand")
    assert fast["decode_tok_s"] == 6.0
    assert fast["decode_tok_s_range"] == [5.0, 8.0]
    assert fast["decode_vs_load_on_demand"] == 3.0  # of 3, 2 and 5
    assert fast["prefill_vs_load_on_demand"] == 0.5
    assert slow["decode_vs_load_on_demand"] == 1.0
    assert "decode_vs_lru" not in fast
    assert (fast["rounds"], fast["bits"], fast["lossy"]) == (3, 4, [])
    assert isinstance(fast["bits"], int)
    assert failed == {"preset": "fate", "error": "no calibration"}


def test_why_a_process_failed(shipped: Path) -> None:
    case = Case("nowhere", TEXT.read_text(), (8, 256, 64 * 256), {})
    with pytest.raises(TiermoeError, match="nowhere"):
        evaluate_apart(case, lambda *said: None)
    with pytest.raises(TiermoeError, match=r"ended by signal 9; 9 is often the system out of memory"):
        evaluate_apart(replace(case, model=str(shipped), reference="16bit"), killing)


def killing(what: str, done: int, total: int) -> None:
    for process in multiprocessing.active_children():
        process.kill()


def test_compare_measures_what_can_run(
    tiermoe_: Command, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "SECONDS_BETWEEN", 0)
    picture = tmp_path / "speed.svg"
    ended = tiermoe_(
        "compare", shipped, "--text", TEXT, "--presets", "lru,hobbit", "--cache", "45%", "--memory", "4GiB",
        "--tokens", 16, "--window", 8, "--prompt", 8, "--rounds", 1, "--lanes", 1, "--threads", 1, "--bits", 8,
        "--reference", "none", "--json", *(["--picture", picture] if missing_plots() is None else []),
    )  # fmt: skip
    assert ended.code == 0, ended.err
    lru, hobbit = json.loads(ended.out)
    assert lru["preset"] == "lru"
    assert lru["decode_vs_lru"] == 1
    assert lru["perplexity"] > 1
    assert re.search("tiermoe calibrate .* --for hobbit", hobbit["error"])
    assert missing_plots() is not None or ">lru<" in picture.read_text()
    assert re.search(r"^measuring presets: 1 of 2, \d+ s left$", ended.err, re.MULTILINE)


def test_the_sixteen_bit_weights_are_scored_once(
    tiermoe_: Command, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Case] = []

    def measured(case: Case, progress: Any) -> dict[str, Any]:
        asked.append(case)
        if case.save is not None:
            return {}
        more = dict.fromkeys(("hit_rate", "wait_s", "bytes_per_token", "perplexity_loss", "same_top1"), 0.0)
        more |= {"perplexity_loss_se": None, "kl_se": None, "windows": 1, "prompt": 8, "window": 8, "dense_bits": 16}
        return result(case.options["preset"], 3859.0, 15373.0, **{**more, "bytes_per_token": 1020 * 2**10}, threads=1)

    monkeypatch.setattr("tiermoe.cli.compare.evaluate_apart", measured)
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time")
    ended = tiermoe_("compare", "model", "--text", text, "--presets", "lru,fate", "--rounds", 2, "--gpu-memory", "1GiB")
    assert ended.code == 0, ended.err
    first, *others = asked
    assert first.save is not None
    assert (first.model, first.text, first.options["gpu_memory"]) == ("model", "Once upon a time", "1GiB")
    assert others == [
        replace(first, save=None, reference=str(first.save), options={**first.options, "preset": preset})
        for preset in ("lru", "fate", "fate", "lru")
    ]
    assert not first.save.parent.exists()
    assert "fate" in ended.out
    assert max(map(len, ended.out.splitlines())) <= 120
    assert "3,859–3,859" in ended.out
    assert "…" not in ended.out


def test_where_nothing_can_run_the_reason_is_told(
    tiermoe_: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(case: Case, progress: Any) -> None:
        raise TiermoeError(f"no {case.model}")

    monkeypatch.setattr("tiermoe.cli.compare.evaluate_apart", refuse)
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time")
    start = ("compare", "nowhere", "--text", text)
    assert (
        "no preset could be measured; lru: no nowhere"
        in tiermoe_(*start, "--presets", "lru,fate", "--reference", "none").cause
    )
    assert tiermoe_(*start).cause == "tiermoe: no nowhere"


def test_compare_refuses_in_one_line(tiermoe_: Command, shipped: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time")
    start = ("compare", shipped, "--text", text)
    assert "did you mean hobbit" in tiermoe_(*start, "--presets", "hobit").cause
    assert "must be named .svg" in tiermoe_(*start, "--picture", "speed.png").cause
    assert "does not exist" in tiermoe_(*start, "--picture", tmp_path / "no" / "speed.svg").cause
    assert "rounds must be at least 1" in tiermoe_(*start, "--rounds", 0).cause
    assert "cache" in tiermoe_(*start, "--cache", "150%").cause
