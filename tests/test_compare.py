"""`tiermoe compare`: rounds, medians and ratios by hand, the picture, and the command."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from commands import Command
from tiermoe.cli.chart import Axis, draw
from tiermoe.errors import ConfigError, TiermoeError
from tiermoe.measure import compare
from tiermoe.measure.compare import Measured, eval_in_process, measure_all, presets_asked, summarise
from tiermoe.systems import PRESETS

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
    assert steps == [(done, 9) for done in range(1, 10)]


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


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; print('packing', file=sys.stderr); sys.exit('tiermoe: the disk is full')", "^the disk is full$"),
        ("import os; os.kill(os.getpid(), 9)", "ended by signal 9"),
        ("import sys; sys.exit(3)", "ended with 3"),
    ],
)
def test_why_a_process_failed(program: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = compare.subprocess.run
    monkeypatch.setattr(compare.subprocess, "run", lambda _, **how: real([sys.executable, "-c", program], **how))
    with pytest.raises(TiermoeError, match=reason):
        eval_in_process(["model"])


def crowd() -> list[dict[str, Any]]:
    """All presets: the exact ones at one KL and nearly one speed, and one far out."""
    rows = []
    for index, preset in enumerate(PRESETS.values()):
        speed = 20 + 0.2 * index
        kl = 0.02 + 0.01 * index if preset.lossy else 0.01
        rows.append(
            result(preset.name, speed, kl=kl, lossy=preset.lossy, rounds=3, decode_tok_s_range=[speed - 1, speed + 1])
        )
    return rows


@pytest.mark.parametrize("far", [0.05, 5.0])
def test_every_preset_is_labelled_where_no_other_label_is(far: float) -> None:
    rows = [*crowd(), {"preset": "broken", "error": "no calibration"}]
    rows[1]["kl"] = far
    root = ET.fromstring(draw(rows))
    names = {row["preset"] for row in rows} - {"broken"}
    labels = [text for text in root.iter(f"{SVG}text") if text.text in names]
    assert sorted(str(label.text) for label in labels) == sorted(names)
    boxes = [(float(label.attrib["x"]), float(label.attrib["y"]), 6.5 * len(str(label.text))) for label in labels]
    for index, (x, y, width) in enumerate(boxes):
        assert x >= 70
        assert x + width <= 900
        assert 50 <= y <= 500
        for other_x, other_y, other_width in boxes[:index]:
            assert abs(y - other_y) >= 12 or x + width <= other_x or other_x + other_width <= x
    exact = [row for row in crowd() if not row["lossy"]]
    assert len(list(root.iter(f"{SVG}circle"))) == len(exact) + 1  # and the legend's
    assert len(list(root.iter(f"{SVG}path"))) == len(names) - len(exact) + 1


def test_points_stand_at_their_values() -> None:
    axis = Axis(0.0, 10.0, 100.0, 200.0)
    assert [axis.at(value) for value in (0, 2.5, 10)] == [100, 125, 200]
    assert axis.ticks() == [0, 2, 4, 6, 8, 10]
    steps = Axis(0.01, 1.0, 0.0, 100.0, logarithmic=True)
    assert steps.at(0.1) == pytest.approx(50)
    assert steps.ticks() == pytest.approx([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
    root = ET.fromstring(draw([row for row in crowd() if row["preset"] in ("default", "lru")]))
    _, *points = [float(circle.attrib["cy"]) for circle in root.iter(f"{SVG}circle")]
    assert len(points) == 2
    assert points[1] < points[0]  # lru is faster here, so higher


def test_without_a_reference_perplexity_takes_its_place() -> None:
    rows = crowd()
    for row in rows:
        del row["kl"]
    assert ">perplexity<" in draw(rows)


def test_compare_measures_what_can_run(tiermoe_: Command, shipped: Path, tmp_path: Path) -> None:
    held_out = Path(__file__).parent.parent / "data" / "heldout.txt"
    picture = tmp_path / "speed.svg"
    ended = tiermoe_(
        "compare", shipped, "--text", held_out, "--presets", "lru,hobbit", "--cache", "45%", "--memory", "4GiB",
        "--tokens", 16, "--window", 8, "--prompt", 8, "--rounds", 1, "--lanes", 1, "--threads", 1, "--bits", 8,
        "--reference", "none", "--picture", picture, "--json",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    lru, hobbit = json.loads(ended.out)
    assert lru["preset"] == "lru"
    assert lru["decode_vs_lru"] == 1
    assert lru["perplexity"] > 1
    assert re.search("tiermoe calibrate .* --for hobbit", hobbit["error"])
    assert ">lru<" in picture.read_text()


def test_the_sixteen_bit_weights_are_scored_once(
    tiermoe_: Command, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def measured(words: list[str]) -> dict[str, Any]:
        asked.append(words)
        if "--save-reference" in words:
            return {}
        more = dict.fromkeys(("hit_rate", "wait_s", "bytes_per_token", "perplexity_loss", "same_top1"), 0.0)
        more |= {"perplexity_loss_se": None, "kl_se": None, "windows": 1, "prompt": 8, "window": 8, "dense_bits": 16}
        return result(words[words.index("--preset") + 1], 5.0, **more, threads=1)

    monkeypatch.setattr("tiermoe.cli.compare.eval_in_process", measured)
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time")
    ended = tiermoe_("compare", "model", "--text", text, "--presets", "lru,fate", "--rounds", 2, "--gpu-memory", "1GiB")
    assert ended.code == 0, ended.err
    first, *others = asked
    file = first[first.index("--save-reference") + 1]
    shared = first[: first.index("--save-reference")]
    assert shared[0] == "model"
    assert shared[shared.index("--gpu-memory") + 1] == "1GiB"
    assert others == [[*shared, "--preset", preset, "--reference", file] for preset in ("lru", "fate", "fate", "lru")]
    assert not Path(file).parent.exists()
    assert "fate" in ended.out


def test_where_nothing_can_run_the_reason_is_told(
    tiermoe_: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(words: list[str]) -> None:
        raise TiermoeError(f"no {words[0]}")

    monkeypatch.setattr("tiermoe.cli.compare.eval_in_process", refuse)
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
