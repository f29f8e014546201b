"""`python -m benchmarks.every_preset`: each preset on small models of the shapes that the papers measure."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import every_preset
from benchmarks.every_preset import failures, main
from benchmarks.random_model import PAPERS, config_of, write
from patience import until
from test_random_model import TINY
from tiermoe.lab.measure.texts import SequenceShape
from tiermoe.offload.presets import PRESETS

TEXT = Path(__file__).parent.parent / "data" / "heldout.txt"
REFUSED = {
    "phi-3.5-moe": {"nimble", "nimble-3bit"},  # its router ranks no experts
    "switch-base-8": {"corm", "eap", "fate", "hobbit", "mixtral-offload", "mobile", "nimble", "nimble-3bit"},
}
"""Kind → presets that it has nothing for: Switch is an encoder–decoder with one expert a token."""
SELDOM_LOW = "phi-3.5-moe", "hobbit: no low_loads"
"""Of Phi's loads less than one in a hundred is low: an answer may have none."""
LIKE_OTHERS = ("qwen1.5-moe-a2.7b", "olmoe-1b-7b")
"""Kinds whose experts and routers the others have too: softmax over all, three a token."""
KINDS = [pytest.param(kind, marks=[pytest.mark.long] * (kind in LIKE_OTHERS)) for kind in PAPERS]
EXACT = {name for name, preset in PRESETS.items() if not preset.lossy}


def printed(
    model: Path, store: Path, presets: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """What the command prints."""
    words = ["--text", str(TEXT), "--memory", "4GiB", "--threads", "1", "--store", str(store), "--presets", presets]
    monkeypatch.setattr(sys, "argv", ["every_preset", str(model), *words, "--tokens", "20"])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code in (0, 1), err
    found: dict[str, Any] = json.loads(out)
    assert ended.value.code == (1 if found["failures"] else 0), err
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_preset_runs_on_the_papers_models(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exact presets of one precision give the same answer."""
    few_steps = SequenceShape(tokens=1024, prompt=48, sequence=64)  # the search replays each decoded token forty times
    monkeypatch.setattr(every_preset, "CALIBRATION", few_steps)
    model = tmp_path / "model"
    chosen = {"num_experts_per_tok": 3} if PAPERS[kind].config.get("num_experts_per_tok", 2) > 2 else {}
    write(kind, model, config_of(kind, 4, **{**TINY[kind], **chosen}))
    run = partial(printed, model, tmp_path / "store", monkeypatch=monkeypatch, capsys=capsys)
    found = run("all")
    for failure in found["failures"]:
        if (kind, failure) == SELDOM_LOW:
            continue
        # on a busy machine what is read ahead may be taken back before it has begun
        preset, _, why = failure.partition(": ")
        assert why == "no speculative_loads", failure
        until(lambda preset=preset: not run(preset)["failures"])
    rows = {row["preset"]: row for row in found["rows"]}
    assert rows.keys() == PRESETS.keys()
    refused = {name for name, row in rows.items() if "error" in row}
    assert refused == REFUSED.get(kind, set())
    exact = [name for name in EXACT - refused if PRESETS[name].bits is None and PRESETS[name].quantizer is None]
    same = [rows[name]["answer"] for name in exact]
    assert len(same) >= 4
    assert all(answer == same[0] for answer in same)


def test_what_a_preset_did_not_do_is_told() -> None:
    row = {"hits": 3, "misses": 2, "bytes_read": 9, "low_loads": 0, "speculative_loads": 1, "top_k": 3}
    assert failures([{"preset": "hobbit", **row}], cached=True) == ["hobbit: no low_loads"]
    assert failures([{"preset": "hobbit", **row}], cached=False) == []
    assert failures([{"preset": "lru", **row, "misses": 0}], cached=True) == ["lru: no misses"]
    assert failures([{"preset": "fate", "error": "it broke"}], cached=True) == ["fate: it broke"]
    assert failures([{"preset": "fate", "error": "prefetch does not apply to Switch"}], cached=True) == []
