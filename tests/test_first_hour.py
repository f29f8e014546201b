"""The first hour on a GPU, on a CPU and on a pretended GPU, in tiny shapes. No time is asserted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark_commands import Printed, benchmark_runner
from benchmarks import gpu, gpu_models, random_gguf
from benchmarks.gpu_models import MODELS, Model, presets_on
from benchmarks.gpu_run import Row, Run
from benchmarks.gpu_steps import STEPS
from benchmarks.llama_bench import RESERVE, experts_on_cpu, run_llama_bench
from benchmarks.random_model import SMALL, config_of
from fake_cuda import FakeCuda
from fake_gpu import FakeGpu
from gpu_models import needs_gpu
from small_traces import write_trace
from test_full_size import recorded
from tiermoe.engine import service
from tiermoe.errors import BudgetError
from tiermoe.formats.gguf_file import open_gguf
from tiermoe.lab.bench.child import CaseFailed

KIND = "qwen3-30b-a3b"
ROOT = Path(__file__).parents[1]
FIGURES = {"tok_s", "bound_tok_s", "hits", "copied_mb_a_token", "read_mb_a_token", "waited_ms_a_token", "slots", "of"}


@pytest.fixture
def run_(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    return benchmark_runner(monkeypatch, capsys)


@needs_gpu
@pytest.mark.parametrize("step", STEPS)
def test_a_step_runs_on_a_real_gpu(step: str, tmp_path: Path) -> None:
    rows = list(STEPS[step][0](Run("cuda", True, tmp_path)))
    assert not [row for row in rows if "error" in row and "tolerance" not in row]
    assert all(row.get("right", True) for row in rows)


@pytest.mark.parametrize("step", [step for step in STEPS if step not in MODELS])
def test_a_step_runs_on_a_cpu(step: str, tmp_path: Path) -> None:
    rows = list(STEPS[step][0](Run("cpu", True, tmp_path)))
    assert rows
    for row in rows:
        assert "error" not in row or row["error"] <= row["tolerance"]
        assert row.get("right", True)
        assert row.get("equal_tokens") == row.get("of") or step != "families"
        assert all(value >= 0 for value in row.values() if isinstance(value, float))


def test_what_graphs_leave_to_the_host_is_measured_without_native_kernels(tmp_path: Path) -> None:
    run = json.dumps({"device": "cpu", "quick": True, "folder": str(tmp_path)})
    command, native = [sys.executable, "-m", "benchmarks.gpu_steps", "layers", run], {"TIERMOE_NATIVE": "0"}
    found = subprocess.run(command, cwd=ROOT, env=os.environ | native, capture_output=True, text=True, check=True)
    free = [row for row in map(json.loads, found.stdout.splitlines()) if "launch nothing" in row["what"]]
    assert len(free) == 3
    assert all(row["ms_a_layer"] > 0 for row in free)


def test_every_step_fits_a_command_and_all_fit_25_minutes() -> None:
    assert max(limit for _, limit in STEPS.values()) <= 600
    assert sum(limit for _, limit in STEPS.values()) <= 25 * 60
    assert STEPS.keys() >= MODELS.keys()


@pytest.mark.parametrize("kind", ["deepseek-v2-lite", "olmoe-1b-7b"])
def test_every_preset_has_a_row_or_a_reason(kind: str, tmp_path: Path) -> None:
    rows = list(presets_on(kind, Run("cpu", True, tmp_path)))
    out = {row["what"].rpartition(", ")[2]: row["left_out"] for row in rows if "left_out" in row}
    assert "give --routing" in out.pop("edgemoe")
    assert out.keys() == ({"fiddler", "llama-cpu-moe"} if MODELS[kind].more else set())
    assert all("no GPU is in use" in reason for reason in out.values())
    measured = [row for row in rows if "left_out" not in row]
    assert all(row.keys() >= FIGURES for row in measured)
    first = measured[0]["tok_s"]
    assert [row["times_load_on_demand"] for row in measured[1:]] == [row["tok_s"] / first for row in measured[1:]]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whole is a small one here, as wide as a recorded routing of a few tokens needs, within MiB of a GPU."""
    sizes = {**SMALL[KIND], "hidden_size": 512, "num_experts_per_tok": 3, "moe_intermediate_size": 256}
    monkeypatch.setattr(gpu_models, "config_of", lambda kind, layers: config_of(kind, 3, **sizes))
    monkeypatch.setattr(gpu_models, "MODELS", {KIND: Model(None, ("23MiB", "22MiB", "1MiB"))})
    monkeypatch.setattr(gpu_models, "BEFORE", 1)
    monkeypatch.setattr(gpu_models, "MEASURED", 2)


@pytest.mark.usefixtures("small_model")
def test_presets_run_within_bytes_of_a_pretended_gpu(
    fake_cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CudaCopier", lambda device: FakeGpu(seed=0, blocking=True))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    names = ("load-on-demand", "lru", "edgemoe")
    monkeypatch.setattr(gpu_models, "PRESETS", {name: gpu_models.PRESETS[name] for name in names})
    trace = write_trace(tmp_path / "t.trace", recorded())
    rows = {row["what"]: row for row in presets_on(KIND, Run("cuda:0", False, tmp_path, trace))}
    slots = {what.split(", ", 2)[2]: row.get("slots") for what, row in rows.items()}
    assert slots.pop("load-on-demand") == 3
    assert 3 < slots["22MiB of the GPU, lru"] < slots["23MiB of the GPU, lru"] < 24
    assert slots["22MiB of the GPU, default with dense layers at 4 bits"] > slots["22MiB of the GPU, lru"]
    for what, row in rows.items():
        assert row["routing"] == "recorded"
        if "1MiB" in what.split(", ")[2]:
            assert re.match("1 MiB on cuda:0 are too little: .* Use --gpu-memory", row["error"])
        else:
            assert row.keys() >= FIGURES
            assert row["copied_mb_a_token"] > 0 or row["slots"] >= row["of"] - 2  # all that a few tokens use
            assert row["read_mb_a_token"] == 0  # main memory has all


def test_a_step_goes_on_with_the_rows_that_it_has(tmp_path: Path) -> None:
    before = list(presets_on(KIND, Run("cpu", True, tmp_path)))
    done = [{**before[0], "tok_s": 1e-3}, {**before[1], "error": "it failed"}, *before[3:]]
    again = list(presets_on(KIND, Run("cpu", True, tmp_path, done=done)))
    assert [row["what"] for row in again] == [row["what"] for row in before[1:3]]
    assert [row["times_load_on_demand"] for row in again] == [row["tok_s"] / 1e-3 for row in again]


def test_the_hour_goes_on_from_its_file(run_: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--device=cpu", "--quick", f"--resume={tmp_path / 'gpu.json'}", f"--folder={tmp_path / 'models'}")
    found, err = run_("benchmarks.gpu", *words, "--steps=copies")
    assert [row["what"] for row in found["steps"]["copies"]["rows"]] == [
        "64 KiB to the GPU, not pinned", "64 KiB back, not pinned"
    ]  # fmt: skip
    assert "copies: 64 KiB to the GPU, not pinned: gb_s" in err
    ran: list[tuple[str, list[Row]]] = []

    def fails(name: str, run: Run, limit: float, keep: Any) -> None:
        ran.append((name, list(run.done)))
        keep({"rows": [{"what": "first"}], "error": "it failed"})

    monkeypatch.setattr(gpu, "run_step", fails)
    (tmp_path / "models/.writing-x").mkdir()
    again, _ = run_("benchmarks.gpu", *words, "--steps=machine,copies")
    assert again["steps"] == {**found["steps"], "machine": {"rows": [{"what": "first"}], "error": "it failed"}}
    run_("benchmarks.gpu", *words, "--steps=machine,copies")
    assert ran == [("machine", []), ("machine", [{"what": "first"}])]
    assert list((tmp_path / "models").iterdir()) == []
    for wrong in (words[:2], ("--device=cpu", f"--resume={tmp_path / 'other.json'}"), ("--llama-bench=/nowhere",)):
        with pytest.raises(SystemExit):
            run_("benchmarks.gpu", f"--resume={tmp_path / 'gpu.json'}", "--routing=/nowhere", *wrong)


def test_a_step_that_is_interrupted_keeps_its_rows(tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []
    done = [{"what": "64 KiB back, not pinned", "gb_s": -1.0}, {"what": "another"}]
    run = Run("cpu", True, tmp_path, done=done)
    found = gpu.run_step("copies", run, 60.0, lambda each: kept.append(json.loads(json.dumps(each))))
    assert [each.get("error") for each in kept] == ["it was interrupted", "it was interrupted", None]
    assert [row["what"] for row in kept[0]["rows"]] == [*(row["what"] for row in done), "64 KiB to the GPU, not pinned"]
    assert found["rows"][0]["gb_s"] > 0
    assert kept[-1] == found


def test_a_step_that_fails_or_takes_too_long_keeps_its_error(tmp_path: Path) -> None:
    assert "error" in gpu.run_step("copies", Run("meta", True, tmp_path), 60.0, lambda each: None)
    found = gpu.run_step("layers", Run("cpu", True, tmp_path), 0.1, lambda each: None)
    assert (found["error"], found["rows"]) == ("took longer than 0 s", [])


def test_figures_stand_beside_their_aims() -> None:
    assert gpu.shown({"what": "x", "share_of_bus": 0.5}) == "x: share_of_bus 0.5 (at least 0.9)"


PROGRAM = """#!{python}
import argparse, json, sys
parser = argparse.ArgumentParser(allow_abbrev=False)
for short, long in {options}:
    parser.add_argument(short, long)
parser.add_argument("-o", "--output", choices=["csv", "json", "jsonl", "md", "sql"])
args = parser.parse_args()
{then}
print(json.dumps([
    {{"build_commit": "8cf427ff", "n_prompt": int(args.n_prompt), "n_gen": 0, "avg_ts": 100.0}},
    {{"build_commit": "8cf427ff", "n_prompt": 0, "n_gen": int(args.n_gen), "avg_ts": float(args.n_cpu_moe)}},
]))
"""
OPTIONS = [
    ("-m", "--model"), ("-ngl", "--n-gpu-layers"), ("-ncmoe", "--n-cpu-moe"), ("-p", "--n-prompt"), ("-n", "--n-gen"),
    ("-r", "--repetitions"),
]  # fmt: skip
"""Those of llama-bench that are given, by its README."""


def program(path: Path, more: tuple[tuple[str, str], ...] = (), then: str = "") -> str:
    """A program that takes llama-bench's options, does `then`, and prints its JSON."""
    path.write_text(PROGRAM.format(python=sys.executable, options=[*OPTIONS, *more], then=then))
    path.chmod(0o755)
    return str(path)


def test_llama_cpp_has_as_many_layers_on_the_cpu_as_its_budget_needs(tmp_path: Path) -> None:
    config = config_of(KIND, 5, **SMALL[KIND])
    random_gguf.write(KIND, tmp_path / "m.gguf", config)
    sizes = {name: tensor.nbytes for name, tensor in open_gguf(tmp_path / "m.gguf").tensors.items()}
    dense = sum(nbytes for name, nbytes in sizes.items() if "_exps" not in name and name != "token_embd.weight")
    layers = [sum(n for name, n in sizes.items() if re.match(rf"blk\.{i}\..*_exps", name)) for i in range(5)]
    for on_cpu in range(6):
        least = RESERVE + dense + sum(layers[on_cpu:])
        assert experts_on_cpu(tmp_path / "m.gguf", least) == on_cpu
        if on_cpu < 5:
            assert experts_on_cpu(tmp_path / "m.gguf", least - 1) == on_cpu + 1
    with pytest.raises(BudgetError, match="are too little for llama"):
        experts_on_cpu(tmp_path / "m.gguf", RESERVE + dense - 1)


def test_llama_bench_is_called_as_it_takes_its_options(tmp_path: Path) -> None:
    said = tmp_path / "said"
    note = f"open({str(said)!r}, 'w').write(json.dumps(vars(args)))"
    found = run_llama_bench(program(tmp_path / "bench", then=note), Path("f.gguf"), 7, 16, 48)
    assert found == {"tok_s": 7.0, "prompt_tok_s": 100.0, "build": "8cf427ff"}
    assert json.loads(said.read_text()) == {
        "model": "f.gguf", "n_gpu_layers": "99", "n_cpu_moe": "7", "n_prompt": "16", "n_gen": "48", "repetitions": "3",
        "output": "json",
    }  # fmt: skip
    run_llama_bench(program(tmp_path / "newer", (("-mc", "--moe-cache"),), note), Path("f.gguf"), 7, 16, 48)
    assert json.loads(said.read_text())["moe_cache"] == "off"


@pytest.mark.parametrize(
    ("then", "words"), [("sys.exit('no memory')", "ended with code 1: no memory"), ("print('{')", "cannot be used")]
)
def test_a_llama_bench_that_fails_is_said(then: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(CaseFailed, match=words):
        run_llama_bench(program(tmp_path / "bench", then=then), Path("f.gguf"), 0, 1, 1)


def test_llama_cpp_has_a_row_a_budget(tmp_path: Path) -> None:
    run = Run("cpu", True, tmp_path, llama_bench=program(tmp_path / "bench"))
    (row,) = gpu_models.llama_cpp(run)
    assert row == {
        "what": f"{KIND}, 2GiB of the GPU, llama.cpp in Q4_K_M", "n_cpu_moe": 0, "tok_s": 0.0, "prompt_tok_s": 100.0,
        "build": "8cf427ff",
    }  # fmt: skip
    assert not list(tmp_path.glob("*.gguf"))
