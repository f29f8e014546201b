"""`benchmarks.growth`: the checkpoints it writes, the points it plans, the reasons it derives. No time is asserted."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiermoe
from benchmark_commands import Printed, benchmark_runner
from benchmarks import random_moe
from benchmarks.growth import running
from benchmarks.growth.costs import around, bent, cost, exponents
from benchmarks.growth.facts import facts_of
from benchmarks.growth.page import report
from benchmarks.growth.plots import Curve, plot
from benchmarks.growth.points import Common, Run, budgets, plan, random_model
from benchmarks.growth.reasons import Facts, bends
from benchmarks.growth.running import Asked, Running, cache_share, limited_by
from benchmarks.random_moe import Shape, ensure
from tests import tiny
from tiermoe.config import parse_cache
from tiermoe.decide.compose import ModelShape, cache_bytes
from tiermoe.errors import ModelError
from tiermoe.systems import PRESETS

TINY = Shape(experts=8, layers=2, top_k=2, hidden=128, inner=64, heads=4, kv_heads=2, head_dim=32, context=256)
SMALL = [f"--{name.replace('_', '-')}={value}" for name, value in vars(TINY).items()]
COMMON = Common(("default",), 0.5, None, (4, 8))


@pytest.fixture
def run_(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    return benchmark_runner(monkeypatch, capsys)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure(TINY, tmp_path_factory.mktemp("work"))


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
    assert downs.float().std().item() * 64**0.5 == pytest.approx(1, rel=0.05)


def test_a_checkpoint_is_written_once_and_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = random_moe.save_file, []

    def fails(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError("no space")
        real(*arguments)

    monkeypatch.setattr(random_moe, "save_file", fails)
    with pytest.raises(OSError, match="no space"):
        ensure(TINY, tmp_path)
    assert list(tmp_path.iterdir()) == []
    ensure(TINY, tmp_path)
    assert len(calls) == 2 + 3  # one shard a layer, one for the rest
    ensure(TINY, tmp_path)
    assert len(calls) == 5


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
    with pytest.raises(ValueError, match=reason):
        ensure(replace(TINY, **changes), tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_lines_over_experts_hold_all_a_share_and_one_number() -> None:
    points = plan("experts", [4, 16, 8], random_model(TINY), COMMON)
    lines: dict[str, list[tuple[int, int]]] = {}
    for point in points:
        lines.setdefault(point.series, []).append((point.x, point.run.slots))
        assert point.run.model.experts == point.x
    assert lines == {
        "all experts cached": [(4, 8), (8, 16), (16, 32)],
        "50% of the experts cached": [(4, 4), (8, 8), (16, 16)],
        "8 experts cached": [(4, 8), (8, 8), (16, 8)],
    }


def test_lines_over_layers_prompts_and_budgets() -> None:
    model = random_model(TINY)
    layers = plan("layers", [2, 4], model, replace(COMMON, slots=20, presets=("default", "lru")))
    assert {point.series for point in layers} == {
        f"{line}, {preset}"
        for line in ("all experts cached", "50% of the experts cached", "20 experts cached")
        for preset in ("default", "lru")
    }
    assert [point.run.slots for point in layers if point.series == "20 experts cached, lru"] == [16, 20]
    prompts = plan("prompt", [32, 16], model, COMMON)
    assert [(point.x, point.run.slots, point.run.prompt, point.run.output) for point in prompts] == [
        (16, 16, 16, 0), (32, 16, 32, 0), (16, 8, 16, 0), (32, 8, 32, 0),
    ]  # fmt: skip
    assert budgets(model) == [2, 3, 4, 6, 8, 12, 16]
    assert [point.run.slots for point in plan("budget", budgets(model), model, COMMON)] == budgets(model)


@pytest.mark.parametrize("every", [8, 60, 256, 5120])
def test_a_cache_in_experts_is_what_the_engine_makes_of_its_share(every: int) -> None:
    shape = ModelShape((every // 4,) * 4, (1,) * 4)
    for slots in range(1, every + 1, max(every // 64, 1)):
        found = cache_bytes(PRESETS["default"], parse_cache(cache_share(slots, every)), shape, {4: 4096})
        assert found == slots * 4096


def row(x: int, seconds: float, **changes: Any) -> dict[str, Any]:
    """A point whose token takes so long, by 5 %."""
    speed = {"median": 1 / seconds, "low": 0.95 / seconds, "high": 1.05 / seconds}
    return {
        "series": "cached", "x": x, "preset": "default", "layers": 4, "experts": 8, "top_k": 2, "cache": x, "prompt": 4,
        "output": 8, "slot_bytes": 1 << 20, "error": None, "decode_tok_s": speed, "prefill_tok_s": speed,
        "hit_rate": 0.5, "belady_hit_rate": 0.75, "bytes_per_token": 3e6, "bound_tok_s": 2 / seconds,
        "compute_bound_tok_s": 1.5 / seconds, "limited_by": "memory", "wait_ms": 0.0, "compute_ms": 1.0,
        "framework_ms": 1.0, **changes,
    }  # fmt: skip


def test_costs_and_exponents() -> None:
    points = [row(1, 2.0), row(2, 4.0), row(4, 32.0)]
    assert exponents(points) == [pytest.approx(1.0), pytest.approx(3.0)]
    assert around(points, 2) == (pytest.approx(1.0), pytest.approx(3.0))
    assert around(points, 3) == (pytest.approx(1.0), None)
    assert around(points, 1) == (None, pytest.approx(1.0))
    assert [each["x"] for each in bent(points)] == [2]
    assert bent([row(1, 2.0), row(2, 4.0), row(4, 8.0)]) == []
    noisy = row(2, 4.0, decode_tok_s={"median": 0.25, "low": 0.1, "high": 0.5})
    assert bent([row(1, 2.0), noisy, row(4, 32.0)]) == []
    prompt = row(10, 1.0, output=0, prompt=10, prefill_tok_s={"median": 5.0, "low": 4.0, "high": 8.0})
    assert cost(prompt) == {"median": 2.0, "low": 1.25, "high": 2.5}


def test_the_bound_is_the_larger_of_two_times() -> None:
    weights = {"weight_bytes_per_pass": 2e9}
    assert limited_by({**weights, "bound_tok_s": 5.0}, 1e10) == "memory"  # 0.2 s to read them
    assert limited_by({**weights, "bound_tok_s": 4.0}, 1e10) == "drive"
    assert limited_by({**weights, "bound_tok_s": None}, 1e10) is None


def test_reasons_over_budgets() -> None:
    """4 layers of 8 experts, 2 a token: 32 experts, 8 of a token."""
    rows = [row(32, 1.0), row(16, 1.2), row(12, 2.0, limited_by="drive"), row(8, 3.0, limited_by="drive", wait_ms=9.0),
            row(2, 6.0, limited_by="drive", wait_ms=9.0)]  # fmt: skip
    found = [
        (bend.at, bend.reason.split(":")[0].split(" passes")[0]) for bend in bends("budget", rows, Facts(None, 512))
    ]
    assert found == [
        (8, "measured"), (8, "the experts of one token no longer fit"), (12, "the bound"), (32, "all experts fit"),
    ]  # fmt: skip
    at_all = next(bend for bend in bends("budget", rows, Facts(None, 512)) if bend.at == 32)
    assert (at_all.before, at_all.after) == (pytest.approx(math.log(1 / 1.2, 2)), None)


def test_reasons_over_models() -> None:
    def line(series: str, caches: list[int]) -> list[dict[str, Any]]:
        return [
            row(x, 1.0, series=series, experts=x, cache=cache) for x, cache in zip([8, 16, 32, 64], caches, strict=True)
        ]

    every = line("all experts cached", [32, 64, 128, 256])
    held = line("32 experts cached", [32] * 4)
    found = bends("experts", every + held, Facts(96 << 20, 512))
    assert [(bend.series, bend.at) for bend in found] == [("all experts cached", 24), ("32 experts cached", 8)]
    deep = [row(x, 1.0, layers=x, cache=16, series="16 experts cached") for x in (2, 4, 8, 16)]
    assert [bend.at for bend in bends("layers", deep, Facts(None, 512))] == [2, 8]


def test_reasons_over_prompts() -> None:
    facts = facts_of(random_model(Shape()), 512)
    # by hand, a layer: queries 1024, keys and values 256 each, 32 routers' rows; 4 experts of 3 x 1024 x 512
    weights = 1024 * (2 * 1024 + 2 * 256 + 32) + 4 * 3 * 1024 * 512
    assert facts.flops == 4 * 2 * weights
    assert facts.attended == 4 * 4 * 1024
    rows = [row(x, x / 100, prompt=x, output=0, cache=16) for x in (16, 64, 256, 1024, 2048)]
    found = {bend.reason.split(",")[0].split(" of a layer")[0]: bend.at for bend in bends("prompt", rows, facts)}
    used = found.pop("with even routing 99%")
    assert 1 - (1 - 2 / 8) ** used == pytest.approx(0.99)
    tokens = found.pop("attention")
    share = facts.attended * tokens / 2 / (facts.flops + facts.attended * tokens / 2)
    assert share == pytest.approx(0.1)
    assert 512 in found.values()


def test_a_bend_without_a_reason_says_so() -> None:
    rows = [row(x, seconds, cache=9, series="50% of the experts cached") for x, seconds in ((8, 1), (16, 1), (32, 8))]
    (found,) = bends("layers", rows, Facts(None, 512))
    assert (found.at, found.reason) == (16, "")
    assert "no reason is known" in report(document(rows, [found.as_dict()]))


def document(rows: list[dict[str, Any]], found: list[dict[str, Any]]) -> dict[str, Any]:
    machine = {"cpu": "<cpu>", "instructions": [], "cores": 2, "threads": 2, "memory_bytes": 1 << 30, "system": "Linux"}
    axes = {"layers": {"rows": rows, "bends": found, "summary": ["a & b"]}}
    return {"machine": machine, "command": "c", "date": "d", "memory_bandwidth": 1e10, "note": "n", "axes": axes}


def pictures(page: str) -> list[ElementTree.Element]:
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # it needs nothing but itself
    assert "nan" not in page
    assert "inf" not in page.split("<body>")[1].replace("info", "")
    return list(ElementTree.fromstring(page.partition("\n")[2]).iter("{http://www.w3.org/2000/svg}svg"))


def circles(picture: ElementTree.Element) -> int:
    """Points of the curves, without those of the key."""
    return sum(float(each.get("cy", 0)) <= 330 for each in picture.iter("{http://www.w3.org/2000/svg}circle"))


def test_a_page_draws_every_point_once() -> None:
    rows = [row(x, x / 10) for x in (2, 4, 8)] + [row(2, 1.0, error="killed & gone", decode_tok_s=None)]
    page = report(document(rows, []))
    (picture,) = pictures(page)
    assert circles(picture) == 3
    assert "&lt;cpu&gt;" in page
    assert "killed &amp; gone" in page


def test_plots_take_nothing_one_point_and_zeros() -> None:
    assert plot("t", "x", "y", [Curve("empty", [])], "", []) == ""
    for values in ([(4, 1.0, 1.0, 1.0)], [(4, 0.0, 0.0, 0.0)], [(2, 0.0, 1.0, 2.0), (64, 1.0, 900.0, 1000.0)]):
        picture = ElementTree.fromstring(plot("t", "x", "y", [Curve("one", values)], "", [(1, 4), (2, 4)]))
        assert circles(picture) == len(values)
        labels = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
        assert "(1, 2)" in labels


def test_runs_alternate_are_shared_and_fail_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Run] = []

    def prepared(self: Running, run: Run, scratch: Path, say: Any) -> Callable[[], dict[str, Any]]:
        self.measured[run] = running.Measured(running.Case("tiermoe", run.preset, running.Condition(None, 4, 8)))

        def once() -> dict[str, Any]:
            seen.append(run)
            if run.slots == 4:
                raise ModelError("too little")
            speed = float(len(seen))
            return {"decode_tok_s": speed, "prefill_tok_s": speed, "slot_bytes": 7, "weight_bytes_per_pass": 1e9}

        return once

    monkeypatch.setattr(Running, "_prepared", prepared)
    monkeypatch.setattr(running, "memory_bandwidth", lambda *_: 1e10)
    points = plan("experts", [4, 8], random_model(TINY), COMMON)
    asked = Asked(None, tmp_path / "work", {}, "", 1, 60, 2)
    made, told = Running(asked, points), list[str]()
    made.run(told.append)
    assert [run.slots for run in seen] == [8, 16, 4, 8, 8, 16, 8]  # backwards, without the 4 that failed
    assert len(told) == 7
    rows = made.rows()
    assert len(rows) == 6
    first = rows[0]
    assert (first["decode_tok_s"]["low"], first["decode_tok_s"]["high"]) == (1.0, 7.0)
    assert [each["error"] for each in rows] == [None, None, "too little", None, None, None]
    assert rows[4]["decode_tok_s"] == first["decode_tok_s"]  # the same run, on two lines


def test_growth_measures_and_reports(tmp_path: Path, run_: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "memory_bandwidth", lambda *_: 1e10)
    page = tmp_path / "growth.html"
    words = ["--over", "budget", "--values", "4,16", "--tokens", "6x6", "--rounds", "1", "--threads", "1"]
    found, err = run_("benchmarks.growth.__main__", "--work", tmp_path / "work", "--report", page, *words, *SMALL)
    few, every = found["axes"]["budget"]["rows"]
    assert (few["slots"], every["slots"], every["hit_rate"]) == (4, 16, 1.0)
    assert few["bytes_per_token"] > 0
    assert every["bytes_per_token"] == 0
    assert (few["error"], every["limited_by"]) == (None, "memory")
    assert [bend["at"] for bend in found["axes"]["budget"]["bends"]][-1] == 16
    assert [circles(picture) for picture in pictures(page.read_text())] == [2, 2, 2]
    assert "all but even" in err
    assert not [path for path in (tmp_path / "work").iterdir() if path.name.startswith(".growth")]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--values", "4"], "name it with --over"),
        (["--model", "models/stories-7m"], "own experts and layers"),
        (["--over", "budget", "--values", "1,4"], "a cache holds 2 to 16"),
        (["--over", "experts", "--values", "1"], "a token uses 2"),
        (["--over", "experts", "--hidden", "100"], "multiples of 64"),
        (["--over", "colour"], "invalid axes_asked value"),
    ],
)
def test_growth_refuses_before_it_measures(
    words: list[str], reason: str, tmp_path: Path, run_: Printed, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_("benchmarks.growth.__main__", "--work", tmp_path / "work", *SMALL, *words)
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "work").exists()
