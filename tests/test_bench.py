"""`tiermoe bench`: runs kept and repeated, medians and ratios by hand, processes that fail, bounds, peers."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiermoe
from tiermoe.bench import child, child_tiermoe, session
from tiermoe.bench.bounds import Ideal, ideal, read_routing, with_bounds
from tiermoe.bench.cases import Condition
from tiermoe.bench.child import Bounds, CaseFailed, last_object, run_child
from tiermoe.bench.engines import Accelerate, Common, Transformers, not_installed
from tiermoe.bench.feeding import Feeding
from tiermoe.bench.kernel_clock import KernelClock
from tiermoe.bench.limit import CannotLimit
from tiermoe.bench.llama_peer import LlamaCpp, quantisation
from tiermoe.bench.machine import describe
from tiermoe.bench.measure import Journal, Measured, measure, plan
from tiermoe.bench.summary import summarise
from tiermoe.config import CacheSize
from tiermoe.errors import ConfigError, TraceError
from tiermoe.model.blueprint import Blueprint
from tiermoe.simulate import compare_evictions
from tiermoe.trace.schema import Pass, Trace
from tiny import write

CONDITION = Condition(700 << 20, 16, 32)


class Fake:
    """An engine with given speeds, one a run; an Exception among them is raised."""

    def __init__(self, name: str, speeds: list[Any], preset: str | None = None) -> None:
        self.name, self.preset = name, preset
        self.speeds = iter(speeds)
        self.asked: list[Condition] = []

    def missing(self) -> str | None:
        return None

    def takes(self, condition: Condition) -> bool:
        return True

    def prepare(self, progress: Any) -> None:
        pass

    def run(self, condition: Condition, ids: Path) -> dict[str, Any]:
        self.asked.append(condition)
        speed = next(self.speeds)
        if isinstance(speed, Exception):
            raise speed
        return {"decode_tok_s": speed, "prefill_tok_s": 10 * speed, "first_token_s": 1.0, "limited": True}


def measured(engines: list[Any], rounds: int, journal: Journal | None = None) -> list[Measured]:
    rows: list[Measured] = []
    journal = journal or Journal(None, {})
    for _ in measure(plan(engines, [CONDITION]), rounds, lambda _: Path("ids"), journal, rows):
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
    found = run_child(program("print('loading'); print('{\"decode_tok_s\": 3}')"), Bounds(None, 60))
    assert found == {"decode_tok_s": 3, "limited": False, "limit_missing": None, "cgroup_peak_bytes": None}
    with pytest.raises(CaseFailed, match="printed no figures but 'hello'"):
        last_object("hello\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import sys; print('note', file=sys.stderr); sys.exit('tiermoe: too little')", "^too little$"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
        ("import sys; sys.exit(3)", "status 3"),
        ("import time; time.sleep(60)", "timed out: not done after 1 s"),
    ],
)
def test_how_a_process_ends_is_said(text: str, reason: str) -> None:
    with pytest.raises(CaseFailed, match=reason):
        run_child(program(text), Bounds(None, 1 if "sleep" in text else 60))


def test_a_killed_process_is_a_result() -> None:
    if (reason := describe()["no_limit"]) is not None:
        pytest.skip(reason)
    with pytest.raises(CaseFailed, match=r"^killed: needs more than 60 MiB$") as failed:
        run_child(program("bytearray(200 << 20)"), Bounds(60 << 20, 60))
    assert failed.value.killed
    kept = run_child(program("print('{}')"), Bounds(60 << 20, 60))
    assert kept["limited"]
    assert kept["cgroup_peak_bytes"] is None or 0 < kept["cgroup_peak_bytes"] <= 60 << 20


def test_where_no_cgroup_can_be_made_the_result_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise CannotLimit("no right to make one")

    monkeypatch.setattr(child, "memory_group", refuse)
    found = run_child(program("print('{}')"), Bounds(60 << 20, 60))
    assert (found["limited"], found["limit_missing"]) == (False, "no right to make one")


@pytest.fixture
def common(shipped: Path, tmp_path: Path) -> Common:
    return Common(shipped, 1, 60, tmp_path)


def test_accelerate_that_is_killed_runs_free_and_says_so(common: Common, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int | None] = []

    def run(self: Accelerate, condition: Condition, ids: Path, memory: int | None, more: Any) -> dict[str, Any]:
        limits.append(memory)
        if memory is not None:
            raise CaseFailed("killed", killed=True)
        return {"decode_tok_s": 1.0}

    monkeypatch.setattr(Accelerate, "_child", run)
    engine = Accelerate(common)
    for _ in range(2):
        assert "killed within 700 MiB" in engine.run(CONDITION, Path("ids"))["note"]
    assert limits == [700 << 20, None, None]
    assert not engine.takes(Condition(None, 16, 32))


def test_a_peer_that_is_not_there_says_how_to_get_it(common: Common, tmp_path: Path) -> None:
    assert not_installed("torch") is None
    assert not_installed("surely_not_there") == "surely_not_there is not installed; pip install surely_not_there"
    gone = LlamaCpp(common, None, tmp_path, "no-such-python").missing()
    assert gone is not None
    assert "no-such-python is no interpreter" in gone
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'llama_cpp'\" >&2\nexit 1\n")
    bare.chmod(0o755)
    lacking = LlamaCpp(common, None, tmp_path, str(bare)).missing()
    assert lacking is not None
    assert "No module named 'llama_cpp'" in lacking
    assert "--peer-python" in lacking


def test_narrow_models_get_blocks_that_divide_them(shipped: Path, tmp_path: Path) -> None:
    assert quantisation(shipped) == "q4_0"
    (tmp_path / "config.json").write_text('{"hidden_size": 2048, "moe_intermediate_size": 768}')
    assert quantisation(tmp_path) == "q4_k_m"
    (tmp_path / "config.json").write_text('{"hidden_size": 2048, "moe_intermediate_size": 1408}')
    assert quantisation(tmp_path) == "q4_k_m"  # the down projections alone get another type
    (tmp_path / "config.json").write_text('{"hidden_size": 2880, "quantization_config": {"quant_method": "mxfp4"}}')
    assert quantisation(tmp_path) == "mxfp4"


def test_on_a_gguf_file_llama_cpp_runs_the_very_file_and_transformers_nothing(common: Common, tmp_path: Path) -> None:
    file = tmp_path / "model-Q4_K_M.gguf"
    on_file = dataclasses.replace(common, directory=file)
    assert LlamaCpp(on_file, None, tmp_path / "kept", sys.executable).gguf == file
    assert LlamaCpp(on_file, tmp_path / "other.gguf", tmp_path / "kept", sys.executable).gguf.name == "other.gguf"
    assert "not on a GGUF file" in str(Transformers(on_file).missing())
    assert "not on a GGUF file" in str(Accelerate(on_file).missing())


def test_a_gguf_is_made_once_and_whole(shipped: Path, common: Common, tmp_path: Path) -> None:
    python = tmp_path / "python"
    lines = [
        f"#!{sys.executable}", "import json, sys", "job = json.loads(sys.argv[2])",
        "open(job['out'], 'a').write(job['type'])", "print('{}')",
    ]  # fmt: skip
    python.write_text("\n".join(lines))
    python.chmod(0o755)
    peer, said = LlamaCpp(common, None, tmp_path / "kept", str(python)), []
    for _ in range(2):
        peer.prepare(lambda *words: said.append(words))
    assert peer.gguf.read_text() == "q4_0"
    assert [done for _, done, _ in said] == [0, 1]
    assert str(peer.gguf) in said[0][0]
    failing = LlamaCpp(common, None, tmp_path / "other", "false")
    with pytest.raises(ConfigError, match="give one with --gguf"):
        failing.prepare(lambda *_: None)
    assert os.listdir(tmp_path / "other") == []


def test_the_peers_script_needs_no_tiermoe() -> None:
    script = Path(child.__file__).parent / "llama" / "run_in_peer.py"
    with pytest.raises(CaseFailed, match=r"^No module named 'llama_cpp'$"):
        run_child([sys.executable, "-I", "-S", str(script), '{"task": "run"}'], Bounds(None, 60))


@pytest.fixture(scope="module")
def recorded(shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Routing of two rows of 6 + 4 tokens, the model and their ids."""
    model, _ = tiermoe.load(shipped, bits=4, dense_bits=8, cache="25%", device="cpu", threads=1, batch=2)
    ids = torch.arange(40, 60).view(2, 10)
    path = tmp_path_factory.mktemp("routing") / "routing.jsonl"
    with torch.inference_mode():
        child_tiermoe._record(model.tiermoe, ids, 6, path)
    return path, model, ids


def test_routing_is_read_as_it_ran(recorded: tuple[Path, Any, Any], shipped: Path, tmp_path: Path) -> None:
    routing = read_routing(recorded[0], 4)
    assert routing is not None
    config = json.loads((shipped / "config.json").read_text())
    assert [len(passed.layers) for passed in routing.prompt] == [config["num_hidden_layers"]]
    assert [passed.size for passed in [*routing.prompt, *routing.decode]] == [12, 2, 2, 2, 2]
    assert {len(row) for passed in routing.decode for layer in passed.layers for row in layer.experts} == {
        config["num_experts_per_tok"]
    }
    assert read_routing(recorded[0].parent / "none", 4) is None
    with pytest.raises(TraceError, match="4 of 5 tokens"):
        read_routing(recorded[0], 5)
    lines = recorded[0].read_text().splitlines()
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


@pytest.mark.parametrize("slots", [20, 64, 128])
def test_the_bound_has_the_simulators_belady(recorded: tuple[Path, Any, Any], slots: int) -> None:
    routing = read_routing(recorded[0], 4)
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


def test_the_clock_counts_kernels_and_changes_nothing(recorded: tuple[Path, Any, Any]) -> None:
    _, model, ids = recorded

    def logits() -> torch.Tensor:
        return model(input_ids=ids).logits

    with torch.inference_mode():
        before = logits()
        with KernelClock(model.tiermoe) as clock:
            within = logits()
            Feeding(model, ids[:1], 6).decode(7)
        experts, dense = clock.experts_s, clock.dense_s
        after = logits()
    assert experts > 0
    assert dense > 0
    assert (clock.experts_s, clock.dense_s) == (experts, dense)
    assert torch.equal(before, within)
    assert torch.equal(before, after)


def test_the_clock_counts_the_kernels_of_the_neuron_unit(tmp_path: Path) -> None:
    directory = write(tmp_path, "qwen3_moe", torch.bfloat16)
    changes = {"unit": "neuron", "theta": 0.02}
    model, _ = tiermoe.load(directory, memory="4GiB", device="cpu", cache="60%", preset="lru", set=changes)
    ids = torch.arange(40, 50)[None]
    with torch.inference_mode():
        before = model(ids[:, :1]).logits
        with KernelClock(model.tiermoe) as clock:
            model(ids)
            prompt = clock.experts_s
            within = model(ids[:, :1]).logits
        counted = clock.experts_s
        after = model(ids[:, :1]).logits
    model.tiermoe.close()
    assert 0 < prompt < counted == clock.experts_s
    assert torch.equal(before, within)
    assert torch.equal(before, after)


def test_feeding_in_chunks_gives_the_whole_text(recorded: tuple[Path, Any, Any]) -> None:
    _, model, ids = recorded
    lengths: list[tuple[int, int]] = []

    class Watched:
        def __call__(self, **named: Any) -> Any:
            past = named["past_key_values"]
            lengths.append((past.get_seq_length() if past is not None else 0, named["input_ids"].shape[1]))
            return model(**named)

    with torch.inference_mode():
        feeding = Feeding(Watched(), ids, 6, chunk=4)
        feeding.prompt()
        feeding.decode(9)
    assert lengths == [(0, 4), (4, 2), (6, 1), (7, 1), (8, 1)]


@pytest.mark.parametrize("length", [10, 6])
def test_one_run_of_ours(shipped: Path, tmp_path: Path, length: int) -> None:
    np.save(tmp_path / "ids.npy", np.arange(40, 60).reshape(2, 10)[:, :length])
    options = {"preset": "lru", "bits": 4, "dense_bits": 8, "cache": "25%", "device": "cpu", "threads": 1, "batch": 2}
    job = {"model": str(shipped), "options": options, "ids": str(tmp_path / "ids.npy"), "prompt": 6, "warm": 6,
           "routing": str(tmp_path / "routing")}  # fmt: skip
    found = child_tiermoe.measure(job)
    assert (found["slots"], found["batch"], found["lossy"]) == (64, 2, [])
    assert found["prefill_tok_s"] > 0
    assert (found["decode_tok_s"] is None) == (length == 6)
    assert 0 <= found["hit_rate"] < 1
    assert found["kernel_s"] > 0
    assert found["token_s"] >= found["wait_s"] >= 0
    routing = read_routing(tmp_path / "routing", length - 6)
    assert routing is not None
    assert len(routing.decode) == length - 6
    assert (ideal(routing, 64, True, False) is None) == (length == 6)


def test_a_run_of_ours_needs_no_transformers_model(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"bits": 4, "dense_bits": 8, "device": "cpu", "warm": False}
    child_tiermoe._started(str(shipped), options).close()  # packs what is not there
    monkeypatch.setattr(Blueprint, "model_class", property(lambda _: pytest.fail("modelling code is imported")))
    child_tiermoe._started(str(shipped), options).close()


def test_a_report_is_checked_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--report"), session.writable(tmp_path / "none" / "r.html", "--report"):
        raise AssertionError("the work began")
    with session.writable(tmp_path / "r.html", "--report"):
        pass
    assert os.listdir(tmp_path) == []
