"""`benchmarks.growth`: the checkpoints it writes, the points it plans, what it measures. No time is asserted."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiermoe
from benchmark_commands import Printed, benchmark_runner
from benchmarks import growth
from benchmarks.growth import Point, Run, Shape, budgets, cache_share, cost, exponents, picture, plan, random_model
from tests import tiny
from tiermoe.config import parse_cache
from tiermoe.errors import ConfigError, ModelError
from tiermoe.lab.bench.cases import Case, Condition, Measured
from tiermoe.lab.bench.plots import missing_plots
from tiermoe.offload.assembly import ModelShape, cache_bytes
from tiermoe.offload.presets import PRESETS

TINY = Shape(experts=8, layers=2, top_k=2, hidden=128, inner=64, heads=4, kv_heads=2, head_dim=32, context=256)
SMALL = [f"--{name.replace('_', '-')}={value}" for name, value in vars(TINY).items()]


def points(
    over: str, values: list[int], presets: tuple[str, ...] = ("default",), slots: int | None = None
) -> list[Point]:
    """Half of the experts cached on the line of equal shares; 4 + 8 tokens."""
    return plan(over, values, random_model(TINY), presets, 0.5, slots, (4, 8))


@pytest.fixture
def run_(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    return benchmark_runner(monkeypatch, capsys)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY.ensure(tmp_path_factory.mktemp("work"))


def test_transformers_and_tiermoe_read_a_random_checkpoint_alike(written: Path) -> None:
    plain, info = AutoModelForCausalLM.from_pretrained(written, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values()), info
    config = plain.config
    assert (config.num_experts, config.num_hidden_layers, config.num_experts_per_tok) == (8, 2, 2)
    ids = torch.randint(3, 4096, (1, 12), generator=torch.Generator().manual_seed(0))
    want = tiny.oracle(written, "qwen3_moe", torch.bfloat16).generate(ids, max_new_tokens=16, do_sample=False)
    ours, _ = tiermoe.load(written, memory="4GiB", bits=16, cache="30%")
    got = ours.generate(ids, max_new_tokens=16, do_sample=False)
    ours.tiermoe.close()
    assert torch.equal(got, want)
    assert len(set(got[0, 12:].tolist())) > 4  # not one token again and again


def test_random_experts_and_layers_differ(written: Path) -> None:
    state = AutoModelForCausalLM.from_pretrained(written).state_dict()
    downs = torch.cat([tensor.flatten(1) for name, tensor in state.items() if name.endswith("experts.down_proj")])
    assert len({row.sum().item() for row in downs}) == 16
    assert downs.float().std().item() * 64**0.5 == pytest.approx(1, rel=0.1)


def test_a_checkpoint_is_written_once(written: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in written.iterdir()}
    assert TINY.ensure(written.parent) == written
    assert {path: path.stat().st_mtime_ns for path in written.iterdir()} == before


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden": 100}, "multiples of 64"),
        ({"top_k": 9}, "9 of 8"),
        ({"kv_heads": 3}, "share 3"),
        ({"layers": 0}, "layers"),
    ],
)
def test_shapes_that_make_no_model_are_refused(changes: dict[str, int], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        replace(TINY, **changes).ensure(tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_lines_over_experts_hold_all_a_share_and_one_number() -> None:
    lines: dict[str, list[tuple[int, int]]] = {}
    for point in points("experts", [4, 16, 8]):
        lines.setdefault(point.series, []).append((point.x, point.run.slots))
        assert point.run.model.experts == point.x
    assert lines == {
        "all experts cached": [(4, 8), (8, 16), (16, 32)],
        "50% of the experts cached": [(4, 4), (8, 8), (16, 16)],
        "8 experts cached": [(4, 8), (8, 8), (16, 8)],
    }


def test_lines_over_layers_prompts_and_budgets() -> None:
    model = random_model(TINY)
    layers = points("layers", [2, 4], ("default", "lru"), 20)
    assert {point.series for point in layers} == {
        f"{line}, {preset}"
        for line in ("all experts cached", "50% of the experts cached", "20 experts cached")
        for preset in ("default", "lru")
    }
    assert [point.run.slots for point in layers if point.series == "20 experts cached, lru"] == [16, 20]
    prompts = points("prompt", [32, 16])
    assert [(point.x, point.run.slots, point.run.prompt, point.run.output) for point in prompts] == [
        (16, 16, 16, 0), (32, 16, 32, 0), (16, 8, 16, 0), (32, 8, 32, 0),
    ]  # fmt: skip
    assert budgets(model) == [2, 3, 4, 6, 8, 12, 16]
    assert [point.run.slots for point in points("budget", budgets(model))] == budgets(model)


@pytest.mark.parametrize("every", [8, 60, 256, 5120])
def test_a_cache_in_experts_is_what_the_engine_makes_of_its_share(every: int) -> None:
    shape = ModelShape((every // 4,) * 4, (1,) * 4)
    for slots in range(1, every + 1, max(every // 64, 1)):
        found = cache_bytes(PRESETS["default"], parse_cache(cache_share(slots, every)), shape, {4: 4096})
        assert found == slots * 4096


def row(x: int, seconds: float, **changes: Any) -> dict[str, Any]:
    """A point whose token takes so long, by 5 %."""
    speed = {"median": 1 / seconds, "low": 0.95 / seconds, "high": 1.05 / seconds}
    return {"series": "cached", "x": x, "prompt": 4, "output": 8, "error": None, "decode_tok_s": speed,
            "prefill_tok_s": speed, "bound_tok_s": 1 / seconds, "compute_bound_tok_s": 1.0, **changes}  # fmt: skip


def test_costs_and_exponents() -> None:
    assert exponents([row(1, 2.0), row(2, 4.0), row(4, 32.0)]) == [pytest.approx(1.0), pytest.approx(3.0)]
    assert exponents([row(1, 2.0), row(2, 4.0, decode_tok_s=None), row(4, 8.0)]) == [pytest.approx(1.0)]
    prompt = row(10, 1.0, output=0, prompt=10, prefill_tok_s={"median": 5.0, "low": 4.0, "high": 8.0})
    assert cost(prompt) == {"median": 2.0, "low": 1.25, "high": 2.5}


@pytest.mark.skipif(missing_plots() is not None, reason="pictures need matplotlib")
@pytest.mark.parametrize("over", growth.AXES)
def test_every_point_is_drawn_once(over: str) -> None:
    rows = [row(x, x / 10, output=0 if over == "prompt" else 8) for x in (8, 2, 4)]
    drawn = ElementTree.fromstring(picture(over, [*rows, row(2, 1.0, error="killed", decode_tok_s=None, output=8)]))
    marks = [each for each in drawn.iter("{http://www.w3.org/2000/svg}use") if "fill: #1f77b4" in each.get("style", "")]
    assert len(marks) == 3 + 1  # and the key's


def test_runs_alternate_are_shared_and_fail_alone(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Run] = []

    def prepare(run: Run) -> growth.Once:
        def once() -> dict[str, Any]:
            seen.append(run)
            if run.slots == 4:
                raise ModelError("too little")
            return {"decode_tok_s": float(len(seen)), "prefill_tok_s": float(len(seen))}

        return once

    planned = points("experts", [4, 8])
    runs = dict.fromkeys(point.run for point in planned)
    measured = {run: Measured(Case("tiermoe", "default", Condition(None, 4, 8))) for run in runs}
    growth.run_all(measured, prepare, 2)
    assert [run.slots for run in seen] == [8, 16, 4, 8, 8, 16, 8]  # backwards, without the 4 that failed
    assert len(capsys.readouterr().err.splitlines()) == 7
    rows = [growth.row_of(point, measured[point.run]) for point in planned]
    assert (rows[0]["decode_tok_s"]["low"], rows[0]["decode_tok_s"]["high"]) == (1.0, 7.0)
    assert [each["error"] for each in rows] == [None, None, "too little", None, None, None]
    assert rows[4]["decode_tok_s"] == rows[0]["decode_tok_s"]  # the same run, on two lines


def test_growth_measures_and_draws(tmp_path: Path, run_: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "memory_bandwidth", lambda *_: 1e10)
    page = tmp_path / "growth.html"
    words = ["--over", "budget", "--values", "4,16", "--tokens", "6x6", "--rounds", "1", "--threads", "1"]
    words += ["--report", str(page)] if missing_plots() is None else []
    found, err = run_("benchmarks.growth", "--work", tmp_path / "work", *words, *SMALL)
    few, every = found["axes"]["budget"]["rows"]
    assert (few["slots"], every["slots"], every["hit_rate"]) == (4, 16, 1.0)
    assert few["bytes_per_token"] > 0
    assert every["bytes_per_token"] == 0
    assert (few["error"], every["error"]) == (None, None)
    assert len(found["axes"]["budget"]["exponents"]["cached"]) == 1
    assert "all but even" in err
    assert not [path for path in (tmp_path / "work").iterdir() if path.name.startswith(".growth")]
    assert missing_plots() is not None or page.read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--values", "4"], "name it with --over"),
        (["--model", "models/stories-7m"], "own experts and layers"),
        (["--over", "budget", "--values", "1,4"], "a cache holds 2 to 16"),
        (["--over", "experts", "--values", "1"], "a token uses 2"),
        (["--over", "experts", "--hidden", "100"], "multiples of 64"),
        (["--over", "colour"], "invalid parse_axes value"),
    ],
)
def test_growth_refuses_before_it_measures(
    words: list[str], reason: str, tmp_path: Path, run_: Printed, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_("benchmarks.growth", "--work", tmp_path / "work", *SMALL, *words)
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "work").exists()
