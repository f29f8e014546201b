"""Pictures of measurements: every point once, at its place, and nothing that must be loaded."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from tiermoe.lab.bench.report import compare_presets, speed_over_budget, time_per_token
from tiermoe.offload.presets import PRESETS

SVG = "{http://www.w3.org/2000/svg}"
Place = tuple[float, float]


def texts(picture: str) -> dict[str, Place]:
    """The words of a picture → where they stand (x, y), in pixels from the upper left."""
    assert "nan" not in picture
    found = ET.fromstring(picture).iter(f"{SVG}text")
    return {str(each.text): (float(each.get("x", "nan")), float(each.get("y", "nan"))) for each in found}


def marks(picture: str, colour: str) -> list[Place]:
    """The places of a colour's marks."""
    uses = ET.fromstring(picture).iter(f"{SVG}use")
    return [(float(each.get("x", "nan")), float(each.get("y", "nan"))) for each in uses
            if f"fill: {colour}" in each.get("style", "")]  # fmt: skip


def case(engine: str, memory: int | None, speed: float | None, **more: Any) -> dict[str, Any]:
    spread = {"median": speed, "low": 0.9 * speed, "high": 1.1 * speed} if speed else None
    shared = {"preset": None, "prompt": 16, "output": 32, "batch": 1, "start": "warm", "bound_tok_s": None}
    return {**shared, "engine": engine, "memory_bytes": memory, "decode_tok_s": spread, "token_ms": None, **more}


def test_speeds_stand_over_their_budgets() -> None:
    cases = [
        case("tiermoe", 700 << 20, 20.0, preset="default", bound_tok_s=40.0), case("llama.cpp", 700 << 20, 2.0),
        case("transformers", 700 << 20, None), case("tiermoe", None, 100.0, preset="default"),
        case("llama.cpp", None, 80.0),
    ]  # fmt: skip
    found = texts(speed_over_budget(cases, "decode_tok_s", "Decode"))
    assert {"Decode", "tiermoe (default)", "llama.cpp", "transformers", "no figures", "700 MiB"} <= found.keys()
    assert "bound (Belady's misses)" in found
    bounded, resident = found["700 MiB"][0], found["resident"][0]
    assert all(abs(found[speed][0] - bounded) < abs(found[speed][0] - resident) for speed in ("20.0", "2.00"))
    heights = [found[speed][1] for speed in ("100", "80.0", "20.0", "2.00")]
    assert heights == sorted(heights)
    assert speed_over_budget([case("llama.cpp", None, None)], "decode_tok_s", "Decode") == ""


def test_the_time_of_a_token_is_in_three_parts() -> None:
    split = {"token_ms": 50.0, "compute_ms": 30.0, "wait_ms": 15.0, "framework_ms": 5.0, "bound_tok_s": 40.0}
    picture = time_per_token([case("tiermoe", 700 << 20, 20.0, preset="lru", **split), case("llama.cpp", None, 80.0)])
    assert {"compute", "waiting", "framework", "bound", "50.0", "tiermoe (lru), 700 MiB, 16+32, warm"} <= texts(
        picture
    ).keys()
    assert time_per_token([case("llama.cpp", None, 80.0)]) == ""


def results(**named: float) -> list[dict[str, Any]]:
    """Every preset, the exact ones at one KL and nearly one speed; `named`: speeds of some."""
    rows = []
    for index, preset in enumerate(PRESETS.values()):
        speed = named.get(preset.name, 20 + 0.2 * index)
        quality = {"kl": 0.02 + 0.01 * index if preset.lossy else 0.01, "perplexity": 10.0}
        rows.append({"preset": preset.name, "lossy": preset.lossy, "decode_tok_s": speed, "cache_fraction": 0.45,
                     "decode_tok_s_range": [speed - 1, speed + 1], "tokens": 1024, "rounds": 3, **quality})  # fmt: skip
    return rows


def test_every_preset_has_a_row_with_its_figures() -> None:
    """One preset is far faster than the others, as io-free is on a small model, and one costs nothing."""
    rows = [*results(default=3859.0), {"preset": "broken", "error": "no calibration"}]
    rows[0] |= {"kl": 0.0, "kl_se": 0.0}
    picture = compare_presets(rows)
    found = texts(picture)
    heights = [found[row["preset"]][1] for row in rows[:-1]]
    assert all(below - above >= 15 for above, below in itertools.pairwise(heights))
    assert found["3,859"][1] == pytest.approx(heights[0], abs=2)
    assert "broken" not in found
    exact = sum(not row["lossy"] for row in rows[:-1])
    lossy = len(rows) - 1 - exact
    assert (len(marks(picture, "#1f77b4")), len(marks(picture, "#d1570b"))) == (
        2 * exact + 1,
        2 * lossy + 1,
    )  # the key's
    for row in rows[:-1]:
        del row["kl"]
    assert "perplexity (less is better)" in texts(compare_presets(rows))
    fast, *others = [x for x, y in marks(picture, "#1f77b4") if x < found["3,859"][0]][:exact]
    assert fast > max(others) > min(others) + 2, "the others are told apart beside the fastest"
