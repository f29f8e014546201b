"""The microbenchmarks: what they compare, read and print. No time is asserted."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark_commands import Printed, benchmark_runner, command_of
from benchmarks import slot_reads
from benchmarks.controller import POLICIES
from benchmarks.kernels import shapes
from benchmarks.kernels.product import products
from benchmarks.kernels.weights import Turns, packed, random
from benchmarks.rounds import ratios, timed
from tests import tiny
from tiermoe import native
from tiermoe.decide.link import Finished
from tiermoe.errors import LoadError
from tiermoe.types import ExpertKey, Load


@pytest.fixture
def run_(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    return benchmark_runner(monkeypatch, capsys)


COMMANDS = ["benchmarks.growth.__main__", "benchmarks.kernels.__main__", "benchmarks.kernels.shapes",
            "benchmarks.controller", "benchmarks.slot_reads", "benchmarks.packing", "benchmarks.random_moe",
            "benchmarks.random_model", "benchmarks.first_run"]  # fmt: skip


@pytest.mark.parametrize("module", COMMANDS)
def test_every_command_says_how_it_is_called(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        command_of(module)()
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"python -m {module.removesuffix('.__main__')}" in out


def test_calls_alternate_after_one_that_does_not_count() -> None:
    order: list[str] = []
    found = timed({name: lambda name=name: order.append(name) for name in "ab"}, 2, lambda: order.append("-"))
    assert "".join(order) == "-a-b" + "-a-b" + "-b-a"
    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 2, "b": 2}
    assert ratios({"a": [1.0, 2.0, 4.0], "b": [3.0, 2.0, 2.0]}, "a") == {"b": {"median": 1.0, "low": 0.5, "high": 3.0}}


def test_what_is_compared_computes_the_same() -> None:
    encoding, fields = packed(128, 192)
    exact = encoding.decode(fields, 128, 192, torch.float32).double()
    ways = products(encoding, 128, 192)
    assert len(ways) >= 2
    for count in (1, 16):
        x = random(count, 192, 1)
        for name, way in ways.items():
            want = x.double() @ exact.t()
            assert (way(x, fields).double() - want).norm() <= 0.01 * want.norm(), name


def test_turns_come_round() -> None:
    turns = Turns([1, 2, 3])
    assert [*turns.take(2), *turns.take(2)] == [1, 2, 3, 1]


def positive(spread: dict[str, float]) -> bool:
    return 0 < spread["low"] <= spread["median"] <= spread["high"] < math.inf


def test_kernels_prints_every_part(run_: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiermoe.process.bandwidth.measure", lambda threads: {"bandwidth": 1e10})
    words = {"tokens": "1,6", "megabytes": 1, "gflop": 0.01, "out": 128, "hidden": 128, "inner": 64, "experts": 8,
             "top-k": 2, "heads": 4, "kv-heads": 2, "head-dim": 32, "past": 7, "threads": 1, "rounds": 2}  # fmt: skip
    found, err = run_("benchmarks.kernels.__main__", *(f"--{name}={value}" for name, value in words.items()))
    assert {"machine", "command", "date"} <= found.keys()
    assert [each["tokens"] for each in found["product"]["rows"]] == [1, 6]
    assert found["product"]["all_bytes"] >= 1 << 20
    measured = [*found["product"]["rows"], found["experts"], found["attention"], found["router"]]
    for part in measured:
        if "skipped" in part:
            assert not found["native"]
            continue
        ((mine, others),) = part["ratios"].items()
        assert {mine, *others} == set(part["ways"])
        assert all(positive(each) for way in part["ways"].values() for each in way.values())
        assert all(map(positive, others.values()))
    assert "product, M = 6" in err


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_shapes_prints_every_part(run_: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "plain": shapes.Shape(128, 64, 2, 4, 2, 32, 320),
        "clamped": shapes.Shape(128, 64, 2, 4, 2, 32, 320, clamped=True),
    }
    monkeypatch.setattr(shapes, "SHAPES", small)
    words = {"shapes": "plain,clamped", "threads": "1", "megabytes": 1, "rounds": 2}
    found, err = run_("benchmarks.kernels.shapes", *(f"--{name}={value}" for name, value in words.items()))
    for name in small:
        read, *rest = found[name]
        assert read["part"] == shapes.READ
        assert [row["part"] for row in rest] == ["experts", "query", "key", "attention's output", "output layer"]
        assert all(positive(row["gb_s"]) and positive(row["share"]) for row in rest)
    assert "clamped, output layer" in err


def test_controller_prints_every_policy(run_: Printed) -> None:
    found, _ = run_("benchmarks.controller", "--layers=3", "--experts=8", "--top-k=2", "--tokens=5", "--rounds=2")
    assert [(each["cache"], each["policy"]) for each in found["rows"]] == [
        (cache, policy) for cache in ("resident", "misses") for policy in POLICIES
    ]
    for each in found["rows"]:
        assert positive(each["us_a_layer"])
        assert (each["hit_rate"] == 1) == (each["cache"] == "resident")


class FakeLink:
    """Fills slots in the order asked; the experts of `damaged` fail."""

    def __init__(self, damaged: tuple[ExpertKey, ...] = ()) -> None:
        self.loads: list[Load] = []
        self.under_way: list[Load] = []
        self.most = 0
        self._damaged = damaged

    def submit(self, load: Load) -> None:
        assert load.slot not in [other.slot for other in self.under_way]
        self.loads.append(load)
        self.under_way.append(load)
        self.most = max(self.most, len(self.under_way))

    def wait(self) -> Finished:
        load = self.under_way.pop(0)
        return Finished(load, LoadError("damaged") if load.key in self._damaged else None)


@pytest.mark.parametrize(("slots", "count"), [(1, 5), (3, 7), (8, 3)])
def test_every_expert_is_read_once_and_never_two_into_a_slot(slots: int, count: int) -> None:
    link: Any = FakeLink()
    keys = [ExpertKey(0, expert, 4) for expert in range(count)]
    slot_reads.through(link, slots, keys)
    assert [load.key for load in link.loads] == keys
    assert (link.most, link.under_way) == (min(slots, count), [])
    with pytest.raises(LoadError):
        slot_reads.through(FakeLink((keys[-1],)), slots, keys)  # type: ignore[arg-type]


def test_sequential_reading_reads_as_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(bytes(10_000))
    real, read = os.preadv, list[int]()
    monkeypatch.setattr(os, "preadv", lambda *arguments: read.append(real(*arguments)) or read[-1])
    slot_reads.sequential(files, 25_000, direct=False)
    assert read == [10_000, 10_000, 10_000]


def test_slot_reads_prints_every_way(tmp_path: Path, run_: Printed) -> None:
    model = tiny.write(tmp_path / "model", "qwen3_moe", torch.bfloat16)
    words = ["--lanes", "1,2", "--megabytes", "1", "--rounds", "1", "--quantizer", "linear", "--store", tmp_path / "s"]
    found, err = run_("benchmarks.slot_reads", model, *words)
    assert found["bytes"] == found["experts"] * found["expert_bytes"]
    ways = ["buffered, 1 lane", "buffered, 2 lanes"]
    assert set(ways) <= set(found["gb_s"])
    assert "sequential, buffered" in found["gb_s"]
    assert all(map(positive, [*found["gb_s"].values(), *found["latency_us"].values()]))
    assert set(found["ratios"][ways[0]]) == {"sequential, buffered"}
    assert "latency of one expert, buffered" in err
