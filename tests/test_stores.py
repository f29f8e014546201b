"""`tiermoe list` and `tiermoe remove`: what lies in the cache folder, and what may leave it."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tiermoe
from commands import Command
from tiermoe.cli.main import main
from tiermoe.errors import StoreError
from tiermoe.formats.store_files import cached_stores, exclusive, hold, remove_store

DAY = 86400


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    chosen = tmp_path / "tiermoe"
    chosen.mkdir()
    monkeypatch.setenv("TIERMOE_CACHE", str(chosen))
    return chosen


def stored(folder: Path, name: str, label: str, nbytes: int = 1000, days: float = 0) -> Path:
    """A folder with what `list` and `remove` read of a store, last used some days ago."""
    root = folder / label
    (root / "profiles").mkdir(parents=True)
    table = {
        "format": "tiermoe-expert-store",
        "source": {"name": name},
        "precisions": {"4-hqq": {}},
        "dense": {"8": {}},
    }
    (root / "store.json").write_text(json.dumps(table))
    (root / "experts-4-hqq-layer000.safetensors").write_bytes(bytes(nbytes))
    (root / "profiles" / "one.json").write_text("{}")
    for file in root.iterdir():
        os.utime(file, (time.time() - days * DAY,) * 2)
    return root


def size(root: Path) -> int:
    return sum(file.stat().st_size for file in root.rglob("*") if file.is_file())


def names(tiermoe_: Command) -> list[str]:
    return [store["name"] for store in json.loads(tiermoe_("list", "--json").out)["stores"]]


def test_a_store_is_listed_with_its_precisions_and_size(
    tiermoe_: Command, folder: Path, tiny_model: Callable[..., Path]
) -> None:
    model = tiny_model("qwen3_moe", torch.bfloat16)
    began = time.time() - 2
    for bits in ("8", "4"):
        assert tiermoe_("pack", model, "--bits", bits).code == 0
    (found,) = json.loads(tiermoe_("list", "--json").out)["stores"]
    assert (found["name"], found["precisions"], found["problem"]) == (str(model), ["8", "4-hqq"], "")
    assert [key.partition("-")[0] for key in found["dense"]] == ["8", "4"]
    assert found["nbytes"] == size(Path(found["root"])) > 0
    assert Path(found["root"]).parent == folder
    assert began <= cached_stores()[0].used <= time.time() + 2
    table = tiermoe_("list").out
    assert "8, 4-hqq, dense layers 8" in " ".join(table.split())


def test_the_store_that_was_used_last_comes_first(tiermoe_: Command, folder: Path) -> None:
    for name, days in (("a/old", 30), ("a/new", 1), ("a/middle", 7)):
        stored(folder, name, name.replace("/", "--") + "-0123", days=days)
    (folder / "machine.json").write_text("{}")
    (folder / "another program's").mkdir()
    assert names(tiermoe_) == ["a/new", "a/middle", "a/old"]


def test_a_store_leaves_by_its_name(tiermoe_: Command, folder: Path) -> None:
    one, other = stored(folder, "a/one", "a--one-01"), stored(folder, "a/two", "a--two-02")
    nbytes = size(one)
    ended = tiermoe_("remove", "a/one", "--yes")
    assert ended.code == 0, ended.err
    assert f"a/one, packed: {nbytes / 1024:.2f} KiB in {one}, with 1 calibration profiles" in ended.err
    assert f"removed a/one: {nbytes / 1024:.2f} KiB are free again" in ended.err
    assert not one.exists()
    assert other.exists()


@pytest.mark.parametrize("name", ["/models/one", "one", "one-01"])
def test_names_of_a_store(tiermoe_: Command, folder: Path, name: str) -> None:
    root = stored(folder, "/models/one", "one-01")
    assert tiermoe_("remove", name, "--yes").code == 0
    assert not root.exists()


def test_a_name_that_several_stores_have_is_refused(tiermoe_: Command, folder: Path) -> None:
    first, second = stored(folder, "a/one", "a--one-01"), stored(folder, "a/one", "a--one-02", days=1)
    cause = tiermoe_("remove", "a/one", "--yes").cause
    assert "'a/one' names 2 stores; name the folder of one: a--one-01, a--one-02" in cause
    assert tiermoe_("remove", "a--one-02", "--yes").code == 0
    assert (first.exists(), second.exists()) == (True, False)


@pytest.mark.parametrize("name", ["a/other", "..", ".", "", "a--one-01/profiles"])
def test_a_name_of_no_store_removes_nothing(tiermoe_: Command, folder: Path, name: str) -> None:
    root = stored(folder, "a/one", "a--one-01")
    before = size(root)
    assert "there is neither a store nor a download" in tiermoe_("remove", name, "--yes").cause
    assert size(root) == before


def test_nothing_outside_of_the_cache_folder_leaves(tiermoe_: Command, folder: Path, tmp_path: Path) -> None:
    """By a link in place of the store, and by one within it."""
    outside = stored(tmp_path, "a/elsewhere", "elsewhere-01")
    (folder / "elsewhere-01").symlink_to(outside)
    assert "is a link to a folder elsewhere" in tiermoe_("remove", "a/elsewhere", "--yes").cause
    inside = stored(folder, "a/one", "a--one-01")
    (inside / "linked").symlink_to(outside)
    (inside / "profiles" / "linked").symlink_to(outside)
    assert tiermoe_("remove", "a/one", "--yes").code == 0
    assert not inside.exists()
    assert (outside / "store.json").exists()
    assert (outside / "profiles" / "one.json").exists()


def test_a_store_that_a_process_packs_into_is_kept(tiermoe_: Command, folder: Path) -> None:
    root = stored(folder, "a/one", "a--one-01")
    with exclusive(root):
        assert f"a process packs into {root}" in tiermoe_("remove", "a/one", "--yes").cause
    assert (root / "store.json").exists()
    assert tiermoe_("remove", "a/one", "--yes").code == 0


def test_a_store_that_a_model_runs_from_is_kept(
    tiermoe_: Command, folder: Path, tiny_model: Callable[..., Path]
) -> None:
    model = tiny_model("qwen3_moe", torch.bfloat16)
    with tiermoe.load(model, memory="4GiB", lanes=1) as (one, _), tiermoe.load(model, memory="4GiB", lanes=1):
        (store,) = cached_stores()
        one.tiermoe.close()  # the other still runs
        cause = tiermoe_("remove", store.root.name, "--yes").cause
        assert f"a running process uses the store in {store.root}; end it first" in cause
        assert cached_stores()[0].precisions == store.precisions
    assert tiermoe_("remove", store.root.name, "--yes").code == 0
    assert cached_stores() == []


def test_a_store_is_not_opened_while_it_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, refused = stored(folder, "a/one", "a--one-01"), []
    unlink = Path.unlink

    def meanwhile(path: Path, missing_ok: bool = False) -> None:
        with pytest.raises(StoreError, match="is being removed by another process; run this again"):
            hold(root)
        refused.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", meanwhile)
    remove_store(cached_stores()[0])
    assert refused[0] == "store.json"  # nobody takes what an interruption leaves for a store


def test_what_an_interrupted_removal_left_is_listed_and_leaves(tiermoe_: Command, folder: Path) -> None:
    root = stored(folder, "a/one", "a--one-01")
    (root / "store.json").unlink()
    assert "was interrupted" in tiermoe_("list").out
    assert tiermoe_("remove", "a--one", "--yes").code == 0
    assert not root.exists()


@pytest.mark.parametrize("table", ["{", "[]", "{}", '{"format": "other"}'])
def test_a_damaged_store_is_listed_and_leaves(tiermoe_: Command, folder: Path, table: str) -> None:
    root = stored(folder, "a/one", "a--one-01")
    (root / "store.json").write_text(table)
    assert "table cannot be read" in " ".join(tiermoe_("list", "--json").out.split())
    assert tiermoe_("remove", "a--one-01", "--yes").code == 0
    assert not root.exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_question_comes_first(folder: Path, tiermoe_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    root = stored(folder, "a/one", "a--one-01")
    assert "standard input is no terminal; --yes removes without a question" in tiermoe_("remove", "a/one").cause
    for answer, code, stays in (("n\n", 0, True), ("", 130, True), ("y\n", 0, False)):
        monkeypatch.setattr(sys, "argv", ["tiermoe", "remove", "a/one"])
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        with pytest.raises(SystemExit) as ended:
            main()
        assert (int(ended.value.code or 0), root.exists()) == (code, stays)


def test_stores_leave_until_the_others_fit(tiermoe_: Command, folder: Path) -> None:
    """The one that was not used for longest first, no more than has to."""
    roots = {name: stored(folder, name, f"{name}-01", 10_000, days) for name, days in (("x", 1), ("y", 9), ("z", 5))}
    each = size(roots["x"])
    assert tiermoe_("remove", "--down-to", str(3 * each), "--yes").err.startswith("nothing to remove")
    ended = tiermoe_("remove", "--down-to", str(2 * each), "--yes")
    assert [line.partition(",")[0] for line in ended.err.splitlines() if "packed" in line] == ["y"]
    assert names(tiermoe_) == ["x", "z"]
    assert tiermoe_("remove", "--down-to", "1", "--yes").code == 0
    assert names(tiermoe_) == []


def test_a_store_in_use_stays_and_the_next_one_leaves(tiermoe_: Command, folder: Path) -> None:
    """Of the four, the oldest runs and the second oldest is a link."""
    ages = {"a": 1, "b": 2, "runs": 9}
    roots = {name: stored(folder, name, f"{name}-01", 10_000, days) for name, days in ages.items()}
    outside = stored(folder.parent, "linked", "linked-01", 10_000, 5)
    (folder / "linked-01").symlink_to(outside)
    held = hold(roots["runs"])
    assert held is not None
    ended = tiermoe_("remove", "--down-to", str(3 * size(roots["a"]) + 1000), "--yes")
    assert ended.code == 0, ended.err
    assert names(tiermoe_) == ["a", "linked", "runs"]
    ended = tiermoe_("remove", "--down-to", "1", "--yes")
    assert "stay, more than 1: running processes use them, or they are links" in ended.err
    assert names(tiermoe_) == ["linked", "runs"]
    os.close(held)
    assert tiermoe_("remove", "--down-to", "1", "--yes").code == 0
    assert names(tiermoe_) == ["linked"]
    assert (outside / "store.json").exists()


def test_a_dry_run_says_what_would_leave_and_changes_nothing(tiermoe_: Command, folder: Path) -> None:
    for name, days in (("x", 1), ("y", 9)):
        stored(folder, name, f"{name}-01", 10_000, days)
    before = cached_stores()
    ended = tiermoe_("remove", "--down-to", "1", "--dry-run")
    assert ended.code == 0
    assert [line.partition(",")[0] for line in ended.err.splitlines()[:-1]] == ["y", "x"]
    assert ended.err.endswith("would come back; nothing is removed\n")
    assert tiermoe_("remove", "x", "--dry-run").err.startswith("x, packed: ")
    assert cached_stores() == before


def test_a_name_or_a_size(tiermoe_: Command, folder: Path) -> None:
    for words in ((), ("a/one", "--down-to", "1GiB")):
        assert "name one model, as 'tiermoe list' shows it, or give --down-to SIZE" in tiermoe_("remove", *words).cause
    assert "--down-to 'much' is not a size" in tiermoe_("remove", "--down-to", "much").cause


def test_nothing_is_here(tiermoe_: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERMOE_CACHE", str(folder / "nowhere"))
    assert json.loads(tiermoe_("list", "--json").out)["stores"] == []
