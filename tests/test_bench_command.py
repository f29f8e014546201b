"""The command `tiermoe bench`: a whole measurement on the shipped model, its report, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from commands import Command
from tiermoe.bench import session
from tiermoe.bench.measure import Step
from tiermoe.bench.report import html_report
from tiermoe.bench.summary import number

SVG = "{http://www.w3.org/2000/svg}"
CASE = dict.fromkeys(
    ("decode_tok_s", "prefill_tok_s", "first_token_s", "peak_memory_bytes", "bytes_per_token", "hit_rate",
     "belady_hit_rate", "bound_tok_s", "fraction_of_bound", "fraction_of_own_bound", "token_ms", "compute_ms",
     "wait_ms", "framework_ms", "link_bandwidth", "note", "error", "limit_missing")
)  # fmt: skip


def case(engine: str, memory: int | None, speed: float | None, **more: Any) -> dict[str, Any]:
    spread = {"median": speed, "low": 0.9 * speed, "high": 1.1 * speed} if speed else None
    found = {**CASE, "engine": engine, "preset": None, "memory_bytes": memory, "prompt": 16, "output": 32, "batch": 1}
    return {**found, "start": "warm", "decode_tok_s": spread, "ratios": {}, "limited": memory is not None, **more}


def document(*cases: dict[str, Any]) -> dict[str, Any]:
    machine = {"cpu": "A & B", "instructions": [], "cores": 2, "threads": 2, "memory_bytes": 1 << 34, "system": "S",
               "memory_bandwidth": 2e10}  # fmt: skip
    return {"model": {"name": "m<1>"}, "machine": machine, "command": "tiermoe bench", "date": "today", "rounds": 3,
            "skipped": [{"engine": "accelerate", "reason": "not installed"}], "cases": list(cases)}  # fmt: skip


def parts_of(report: str) -> ET.Element:
    """The body as XML: whatever is drawn or written is well-formed."""
    found = re.search(r"<body>.*</body>", report, re.S)
    assert found is not None
    return ET.fromstring(found[0])


def test_a_report_shows_every_case() -> None:
    split = {"token_ms": 50.0, "compute_ms": 30.0, "wait_ms": 15.0, "framework_ms": 5.0, "bound_tok_s": 40.0}
    whole = document(
        case("tiermoe", 700 << 20, 20.0, preset="default", **split),
        case("llama.cpp", 700 << 20, 2.0),
        case("transformers", 700 << 20, None, error="killed: needs more than 700 MiB"),
        case("llama.cpp", None, 80.0),
    )
    report = html_report(whole)
    body = parts_of(report)
    text = " ".join(body.itertext())
    for words in ("tiermoe (default)", "llama.cpp", "20.0 (18.0–22.0)", "80.0 (72.0–88.0)", "m<1>", "A & B",
                  "killed: needs more than 700 MiB", "skipped: not installed", "resident"):  # fmt: skip
        assert words in text, words
    speed, bars = body.iter(f"{SVG}svg")
    assert len(list(speed.iter(f"{SVG}circle"))) == 3 + 3  # medians, and the colours' key
    dashed = [line for line in speed.iter(f"{SVG}line") if line.get("stroke-dasharray") == "4 3"]
    assert len(dashed) == 1 + 1  # the bound, and its key
    drawn = [rect for rect in bars.iter(f"{SVG}rect") if rect.get("height") == "20.0"]
    widths, begins = ([float(rect.get(name, "")) for rect in drawn] for name in ("width", "x"))
    assert [round(width / widths[2]) for width in widths] == [6, 3, 1]
    assert begins == pytest.approx([begins[0], begins[0] + widths[0], begins[0] + widths[0] + widths[1]], abs=0.2)
    assert "http://www.w3.org" in report
    assert not re.search(r"<script|<link|src=|url\(", report)


def test_a_report_of_nothing_is_one() -> None:
    failed = document(case("tiermoe", 1, None, preset="default", error="too little"))
    assert "too little" in " ".join(parts_of(html_report(failed)).itertext())


def test_the_whole_command(tiermoe_: Command, shipped: Path, tmp_path: Path) -> None:
    report, out = tmp_path / "report.html", tmp_path / "runs.jsonl"
    words = ["bench", shipped, "--peers", "transformers,llama.cpp", "--peer-python", "no-such-python", "--groups",
             "4x2", "--rounds", "1", "--threads", "1", "--store", tmp_path / "stores", "--out", out,
             "--report", report]  # fmt: skip
    done = tiermoe_(*words, "--json")
    assert done.code == 0, done.err
    assert list((tmp_path / "stores").iterdir())
    found = json.loads(done.out)
    assert [(one["engine"], one["output"], one["error"]) for one in found["cases"]] == [
        ("tiermoe", 2, None), ("transformers", 2, None),
    ]  # fmt: skip
    ours, _ = found["cases"]
    assert ours["decode_tok_s"]["median"] > 0
    assert ours["ratios"]["transformers"]["decode"]["median"] > 0
    assert ours["hit_rate"] == ours["belady_hit_rate"] == 1.0
    assert ours["fraction_of_bound"] == pytest.approx(ours["decode_tok_s"]["median"] / ours["bound_tok_s"])
    assert [one["engine"] for one in found["skipped"]] == ["llama.cpp"]
    assert found["options"]["bits"] == found["options"]["dense_bits"] == "4"
    assert "skipped: llama.cpp: no-such-python is no interpreter" in done.err
    text = " ".join(parts_of(report.read_text()).itertext())
    assert "transformers" in text
    again = tiermoe_(*words)  # nothing is run again
    assert again.code == 0, again.err
    assert f"{number(ours['decode_tok_s']['median'])} (" in again.out
    assert len(out.read_text().splitlines()) == 1 + 2


@pytest.mark.parametrize("ended", [False, True])
def test_interrupted_it_prints_what_there_is(
    tiermoe_: Command, shipped: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    def measure(planned: Any, rounds: int, ids: Any, journal: Any, rows: list[Any]) -> Any:
        (_, one), *_ = planned[0]
        row = session.Measured(one, {0: {"decode_tok_s": 12.5, "prefill_tok_s": 40.0, "limited": False}})
        rows.append(row)
        yield Step(one, 0, 1, 3, row.rounds[0])
        if ended:
            os.kill(os.getpid(), signal.SIGTERM)
        raise KeyboardInterrupt  # a program in the background ignores SIGINT

    monkeypatch.setattr(session, "measure", measure)
    monkeypatch.setattr(session.Session, "_memory_bandwidth", lambda self: 1e10)
    done = tiermoe_("bench", shipped, "--peers", "none")
    assert done.code == 130
    assert "12.5 (12.5–12.5)" in done.out
    assert "interrupted" in done.err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--peers", "lama.cpp"], "did you mean llama.cpp"),
        (["--groups", "16by32"], "is not PROMPTxOUTPUT"),
        (["--groups", "2000x49"], "the model's context has 2048"),
        (["--groups", "1000x1000", "--batch", "64"], "tokens of text"),
        (["--memory", "lots"], "memory 'lots' is not a size"),
        (["--presets", "hobit"], "did you mean hobbit"),
        (["--presets", "none", "--peers", "none"], "leave nothing to measure"),
        (["--gguf", "none.gguf"], "the GGUF none.gguf is no file"),
        (["--report", "no/such/folder/r.html"], "cannot be written"),
        (["--out", "no/such/folder/r.jsonl"], "cannot be used"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--groups", "none"], "no prompts"),
        (["--set", "prefetch"], "is not NAME=VALUE"),
        (["--set", "prefetch=nothing"], "prefetch"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tiermoe_: Command, shipped: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], reason: str
) -> None:
    monkeypatch.setattr(session.Session, "_memory_bandwidth", lambda self: 1e10)
    monkeypatch.setattr(session, "measure", lambda *_: pytest.fail("something was run"))
    assert reason in tiermoe_("bench", shipped, *words).cause


def test_a_budget_that_cannot_be_kept_is_the_cases_result(tiermoe_: Command, shipped: Path) -> None:
    done = tiermoe_(
        "bench", shipped, "--peers", "none", "--memory", "20MiB", "--groups", "4x2", "--rounds", "1", "--json"
    )
    assert done.code == 1
    (only,) = json.loads(done.out)["cases"]
    assert re.search("killed: needs more than 20 MiB|are too little", only["error"])
    assert only["decode_tok_s"] is None
