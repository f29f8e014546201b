"""The bench: its cases, its engines, its figures, its command."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiermoe
from commands import Command
from patience import PATIENCE_S
from tiermoe.config import CacheSize
from tiermoe.errors import ConfigError, PromptError, TraceError
from tiermoe.lab.bench import child, run_peer, run_tiermoe, session
from tiermoe.lab.bench.cases import (
    Case,
    Condition,
    Measured,
    check_lengths,
    conditions,
    random_ids,
    rows,
)
from tiermoe.lab.bench.child import Bounds, CannotLimit, CaseFailed, Hierarchy, find_hierarchy, last_object, run_child
from tiermoe.lab.bench.engines import (
    Accelerate,
    BenchEngine,
    Common,
    Ideal,
    LlamaCpp,
    Transformers,
    ideal,
    not_installed,
    read_routing,
    with_bounds,
)
from tiermoe.lab.bench.report import html_report, missing_plots
from tiermoe.lab.bench.session import Journal, Step, measure, writable
from tiermoe.lab.bench.summary import describe_machine, number, summarise
from tiermoe.lab.simulate import compare_evictions
from tiermoe.lab.trace import Pass, Trace
from tiermoe.model.hf.blueprint import Blueprint

MIB = 1 << 20


def test_prompts_alone_run_in_a_batch_of_one() -> None:
    found = conditions([MIB, None], [(16, 32)], [512], [1, 4], ["warm", "cold"])
    assert len(found) == len(set(found)) == 2 * 2 * 3
    assert {condition.batch for condition in found if not condition.output} == {1}
    assert [condition.label for condition in found[:4]] == [
        "1 MiB, 16+32, warm", "1 MiB, 16+32, batch 4, warm", "1 MiB, prompt 512, warm", "1 MiB, 16+32, cold",
    ]  # fmt: skip


def test_rows_are_different_stretches_at_equal_distances() -> None:
    found = rows(range(100), Condition(None, 3, 2, batch=4))
    assert found == [[0, 1, 2, 3, 4], [25, 26, 27, 28, 29], [50, 51, 52, 53, 54], [75, 76, 77, 78, 79]]


def test_random_tokens_are_of_the_whole_vocabulary_and_always_the_same() -> None:
    found = random_ids(1000)
    assert (min(found), max(found)) == (0, 999)
    assert found == random_ids(1000)
    check_lengths([Condition(None, 4096, 128, batch=16)], len(found), None)


def test_lengths_beyond_text_or_context_are_refused() -> None:
    check_lengths([Condition(None, 16, 16), Condition(None, 32, 0)], 32, 32)
    with pytest.raises(PromptError, match="16\\+17 is 33 tokens, the model's context has 32"):
        check_lengths([Condition(None, 16, 17)], 1000, 32)
    with pytest.raises(PromptError, match="takes 64 tokens of text, this one has 63"):
        check_lengths([Condition(None, 8, 8, batch=4)], 63, None)


@pytest.mark.parametrize(
    ("condition", "warm", "dropped"),
    [
        (Condition(None, 16, 32), 48, False),
        (Condition(None, 16, 32, start="cold"), 0, True),
        (Condition(MIB, 16, 32), 16, True),
        (Condition(MIB, 16, 32, start="cold"), 0, True),
    ],
)
def test_what_runs_before_the_clock_and_what_the_page_cache_may_hold(
    condition: Condition, warm: int, dropped: bool
) -> None:
    assert condition.warm_tokens == warm
    assert bool(condition.files_to_drop((Path("x"),))) is dropped


CONDITION = Condition(700 << 20, 16, 32)


V1 = "36 31 0:33 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


V1_IN_CONTAINER = "36 31 0:33 /docker/7f /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


OTHER = "31 23 0:28 / /proc rw - proc proc rw\n"


class Fake(BenchEngine):
    """An engine with given speeds, one a run; an Exception among them is raised."""

    def __init__(self, name: str, speeds: list[Any], preset: str | None = None) -> None:
        self.name, self.preset = name, preset
        self.speeds = iter(speeds)
        self.asked: list[Condition] = []

    def run(self, condition: Condition, ids: Path) -> dict[str, Any]:
        self.asked.append(condition)
        speed = next(self.speeds)
        if isinstance(speed, Exception):
            raise speed
        return {"decode_tok_s": speed, "prefill_tok_s": 10 * speed, "first_token_s": 1.0, "limited": True}


def measured(engines: list[Any], rounds: int, journal: Journal | None = None) -> list[Measured]:
    rows: list[Measured] = []
    journal = journal or Journal(None, {})
    for _ in measure(engines, [CONDITION], rounds, lambda _: Path("ids"), journal, rows):
        pass
    return rows


def test_medians_spread_and_ratios_within_a_round() -> None:
    ours, peer = Fake("tiermoe", [6.0, 8.0, 5.0], "default"), Fake("llama.cpp", [2.0, 4.0, 1.0])
    first, second = summarise(measured([ours, peer], 3))
    assert first["decode_tok_s"] == {"median": 6.0, "low": 5.0, "high": 8.0, "all": [6.0, 8.0, 5.0]}
    assert first["ratios"]["llama.cpp"]["decode"] == {"median": 3.0, "low": 2.0, "high": 5.0}
    assert first["ratios"]["llama.cpp"]["prefill"]["median"] == 3.0
    assert second["ratios"] == {}
    assert (first["memory_bytes"], first["limited"], first["rounds"], first["error"]) == (700 << 20, True, 3, None)


def test_a_case_that_fails_is_a_result_and_stays_alone() -> None:
    ours, peer = Fake("tiermoe", [6.0, 8.0], "default"), Fake("llama.cpp", [CaseFailed("killed: needs more")])
    first, second = summarise(measured([ours, peer], 2))
    assert (second["error"], second["decode_tok_s"], len(peer.asked)) == ("killed: needs more", None, 1)
    assert (first["error"], first["ratios"], len(ours.asked)) == (None, {}, 2)


def test_a_journal_is_gone_on_from(tmp_path: Path) -> None:
    file, key = tmp_path / "runs.jsonl", {"threads": 2}
    measured([Fake("tiermoe", [6.0, 8.0])], 2, Journal(file, key))
    with file.open("a") as lines:
        lines.write('{"case": {"eng')  # interrupted while it was written
    again = Fake("tiermoe", [5.0])
    (row,) = measured([again], 3, Journal(file, key))
    assert [row.rounds[number]["decode_tok_s"] for number in range(3)] == [6.0, 8.0, 5.0]
    assert len(again.asked) == 1
    assert [json.loads(line)["round"] for line in file.read_text().splitlines()[1:]] == [0, 1, 2]
    with pytest.raises(ConfigError, match="another threads"):
        Journal(file, {"threads": 1})
    other = tmp_path / "other"
    other.write_text("hello\n")
    with pytest.raises(ConfigError, match="no file of tiermoe bench"):
        Journal(other, key)
    with pytest.raises(ConfigError, match="--out"):
        Journal(tmp_path / "none" / "runs.jsonl", key)


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_the_last_line_is_the_result() -> None:
    found = run_child(program("print('loading'); print('{\"decode_tok_s\": 3}')"), Bounds(None, PATIENCE_S))
    assert found == {"decode_tok_s": 3, "limited": False, "limit_missing": None, "cgroup_peak_bytes": None}
    with pytest.raises(CaseFailed, match="printed no figures but 'hello'"):
        last_object("hello\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import sys; print('note', file=sys.stderr); sys.exit('tiermoe: too little')", "^too little$"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
        ("import sys; sys.exit(3)", "status 3"),
        ("import time; time.sleep(3600)", "timed out: not done after 1 s"),
    ],
)
def test_how_a_process_ends_is_said(text: str, reason: str) -> None:
    with pytest.raises(CaseFailed, match=reason):
        run_child(program(text), Bounds(None, 1 if "sleep" in text else PATIENCE_S))


@pytest.mark.parametrize(
    ("mounts", "membership", "expected"),
    [
        (OTHER + V1, "4:memory:/a/b\n0::/\n", Hierarchy(1, Path("/sys/fs/cgroup/memory/a/b"))),
        (V1_IN_CONTAINER, "4:memory:/docker/7f\n", Hierarchy(1, Path("/sys/fs/cgroup/memory"))),
        (V1 + V2, "4:memory:/a\n0::/b\n", Hierarchy(1, Path("/sys/fs/cgroup/memory/a"))),
        (V2, "0::/user.slice/run.scope\n", Hierarchy(2, Path("/sys/fs/cgroup/user.slice"))),
        (V2, "0::/\n", Hierarchy(2, Path("/sys/fs/cgroup"))),
    ],
)
def test_where_a_memory_group_goes(mounts: str, membership: str, expected: Hierarchy) -> None:
    assert find_hierarchy(mounts, membership) == expected


def test_no_memory_controller_is_said() -> None:
    with pytest.raises(CannotLimit, match="no cgroup file system"):
        find_hierarchy(OTHER, "3:cpuset:/\n")


def test_a_killed_process_is_a_result() -> None:
    if (reason := describe_machine()["no_limit"]) is not None:
        pytest.skip(reason)
    with pytest.raises(CaseFailed, match=r"^killed: needs more than 60 MiB$") as failed:
        run_child(program("bytearray(200 << 20)"), Bounds(60 << 20, PATIENCE_S))
    assert failed.value.killed
    kept = run_child(program("print('{}')"), Bounds(60 << 20, PATIENCE_S))
    assert kept["limited"]
    assert kept["cgroup_peak_bytes"] is None or 0 < kept["cgroup_peak_bytes"] <= 60 << 20
    with child.memory_group(60 << 20) as (_, group):
        assert group.is_dir()
    assert not group.exists()


def test_where_no_cgroup_can_be_made_the_result_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise CannotLimit("no right to make one")

    monkeypatch.setattr(child, "memory_group", refuse)
    found = run_child(program("print('{}')"), Bounds(60 << 20, PATIENCE_S))
    assert (found["limited"], found["limit_missing"]) == (False, "no right to make one")


@pytest.fixture
def common(shipped: Path, tmp_path: Path) -> Common:
    return Common(shipped, 1, 60, tmp_path)


def test_accelerate_that_is_killed_runs_free_and_says_so(common: Common, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int | None] = []

    def run(command: list[str], bounds: Bounds) -> dict[str, Any]:
        limits.append(bounds.memory)
        if bounds.memory is not None:
            raise CaseFailed("killed", killed=True)
        return {"decode_tok_s": 1.0}

    monkeypatch.setattr("tiermoe.lab.bench.engines.run_child", run)
    engine = Accelerate(common)
    for _ in range(2):
        assert "killed within 700 MiB" in engine.run(CONDITION, Path("ids"))["note"]
    assert limits == [700 << 20, None, None]
    assert not engine.takes(Condition(None, 16, 32))


def test_a_peer_that_is_not_there_says_how_to_get_it(common: Common, tmp_path: Path) -> None:
    assert not_installed("torch") is None
    assert not_installed("surely_not_there") == "surely_not_there is not installed; pip install surely_not_there"
    gone = LlamaCpp(common, tmp_path, "no-such-python").missing()
    assert gone is not None
    assert "no-such-python is no interpreter" in gone
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'llama_cpp'\" >&2\nexit 1\n")
    bare.chmod(0o755)
    lacking = LlamaCpp(common, tmp_path, str(bare)).missing()
    assert lacking is not None
    assert "No module named 'llama_cpp'" in lacking
    assert "--peer-python" in lacking


def test_on_a_gguf_file_llama_cpp_runs_the_very_file_and_transformers_nothing(common: Common, tmp_path: Path) -> None:
    file = tmp_path / "model-Q4_K_M.gguf"
    on_file = dataclasses.replace(common, directory=file)
    assert LlamaCpp(on_file, None, sys.executable).gguf == file
    assert LlamaCpp(on_file, tmp_path / "other.gguf", sys.executable).gguf == tmp_path / "other.gguf"
    assert "not on a GGUF file" in str(Transformers(on_file).missing())
    assert "not on a GGUF file" in str(Accelerate(on_file).missing())


def test_the_peers_script_needs_no_tiermoe() -> None:
    command = [sys.executable, "-I", "-S", run_peer.__file__, '{"task": "llama.cpp"}']
    with pytest.raises(CaseFailed, match=r"^No module named 'llama_cpp'$"):
        run_child(command, Bounds(None, PATIENCE_S))


@pytest.mark.parametrize(("warm", "fed"), [(0, []), (6, ["0-6"]), (8, ["0-6", "6-7", "7-8"])])
def test_a_peer_is_fed_alike(warm: int, fed: list[str]) -> None:
    """Two rows of 6 + 2 tokens: what is warm runs first and is forgotten."""
    order: list[str] = []
    job = {"shape": (2, 8), "prompt": 6, "warm": warm}
    found = run_peer.timed_run(lambda begin, end: order.append(f"{begin}-{end}"), lambda: order.append("clear"), job)
    assert order == [*fed, *(["clear"] if warm else []), "0-6", "6-7", "7-8"]
    assert found["prefill_tok_s"] > 0
    assert found["decode_tok_s"] > 0
    alone = run_peer.timed_run(lambda begin, end: None, lambda: None, {"shape": (1, 6), "prompt": 6, "warm": 0})
    assert alone["decode_tok_s"] is None


@pytest.fixture(scope="module")
def recorded(shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Routing of two rows of 6 + 4 tokens."""
    model, _ = tiermoe.load(shipped, bits=4, dense_bits=8, cache="25%", device="cpu", threads=1, batch=2)
    ids = torch.arange(40, 60).view(2, 10)
    path = tmp_path_factory.mktemp("routing") / "routing.jsonl"
    with torch.inference_mode():
        run_tiermoe.write_routing(model.tiermoe, ids, 6, path)
    model.tiermoe.close()
    return path


def test_routing_is_read_as_it_ran(recorded: Path, shipped: Path, tmp_path: Path) -> None:
    routing = read_routing(recorded, 4)
    assert routing is not None
    config = json.loads((shipped / "config.json").read_text())
    assert [len(passed.layers) for passed in routing.prompt] == [config["num_hidden_layers"]]
    assert [passed.size for passed in [*routing.prompt, *routing.decode]] == [12, 2, 2, 2, 2]
    assert {len(row) for passed in routing.decode for layer in passed.layers for row in layer.experts} == {
        config["num_experts_per_tok"]
    }
    assert read_routing(recorded.parent / "none", 4) is None
    with pytest.raises(TraceError, match="4 of 5 tokens"):
        read_routing(recorded, 5)
    lines = recorded.read_text().splitlines()
    part = tmp_path / "part"
    part.write_text("\n".join(line for line in lines if not line.startswith("[3,")))
    with pytest.raises(TraceError, match="some layers"):
        read_routing(part, 4)


def test_routing_of_one_layer_is_a_pass_a_line(tmp_path: Path) -> None:
    path = tmp_path / "routing"
    header = {"experts": [4], "top_k": [2], "bits": 4, "expert_bytes": [10]}
    events = [[0, "prefill", [[0, 1], [1, 2]]], [0, "decode", [[2, 3]]], [0, "decode", [[0, 3]]]]
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *events]))
    routing = read_routing(path, 2)
    assert routing is not None
    best = ideal(routing, 3, warm_prompt=False, warm_output=False)
    assert best == Ideal(hit_rate=0.75, missed_bytes=5.0, experts=2.0)  # only 3 was not there, for 1 goes and 0 stays


def test_the_bound_has_the_simulators_belady(recorded: Path) -> None:
    slots = 64
    routing = read_routing(recorded, 4)
    assert routing is not None
    best = ideal(routing, slots, warm_prompt=False, warm_output=False)
    passes = [Pass(one.phase, 0, [], one.layers) for one in [*routing.prompt, *routing.decode]]
    trace = Trace(routing.header, passes)
    (row,) = compare_evictions(trace, ["belady"], [CacheSize(fraction=slots / sum(routing.header.experts))])
    assert best is not None
    assert best.hit_rate == row.hit_rate
    uses = [{(index, e) for index, layer in enumerate(one.layers) for row in layer.experts for e in row}
            for one in routing.decode]  # fmt: skip
    assert best.experts == sum(map(len, uses)) / 4
    one = routing.header.expert_bytes[4][0]
    assert best.missed_bytes == pytest.approx((1 - best.hit_rate) * best.experts * one)
    warm = ideal(routing, sum(routing.header.experts), warm_prompt=True, warm_output=True)
    assert warm is not None
    assert (warm.hit_rate, warm.missed_bytes) == (1.0, 0.0)


def test_bounds_by_hand() -> None:
    run = {"decode_tok_s": 20.0, "dense_bytes": 60e6, "slot_bytes": 4e6, "bytes_per_token": 80e6, "batch": 1,
           "link_bandwidth": 1e9}  # fmt: skip
    found = with_bounds(run, Ideal(0.9, 16e6, 10.0), 4e9)
    assert found["bound_tok_s"] == pytest.approx(40.0)  # 100 MB of weights at 4 GB/s; 16 MB of misses take less
    assert found["own_bound_tok_s"] == pytest.approx(12.5)  # 80 MB at 1 GB/s
    assert found["fraction_of_bound"] == pytest.approx(0.5)
    assert found["fraction_of_own_bound"] == pytest.approx(1.6)
    assert found["belady_hit_rate"] == 0.9
    assert with_bounds({**run, "decode_tok_s": None}, Ideal(0.9, 16e6, 10.0), 4e9)["bound_tok_s"] is None
    assert with_bounds(run, None, 4e9)["fraction_of_bound"] is None


@pytest.mark.parametrize(("length", "unit"), [(10, "expert"), (6, "expert"), (10, "neuron")])
def test_one_run_of_ours(shipped: Path, tmp_path: Path, length: int, unit: str) -> None:
    np.save(tmp_path / "ids.npy", np.arange(40, 60).reshape(2, 10)[:, :length])
    options = {"preset": "lru", "bits": 4, "dense_bits": 8, "cache": "25%", "device": "cpu", "threads": 1, "batch": 2}
    options |= {"set": {"unit": "neuron", "theta": 0.02}} if unit == "neuron" else {}
    job = {"model": str(shipped), "options": options, "ids": str(tmp_path / "ids.npy"), "prompt": 6, "warm": 6,
           "routing": str(tmp_path / "routing")}  # fmt: skip
    found = run_tiermoe.measure(job)
    assert (found["slots"], found["batch"], bool(found["lossy"])) == (64, 2, unit == "neuron")
    assert found["prefill_tok_s"] > 0
    assert (found["decode_tok_s"] is None) == (length == 6)
    assert 0 <= found["hit_rate"] < 1
    assert found["kernel_s"] > 0
    assert found["token_s"] >= found["wait_s"] >= 0
    routing = read_routing(tmp_path / "routing", length - 6)
    assert (routing is None) == (unit == "neuron")  # no one cache of equal experts serves it exactly
    if routing is None:
        return
    assert len(routing.decode) == length - 6
    assert (ideal(routing, 64, True, False) is None) == (length == 6)


def test_a_run_of_ours_needs_no_transformers_model(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"bits": 4, "dense_bits": 8, "device": "cpu", "warm": False}
    run_tiermoe.start_engine(str(shipped), options).close()  # packs what is not there
    monkeypatch.setattr(Blueprint, "model_class", property(lambda _: pytest.fail("modelling code is imported")))
    run_tiermoe.start_engine(str(shipped), options).close()


def test_a_report_is_checked_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--report"), writable(tmp_path / "none" / "r.html", "--report"):
        raise AssertionError("the work began")
    with writable(tmp_path / "r.html", "--report"):
        pass
    assert os.listdir(tmp_path) == []


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
    failed = document(case("tiermoe", 1, None, preset="default", error="too little"))
    assert "too little" in " ".join(parts_of(html_report(failed)).itertext())
    report = html_report(whole)
    body = parts_of(report)
    text = " ".join(body.itertext())
    for words in ("tiermoe (default)", "llama.cpp", "20.0 (18.0–22.0)", "80.0 (72.0–88.0)", "m<1>", "A & B",
                  "killed: needs more than 700 MiB", "skipped: not installed", "resident"):  # fmt: skip
        assert words in text, words
    assert len(list(body.iter(f"{SVG}svg"))) == (2 if missing_plots() is None else 0)
    assert not re.search(r"<script|<link|src=|url\((?!#)", report)


def test_without_matplotlib_a_report_has_tables_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    body = parts_of(html_report(document(case("llama.cpp", None, 80.0))))
    text = " ".join(body.itertext())
    assert "pip install 'tiermoe[plots]'" in text
    assert "80.0 (72.0–88.0)" in text
    assert not list(body.iter(f"{SVG}svg"))


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
    assert "skipped: llama.cpp: it reads GGUF files and this model is none: name one with --gguf" in done.err
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
    def measure(engines: Any, conditions: Any, rounds: int, ids: Any, journal: Any, rows: list[Any]) -> Any:
        one = Case(engines[0].name, engines[0].preset, conditions[0])
        row = Measured(one, {0: {"decode_tok_s": 12.5, "prefill_tok_s": 40.0, "limited": False}})
        rows.append(row)
        yield Step(one, 0, 1, 3, row.rounds[0])
        if ended:
            os.kill(os.getpid(), signal.SIGTERM)
        raise KeyboardInterrupt  # a program in the background ignores SIGINT

    monkeypatch.setattr(session, "measure", measure)
    monkeypatch.setattr(session, "memory_bandwidth", lambda *_: 1e10)
    done = tiermoe_("bench", shipped, "--peers", "none")
    assert done.code == 130
    assert "12.5 (12.5–12.5)" in done.out
    assert "interrupted" in done.err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--peers", "lama.cpp"], "did you mean llama.cpp"),
        (["--peers", "vllm"], "there are llama.cpp, transformers, accelerate"),
        (["--start", "warn"], "did you mean warm"),
        (["--batch", "4,0"], "batch '0' is not a whole number"),
        (["--batch", ","], "--batch names nothing"),
        (["--groups", "0x4"], "group '0x4' is not"),
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
    monkeypatch.setattr(session, "memory_bandwidth", lambda *_: 1e10)
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
