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
from tiermoe.cli import output
from tiermoe.errors import ConfigError, TiermoeError
from tiermoe.lab.bench.report import missing_plots
from tiermoe.lab.measure.compare import Case, Measured, Variant, evaluate_apart, measure_all, presets_asked, summarise
from tiermoe.offload.presets import PRESETS

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

    def measure(row: Variant) -> dict[str, Any]:
        asked.append(row.preset)
        if row.preset == "fate":
            raise TiermoeError("no calibration")
        return result(row.preset, 1.0)

    presets = [Variant(name) for name in ("lru", "fate", "mobile")]
    rows = measure_all(presets, 3, measure, lambda done, total: steps.append((done, total)))
    assert asked == ["lru", "fate", "mobile", "mobile", "lru", "lru", "mobile"]
    assert [(len(row.rounds), row.error) for row in rows] == [(3, None), (0, "no calibration"), (3, None)]
    assert steps == [(done, 9) for done in range(10)]


def test_medians_ranges_and_ratios_within_a_round() -> None:
    rows = [
        Measured(Variant("load-on-demand"), [result("load-on-demand", speed) for speed in (2.0, 4.0, 1.0)]),
        Measured(Variant("fate"), error="no calibration"),
        Measured(Variant("mobile"), [result("mobile", speed, 50.0) for speed in (6.0, 8.0, 5.0)]),
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


def test_a_ladder_is_compared_with_its_first_row_and_the_one_before() -> None:
    """Another preset's rows beside it, and a step that failed: what came before it is not known."""
    speeds = {"none": (2.0, 4.0), "prefetch": (6.0, 8.0), "cache": (), "bits": (12.0, 12.0)}
    rows = [Measured(Variant("lru", point={"part": "other"}), [result("lru", 1.0)] * 2)]
    for part, measured in speeds.items():
        error = None if measured else "no room"
        rows.append(Measured(Variant("fate", point={"part": part}), [result("fate", each) for each in measured], error))
    found = {row["part"]: row for row in summarise(rows)}
    assert list(found) == ["other", "none", "prefetch", "bits", "cache"], "in the ladder's order, failures last"
    assert found["none"]["decode_vs_first"] == 1
    assert "decode_vs_before" not in found["none"]
    assert found["prefetch"]["decode_vs_first"] == found["prefetch"]["decode_vs_before"] == 2.5  # of 3 and 2
    assert found["bits"]["decode_vs_first"] == 4.5  # of 6 and 3
    assert "decode_vs_before" not in found["bits"]
    assert found["cache"] == {"preset": "fate", "part": "cache", "error": "no room"}


def test_a_sweep_is_compared_with_baselines_at_the_same_value() -> None:
    rows = [
        Measured(Variant(preset, point={"sweep": "cache", "value": value}), [result(preset, speed)])
        for value, speeds in (("10%", (2.0, 3.0)), ("20%", (8.0, 4.0)))
        for preset, speed in zip(("lru", "fate"), speeds, strict=True)
    ]
    found = [(row["value"], row["preset"], row["decode_vs_lru"]) for row in summarise(rows)]
    assert found == [("10%", "lru", 1), ("10%", "fate", 1.5), ("20%", "lru", 1), ("20%", "fate", 0.5)]


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
        return answered(case, progress) | {"decode_tok_s": 3859.0, "prefill_tok_s": 15373.0}

    monkeypatch.setattr("tiermoe.lab.cli.compare.evaluate_apart", measured)
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


def answered(case: Case, progress: Any) -> dict[str, Any]:
    """In the place of an evaluation: what it was asked."""
    if case.save is not None:
        return {}
    more = dict.fromkeys(("hit_rate", "wait_s", "bytes_per_token", "perplexity_loss", "same_top1"), 0.0)
    more |= {
        "perplexity_loss_se": None,
        "kl_se": None,
        "windows": 1,
        "window": 8,
        "dense_bits": 16,
        "threads": 1,
        "kernels": "torch",
    }
    counts = {"expert_hits": 30, "prefetched_hits": 3, "loads": 8, "speculative_loads": 0, "low_loads": 2}
    asked = {"prompt": case.shape[0], "reference": case.reference, "options": case.options}
    return result(case.options["preset"], 10.0, 100.0, **more, **counts, **asked)


def test_rows_of_a_sweep_and_a_ladder_are_asked_for(
    tiermoe_: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 16-bit weights are scored once for each shape of windows."""
    saved: list[Case] = []

    def measured(case: Case, progress: Any) -> dict[str, Any]:
        saved.extend([case] if case.save is not None else [])
        return answered(case, progress)

    monkeypatch.setattr("tiermoe.lab.cli.compare.evaluate_apart", measured)
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time")
    start = ("compare", "model", "--text", text, "--rounds", 1, "--presets", "fate,lru")

    def rows(*words: Any) -> list[dict[str, Any]]:
        saved.clear()
        ended = tiermoe_(*start, *words, "--json")
        assert ended.code == 0, ended.err
        found: list[dict[str, Any]] = json.loads(ended.out)
        return found

    found = rows("--sweep", "prompt=8,16")
    assert [(row["value"], row["prompt"], row["preset"]) for row in found] == [
        (8, 8, "fate"), (8, 8, "lru"), (16, 16, "fate"), (16, 16, "lru"),
    ]  # fmt: skip
    assert [case.shape[0] for case in saved] == [8, 16]
    assert [row["reference"] for row in found] == [str(saved[at].save) for at in (0, 0, 1, 1)]

    found = rows("--sweep", "percentile=50,75", "--set", "window=3")
    assert [row["options"]["set"] for row in found[::2]] == [{"window": "3", "percentile": at} for at in (50, 75)]

    found = rows("--sweep", "memory=1GiB,2GiB", "--presets", "lru")
    assert [row["options"]["memory"] for row in found] == [1 << 30, 2 << 30]
    assert len(saved) == 1

    found = rows("--ladder", "--presets", "fate", "--bits", 8)
    assert [row["options"]["set"].get("cache") for row in found] == ["none", "none", None, None]
    assert {row["options"]["set"]["bits"] for row in found} == {8}

    ended = tiermoe_(*start, "--ladder", "--presets", "fate")
    assert ended.code == 0, ended.err
    assert max(map(len, ended.out.splitlines())) <= 120
    assert "…" not in ended.out
    assert "fate: LoD, 16 bits" in ended.out
    assert "10.0%" in ended.out, "hits that were prefetched"
    assert "25.0%" in ended.out, "loads that were low"
    assert "skipped" not in ended.out, "nothing was"


def test_fallbacks_are_counted_where_there_are_any(tiermoe_: Command, shipped: Path) -> None:
    ended = tiermoe_(
        "compare", shipped, "--text", TEXT, "--presets", "mobile", "--cache", "45%", "--memory", "4GiB",
        "--tokens", 16, "--window", 8, "--prompt", 8, "--rounds", 1, "--lanes", 1, "--threads", 1, "--bits", 8,
        "--reference", "none", "--sweep", "gamma=0,1", "--json",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    never, always = json.loads(ended.out)
    assert (never["fallback_ratio"], always["fallback_ratio"]) == (0, 1)
    assert never["discarded_hits"] + never["discarded_misses"] == 0 < always["prefetched_hits"]
    chosen = 2 * 8 * 7 * 2  # of 2 windows' 7 decoded tokens in 8 layers, by a pass of 2 experts
    assert always["discarded_hits"] + always["discarded_misses"] == chosen
    prompts = [row["expert_hits"] + row["expert_misses"] for row in (never, always)]
    assert prompts[1] - prompts[0] == chosen, "the pass that is kept has all 4"


def test_where_nothing_can_run_the_reason_is_told(
    tiermoe_: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(case: Case, progress: Any) -> None:
        raise TiermoeError(f"no {case.model}")

    monkeypatch.setattr("tiermoe.lab.cli.compare.evaluate_apart", refuse)
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
    assert "gamma does nothing with routing=all" in tiermoe_(*start, "--presets", "lru", "--sweep", "gamma=1").cause
    assert "prompt must be a number of tokens" in tiermoe_(*start, "--sweep", "prompt=8,0").cause
    assert "--cache and --sweep cache" in tiermoe_(*start, "--sweep", "cache=8%", "--cache", "9%").cause
    assert "preset lru has no parts" in tiermoe_(*start, "--presets", "lru", "--ladder").cause
    assert "rounds must be at least 1" in tiermoe_(*start, "--rounds", 0).cause
    assert "cache" in tiermoe_(*start, "--cache", "150%").cause
