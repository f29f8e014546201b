"""`benchmarks.first_run`: what it counts, in which order it runs, and our side of it. No time is asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import first_run
from benchmarks.first_run import FIGURES, measure, ours, summary
from tiermoe.bench.child import CaseFailed


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
