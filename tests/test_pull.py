"""`tiermoe pull`: what is downloaded of a repository, and why. The hub is local."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gguf_files
import tiny
from fake_hub import FakeHub, Run, commands_with, serving
from tiermoe.config import MIB, format_size

GGUF, SHARDED, WHOLE, TORN = "someone/moe-GGUF", "someone/sharded-GGUF", "someone/moe", "someone/torn-GGUF"
SCALED = "someone/scaled-GGUF"
TOKENIZER = Path(__file__).parents[1] / "models/stories-7m/tokenizer.json"
WIDE = "qwen3_moe of 100 M weights"
"""Files of different types differ by more than an interpreter's memory does."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hub")
    many, sharded, whole, torn, scaled = (root / name for name in ("many", "sharded", "whole", "torn", "scaled"))
    for folder in (many, sharded, torn, scaled):
        folder.mkdir()
    model = gguf_files.model_of(WIDE)
    for name, kind in (("Q8_0", "q8_0"), ("Q4_0", "q4_0"), ("Q2_K", "q2_k")):
        gguf_files.write(many / f"moe-{name}.gguf", model, WIDE, gguf_files.kinds(kind), vocabulary=TOKENIZER)
    (many / "mmproj-F16.gguf").write_bytes(bytes(100))
    (many / "README.md").write_text("many files")
    small = gguf_files.model_of("qwen3_moe")
    gguf_files.write(sharded / "moe-Q8_0.gguf", small, "qwen3_moe", gguf_files.kinds("q8_0"), shards=8)
    tiny.write(whole, "qwen3_moe", torch.bfloat16)
    (whole / "moe-Q8_0.gguf").write_bytes(b"GGUF")
    (torn / "moe-torn.gguf").write_bytes((many / "moe-Q2_K.gguf").read_bytes()[:1000])
    large = gguf_files.model_of("llama4 of 8192 tokens")
    gguf_files.write(scaled / "llama4-Q8_0.gguf", large, "llama4 of 8192 tokens", gguf_files.kinds("q8_0"))
    return {GGUF: many, SHARDED: sharded, WHOLE: whole, TORN: torn, SCALED: scaled}


@pytest.fixture(scope="module")
def hub(folders: dict[str, Path]) -> Iterator[FakeHub]:
    with serving(FakeHub(folders)) as served:
        yield served


@pytest.fixture(scope="module")
def run(hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with commands_with(hub, tmp_path_factory.mktemp("home")) as command:
        yield command


def planned(run: Run, file: Path, memory: int) -> dict[str, Any] | None:
    """The plan of a file in so much memory; None where its experts are not all there."""
    ended = run("plan", file, "--memory", memory, "--json", "--machine", "laptop-ddr4")
    found = json.loads(ended.out) if ended.code == 0 else None
    return found if found and found["slots"] == found["all_slots"] else None


def least(run: Run, file: Path) -> int:
    """The least memory in which a file's experts are all there, to 4 MiB."""
    plan = planned(run, file, 4 << 30)
    assert plan is not None
    low, high = plan["total"] // MIB - 96, plan["total"] // MIB + 1
    assert planned(run, file, low * MIB) is None
    while high - low > 4:
        middle = (low + high) // 2
        low, high = (low, middle) if planned(run, file, middle * MIB) else (middle, high)
    return high * MIB


def size(file: Path) -> str:
    return format_size(file.stat().st_size)


def test_the_largest_file_whose_experts_fit(run: Run, hub: FakeHub, folders: dict[str, Path]) -> None:
    wanted = folders[GGUF] / "moe-Q4_0.gguf"
    memory = least(run, folders[GGUF] / "moe-Q8_0.gguf") - (16 << 20)
    assert planned(run, wanted, memory - 8 * MIB)
    hub.served.clear()
    ended = run("pull", GGUF, "--memory", memory)
    assert ended.code == 0, ended.err
    why = f"the largest of 3 files of which {format_size(memory)} (--memory) hold all experts"
    assert f"moe-Q4_0.gguf, {size(wanted)}: {why}" in ended.err
    assert f"downloading {GGUF}: {size(wanted)} in 1 file; if it is interrupted, run this again" in ended.err
    assert Path(ended.out.strip()).read_bytes() == wanted.read_bytes()
    assert hub.served["moe-Q8_0.gguf"] <= 8 << 20  # of the others the headers alone
    assert not hub.served.keys() & {"moe-Q2_K.gguf", "mmproj-F16.gguf", "README.md"}


def test_where_none_fits_the_smallest_of_four_bits(run: Run, folders: dict[str, Path]) -> None:
    memory = least(run, folders[GGUF] / "moe-Q2_K.gguf") - (12 << 20)
    ended = run("pull", GGUF, "--memory", memory)
    assert ended.code == 0, ended.err
    why = rf"{format_size(memory)} (--memory) hold all experts of none of 3 files; of this one, of 4."
    assert f"moe-Q4_0.gguf, {size(folders[GGUF] / 'moe-Q4_0.gguf')}: {why}" in ended.err
    assert Path(ended.out.strip()).name == "moe-Q4_0.gguf"


def test_a_budget_that_does_for_none(run: Run, hub: FakeHub) -> None:
    hub.served.clear()
    cause = run("pull", GGUF, "--memory", "50MiB").cause
    assert "50 MiB (--memory) are too little for each of the 3 files of 'someone/moe-GGUF'; raise --memory" in cause
    assert all(nbytes <= 8 << 20 for nbytes in hub.served.values())


@pytest.mark.parametrize("file", ["moe-Q2_K.gguf", "Q2_K", "q2_k"])
def test_a_file_by_its_name(run: Run, folders: dict[str, Path], file: str) -> None:
    ended = run("pull", f"{GGUF}:{file}", "--memory", "50MiB")
    assert ended.code == 0, ended.err
    assert Path(ended.out.strip()).read_bytes() == (folders[GGUF] / "moe-Q2_K.gguf").read_bytes()


@pytest.mark.parametrize("file", ["Q5_K_M", "2_K", "mmproj-F16.gguf"])
def test_a_file_that_is_not_there(run: Run, file: str) -> None:
    have = "moe-Q8_0.gguf, moe-Q4_0.gguf, moe-Q2_K.gguf"
    assert f"there is no GGUF file '{file}' in '{GGUF}'; it has {have}" in run("pull", f"{GGUF}:{file}").cause


def test_a_name_that_several_files_have(run: Run, folders: dict[str, Path]) -> None:
    second = folders[GGUF] / "other" / "moe-Q8_0.gguf"
    second.parent.mkdir()
    second.write_bytes(b"GGUF")
    cause = run("pull", f"{GGUF}:Q8_0").cause
    second.unlink()
    assert "'Q8_0' names 2 files" in cause
    assert "moe-Q8_0.gguf, other/moe-Q8_0.gguf" in cause


def test_shards_are_one_model(run: Run, folders: dict[str, Path]) -> None:
    shards = sorted(folders[SHARDED].iterdir())
    assert len(shards) > 2
    ended = run("pull", SHARDED)
    assert ended.code == 0, ended.err
    assert "the largest of 1 file of which" in ended.err
    first = Path(ended.out.strip())
    assert first.name == shards[0].name
    assert [(first.parent / shard.name).read_bytes() == shard.read_bytes() for shard in shards] == [True] * len(shards)


def test_safetensors_come_before_gguf(run: Run, hub: FakeHub, folders: dict[str, Path]) -> None:
    hub.served.clear()
    ended = run("pull", WHOLE)
    assert ended.code == 0, ended.err
    assert (Path(ended.out.strip()) / "model.safetensors").exists()
    assert "moe-Q8_0.gguf" not in hub.served
    assert run("pull", WHOLE, offline=True).out == ended.out
    assert "it is on this machine already" in run("pull", WHOLE).err


def test_what_does_not_run_is_not_downloaded(run: Run, hub: FakeHub) -> None:
    for words in ((TORN,), (f"{TORN}:torn",)):
        cause = run("pull", *words).cause
        assert f"{TORN}/moe-torn.gguf is cut short" in cause
    assert "there is no model 'someone/nobody' on the hub" in run("pull", "someone/nobody:Q4_K_M").cause
    assert f"name one of them as {TORN}:FILE, or let 'tiermoe pull {TORN}' choose one" in run("plan", TORN).cause


def test_a_header_that_cannot_be_fetched(run: Run, hub: FakeHub) -> None:
    """No other file is chosen for it."""
    hub.lost.add("moe-Q8_0.gguf")
    cause = run("pull", GGUF, "--memory", "8GiB").cause
    hub.lost.clear()
    assert re.search(rf"'{GGUF}' cannot be read from the hub \(.*503.*\); try again later", cause)


def test_a_file_of_a_repository_runs_by_its_name(run: Run, hub: FakeHub, folders: dict[str, Path]) -> None:
    """Planned from its header, downloaded when it runs, then taken from the cache."""
    name, file = f"{GGUF}:Q8_0", folders[GGUF] / "moe-Q8_0.gguf"
    hub.served.clear()
    planned = json.loads(run("plan", name, "--json", "--machine", "laptop-ddr4", "--memory", "2GiB").out)
    assert planned["download"] == {"files": 1, "nbytes": file.stat().st_size}
    assert json.loads(run("show", name, "--json").out)["moe_layers"] == 2
    assert hub.served["moe-Q8_0.gguf"] <= 16 << 20
    words = ("--raw", "--max-tokens", "3", "--memory", "2GiB")
    ended = run("run", name, "once upon", *words)
    assert ended.code == 0, ended.err
    assert f"downloading {GGUF}: {size(file)} in 1 file" in ended.err
    again, alone = run("run", name, "once upon", *words, offline=True), run("run", file, "once upon", *words)
    assert (again.code, again.out) == (0, ended.out) == (alone.code, alone.out)
    assert run("pull", f"{GGUF}:moe-Q8_0.gguf", offline=True).out == run("pull", name).out
    assert f"{GGUF} names" not in run("run", GGUF, "once upon", *words).cause


def test_values_that_a_config_needs_are_asked_for(run: Run, hub: FakeHub, folders: dict[str, Path]) -> None:
    """Llama 4's factors, which lie behind the first request."""
    hub.served.clear()
    ended = run("plan", f"{SCALED}:Q8_0", "--machine", "laptop-ddr4", "--memory", "2GiB")
    assert ended.code == 0, ended.err
    assert hub.served["llama4-Q8_0.gguf"] < (folders[SCALED] / "llama4-Q8_0.gguf").stat().st_size


def test_shards_of_which_one_is_missing_are_downloaded(run: Run, folders: dict[str, Path]) -> None:
    first = Path(run("pull", f"{SHARDED}:Q8_0").out.strip())
    (first.parent / sorted(folders[SHARDED].iterdir())[3].name).unlink()
    ended = run("pull", f"{SHARDED}:Q8_0")
    assert "it is on this machine already" not in ended.err
    assert (first.parent / sorted(folders[SHARDED].iterdir())[3].name).exists()


def test_a_folder_of_gguf_files_is_a_model(run: Run, folders: dict[str, Path]) -> None:
    shards = sorted(folders[SHARDED].iterdir())
    in_folder, named = (json.loads(run("show", path, "--json").out) for path in (folders[SHARDED], shards[0]))
    del in_folder["name"], named["name"]
    assert in_folder == named
    cause = run("show", folders[GGUF]).cause
    assert f"{folders[GGUF]} has 3 models in GGUF files; name one of them: moe-Q2_K.gguf, moe-Q4_0.gguf" in cause
