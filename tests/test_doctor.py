"""`tiermoe doctor`: facts of the machine, and a line with what to do for each thing that is missing; with --exact which
ways have the same bits."""

from __future__ import annotations

import errno
import json
import os
import platform
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Command
from tiermoe import native
from tiermoe.config import settings
from tiermoe.model.decoder import Decoder
from tiermoe.platform.machine import most_memory, total_memory
from tiermoe.version import VERSION


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, which is not there yet."""
    chosen = tmp_path / "caches" / "tiermoe"
    monkeypatch.setenv("TIERMOE_CACHE", str(chosen))
    return chosen


def said(out: str) -> str:
    """Lines that a narrow terminal has broken, as one."""
    return " ".join(out.split())


def keep_rates(folder: Path, drive: float) -> None:
    """What `tiermoe plan` has measured today."""
    folder.mkdir(parents=True)
    kept = {"memory": 20e9, "drive": drive, "arithmetic": 2e11, "day": date.today().isoformat()}
    (folder / "machine.json").write_text(json.dumps({f"{folder.stat().st_dev}:{torch.get_num_threads()}": kept}))


def test_the_facts_are_those_of_the_machine(tiermoe_: Command, folder: Path) -> None:
    ended = tiermoe_("doctor", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["versions"]["tiermoe"] == VERSION
    assert found["versions"]["python"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert found["versions"]["torch"] == torch.__version__
    assert found["cores"] == os.cpu_count()
    assert found["kernels"]["compiled"] == native.instruction_sets()
    assert found["kernels"]["used"] == native.instruction_set()
    assert (found["memory"]["total"], found["memory"]["most"]) == (total_memory(), most_memory())
    assert 0 < found["memory"]["free"] <= found["memory"]["total"]
    assert found["cache_folder"]["path"] == str(folder)
    assert not found["cache_folder"]["problem"]
    assert all(found["rates"][name] > 0 for name in ("drive", "memory", "arithmetic"))
    assert (found["gpu"]["name"] is None) == (not torch.cuda.is_available())


def test_an_issue_report_has_no_path_but_the_cache_folder(tiermoe_: Command, folder: Path) -> None:
    keep_rates(folder, drive=3e9)
    for words in ((), ("--json",)):
        told = said(tiermoe_("doctor", *words).out).replace(str(folder), "")
        assert not [
            path for path in (str(folder.parent), str(Path.home()), sys.prefix, str(Path.cwd())) if path in told
        ]
        assert platform.node() not in told


def test_about_ten_lines(tiermoe_: Command, folder: Path) -> None:
    keep_rates(folder, drive=3e9)
    lines = tiermoe_("doctor").out.splitlines()
    labels = [line.partition(":")[0] for line in lines if ":" in line[:20]]
    assert labels[:5] == ["versions", "system", "processor", "CPU kernels", "memory"]
    assert labels[5:9] == ["cache folder", "rates", "GPU", "extras"]
    assert "its drive reads 3 GB/s" in said("".join(lines))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("", "TIERMOE_NATIVE=0 keeps the compiled kernels out: torch computes, slowly; unset it"),
        ("abacus", "TIERMOE_ISA='abacus'"),
        ("generic", "generic kernels are asked for, BEST are faster; unset TIERMOE_ISA"),
    ],
)  # fmt: skip
def test_kernels_that_are_missing_or_slow(
    asked: str, told: str, tiermoe_: Command, folder: Path, without_native: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(native.instruction_sets()) < 2:
        pytest.skip("this machine runs one instruction set")
    keep_rates(folder, drive=3e9)
    if asked:
        monkeypatch.delenv(native.SWITCH)
        monkeypatch.setenv(native.ISA, asked)
    ended, found = tiermoe_("doctor"), json.loads(tiermoe_("doctor", "--json").out)
    if asked == "generic":
        native.use(native.instruction_sets()[0])
    assert ended.code == 0
    assert told.replace("BEST", native.instruction_sets()[0]) in said(ended.out)
    assert found["kernels"]["used"] == (asked if asked == "generic" else None)


@pytest.mark.parametrize(("drive", "slow"), [(4e7, True), (3e9, False)])
def test_a_slow_drive_is_said(tiermoe_: Command, folder: Path, drive: float, slow: bool) -> None:
    keep_rates(folder, drive)
    advice = json.loads(tiermoe_("doctor", "--json").out)["advice"]
    about_it = [line.partition(";")[0] for line in advice if "drive" in line]
    assert about_it == ["the cache folder's drive reads 0.04 GB/s, an NVMe drive about 3 GB/s"] * slow


def test_a_cache_folder_that_cannot_be_written(tiermoe_: Command, folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file")
    ended = tiermoe_("doctor")
    assert ended.code == 0
    assert f"{folder}; " in said(ended.out)
    assert "cannot be written, so no model can be packed; set TIERMOE_CACHE to a folder" in said(ended.out)
    assert json.loads(tiermoe_("doctor", "--json").out)["rates"] is None


def test_a_drive_that_cannot_be_measured(tiermoe_: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    ended = tiermoe_("doctor")
    assert ended.code == 0
    assert "its drive cannot be measured (No space left on device); make room, or set TIERMOE_CACHE" in said(ended.out)


def test_a_user_without_a_home(tiermoe_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIERMOE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "")
    ended = tiermoe_("doctor")
    assert ended.code == 0
    assert "there is no folder for packed experts: HOME and XDG_CACHE_HOME are empty; set one" in said(ended.out)


# --- --exact ---

needs_kernels = pytest.mark.skipif(not native.available(), reason="needs the native kernels")


@needs_kernels
def test_every_way_has_the_same_bits(tiermoe_: Command, folder: Path) -> None:
    ended = tiermoe_("doctor", "--exact")
    assert ended.code == 0, ended.err
    first, *ways, last = ended.out.splitlines()
    assert first.startswith("stories-7m: experts at 4 bits, other layers at 4; ")
    assert all(line.endswith("  equal") or "  left out: this machine runs " in line for line in ways)
    assert sum(line.endswith("  equal") for line in ways) >= 15
    assert ways[-1].split() == ["with", "64", "of", "256", "experts", "equal"]
    assert last.startswith("all ")


@needs_kernels
def test_ways_with_other_bits_are_told(tiermoe_: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that computes a token of a prompt otherwise where it is alone, as the answer's tokens are."""
    finish = Decoder.finish

    def broken(self: Decoder, passing: Any, every: bool = False) -> torch.Tensor:
        logits = finish(self, passing, every)
        return logits + 1 if passing.batch.phase == "prefill" and len(logits) == 1 else logits

    monkeypatch.setattr(Decoder, "finish", broken)
    ended = tiermoe_("doctor", "--exact")
    assert ended.code == 1, ended.err
    lines = {" ".join(line.split()) for line in ended.out.splitlines()}
    assert "in chunks of 1 96 of 104 tokens differ, first token 1" in lines
    assert "after a prefix of 95 1 of 104 tokens differ, first token 96" in lines
    assert "in chunks of 7 equal" in lines
    assert ended.out.splitlines()[-1].startswith("2 of ")
    told = json.loads(tiermoe_("doctor", "--exact", "--json").out)["differing"]
    assert {name: found for name, found in told.items() if found} == {
        "in chunks of 1": list(range(96)), "after a prefix of 95": [95]
    }  # fmt: skip


@needs_kernels
def test_another_instruction_set_with_other_bits_is_told(
    tiermoe_: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(native.instruction_sets()) < 2:
        pytest.skip("this machine runs one instruction set")
    used, finish = native.instruction_set(), Decoder.finish

    def broken(self: Decoder, passing: Any, every: bool = False) -> torch.Tensor:
        return finish(self, passing, every) * (1 if native.instruction_set() == used else 2)

    monkeypatch.setattr(Decoder, "finish", broken)
    ended = tiermoe_("doctor", "--exact", "--json")
    found = {name for name, differing in json.loads(ended.out)["differing"].items() if differing}
    assert found == {f"on {name}" for name in native.instruction_sets() if name != used}
    assert (ended.code, native.instruction_set()) == (1, used)


def test_what_torch_computes_is_compared_in_no_other_steps(
    tiermoe_: Command, folder: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder of ours in float32, transformers' code, and a model with an encoder."""
    for decoder in ("auto", "generic"):
        monkeypatch.setattr("tiermoe.cli.doctor.settings", partial(settings, decoder=decoder))
        ended = tiermoe_("doctor", "--exact", tiny_model("qwen3_moe", torch.float32))
        assert ended.code == 0, ended.err
        assert "in other steps left out: torch computes this model, or a part of it" in said(ended.out)
        assert ended.out.splitlines()[-1].startswith("all 2 have the same bits")
    encoder = tiny_model("switch_transformers", torch.float32)
    assert "encodes its prompt" in tiermoe_("doctor", "--exact", encoder).cause


def test_a_model_or_its_options_without_exact_are_refused(tiermoe_: Command, folder: Path) -> None:
    assert (
        "stories-7m, --bits, --store: doctor takes these with --exact alone"
        in tiermoe_("doctor", "stories-7m", "--bits", 4, "--store", folder).cause
    )
