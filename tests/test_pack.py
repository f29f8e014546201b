"""Packing: resumable, exclusive, and never half a store taken for whole."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sources import EXPERTS, RandomExperts, contents, empty_store
from tiermoe.errors import ModelError, PackError
from tiermoe.formats import pack, store_files
from tiermoe.formats.pack import forget, pack_experts
from tiermoe.formats.store import PackedLayer, Store, open_store

KEY = "4-hqq"


def packed(root: Path, source: RandomExperts | None = None, bits: int = 4) -> Store:
    store = empty_store(root) if not (root / "store.json").exists() else open_store(root)
    pack_experts(store, source or RandomExperts(), bits, "hqq")
    return store


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an uninterrupted packing leaves."""
    root = tmp_path_factory.mktemp("whole") / "store"
    packed(root)
    return contents(root)


def dies_at(read: int) -> Callable[[int, int], None]:
    """Ends the process, as SIGKILL does, before the `read`-th expert is read."""

    def before(layer: int, expert: int) -> None:
        if layer * EXPERTS + expert == read:
            os.kill(os.getpid(), signal.SIGKILL)

    return before


def in_a_process_of_its_own(work: Callable[[], Any]) -> int:
    """Runs `work` in a fork; returns its wait status."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("read", [0, 1, 5, 11])
def test_killed_and_run_again(read: int, whole: dict[str, bytes], tmp_path: Path) -> None:
    root = tmp_path / "store"
    empty_store(root)
    status = in_a_process_of_its_own(lambda: packed(root, RandomExperts(before=dies_at(read))))
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert open_store(root).precisions == {}  # never half a store taken for whole
    again = RandomExperts()
    packed(root, again)
    assert contents(root) == whole
    assert again.reads == [(layer, expert) for layer in range(read // EXPERTS, 3) for expert in range(EXPERTS)]


@pytest.mark.parametrize("step", range(1, 9))
def test_killed_between_any_two_renames(step: int, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Three layers, three entries of the journal, the table: seven renames."""
    root = tmp_path / "store"
    empty_store(root)

    def work() -> None:
        done, replace = [0], os.replace

        def counted(source: Any, target: Any) -> None:
            done[0] += 1
            if done[0] == step:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)

        store_files.os.replace = counted  # type: ignore[assignment]
        packed(root)

    status = in_a_process_of_its_own(work)
    assert (os.WTERMSIG(status) == signal.SIGKILL) == (step <= 7)
    assert (open_store(root).precisions == {}) == (step <= 7)
    packed(root)
    assert contents(root) == whole


def test_an_exception_leaves_nothing_unfinished(whole: dict[str, bytes], tmp_path: Path) -> None:
    def fails(layer: int, expert: int) -> None:
        if (layer, expert) == (1, 2):
            raise ModelError("the checkpoint is torn")

    root = tmp_path / "store"
    with pytest.raises(ModelError, match=r"torn"):
        packed(root, RandomExperts(before=fails))
    assert sorted(contents(root)) == [
        f"experts-{KEY}-layer000.safetensors",
        f"packing-{KEY}.json",
        "store.json",
    ]
    packed(root)
    assert contents(root) == whole


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk(code: int, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "store"
    header = pack.header_of

    def full(layout: Any, layer: int, experts: int) -> bytes:
        if layer == 2:
            raise OSError(code, os.strerror(code))
        return header(layout, layer, experts)

    monkeypatch.setattr(pack, "header_of", full)
    with pytest.raises(
        PackError, match=r"the disk filled while packing into .* free; .*\); free some space and run again"
    ):
        packed(root)
    assert not list(root.glob("*.partial"))
    assert open_store(root).precisions == {}
    monkeypatch.undo()
    again = RandomExperts()
    packed(root, again)
    assert contents(root) == whole
    assert {layer for layer, _ in again.reads} == {2}


def test_a_file_size_limit_of_the_system(tmp_path: Path) -> None:
    """The real thing: the kernel refuses to write on."""
    root = tmp_path / "store"
    empty_store(root)

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with pytest.raises(PackError, match=r"the disk filled"):
            packed(root)

    assert in_a_process_of_its_own(work) == 0
    assert sorted(contents(root)) == ["store.json"]


def test_too_little_space_is_said_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = RandomExperts()
    usage = type("usage", (), {"free": 10_000})
    monkeypatch.setattr(pack.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(PackError, match=r"packing needs [\d.]+ KiB in .*, 9\.77 KiB are free; free some space or"):
        packed(tmp_path / "store", source)
    assert source.reads == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_a_folder_that_cannot_be_written(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = empty_store(tmp_path / "store")

    def refused(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(store_files.os, "open", refused)
    with pytest.raises(
        PackError, match=rf"cannot write to .*: {os.strerror(code)}; choose another folder with --store"
    ):
        pack_experts(store, RandomExperts(), 4, "hqq")


def test_a_second_packer_waits_and_finds_what_the_first_one_packed(whole: dict[str, bytes], tmp_path: Path) -> None:
    root, again = tmp_path / "store", RandomExperts()
    told: list[tuple[str, int, int]] = []
    waits = threading.Event()

    def waiting(*progress: Any) -> None:
        told.append(progress)
        waits.set()

    second = threading.Thread(target=lambda: pack_experts(open_store(root), again, 4, "hqq", waiting=waiting))

    def meanwhile(layer: int, expert: int) -> None:
        if (layer, expert) == (1, 1):
            second.start()
            waits.wait()

    packed(root, RandomExperts(before=meanwhile))
    second.join()
    whom = f"waiting for process {os.getpid()}, which packs into the same folder"
    assert told[0] == (whom, EXPERTS + 1, 3 * EXPERTS)
    assert told[-1] == (whom, 3 * EXPERTS, 3 * EXPERTS)
    assert again.reads == []
    assert contents(root) == whole


def test_a_dead_packer_s_lock_is_free(tmp_path: Path) -> None:
    root = tmp_path / "store"
    empty_store(root)
    in_a_process_of_its_own(lambda: packed(root, RandomExperts(before=dies_at(3))))
    packer = (root / ".lock").read_text().split()[0]
    assert packer != str(os.getpid())
    packed(root)
    assert (root / ".lock").read_text().split()[0] == str(os.getpid())


def test_what_another_process_packed_meanwhile_is_kept(tmp_path: Path) -> None:
    """Two open the same table; one adds 8 bits and 4 bits, then the other 2 bits and again 4 bits."""
    empty_store(tmp_path)
    first, second, again = open_store(tmp_path), open_store(tmp_path), RandomExperts()
    pack_experts(first, RandomExperts(), 8, "hqq")
    pack_experts(first, RandomExperts(), 4, "hqq")
    pack_experts(second, RandomExperts(), 2, "hqq")
    pack_experts(second, again, 4, "hqq")
    assert set(open_store(tmp_path).precisions) == {"8", "4-hqq", "2-hqq"}
    assert again.reads == []


def stop_after_a_layer(layer: int, expert: int) -> None:
    if layer == 1:
        raise ModelError("stop here")


def first(entry: dict[str, Any]) -> list[Any]:
    return entry["layers"]["0"]["experts"]


@pytest.mark.parametrize(
    "change",
    [
        *("", "{", "[]", "null", "\x00"),
        lambda entry: entry.update(fingerprint="another checkpoint's"),
        lambda entry: entry.update(version=0),
        lambda entry: entry.update(dtype="float16"),
        lambda entry: entry["layers"]["0"]["encodings"].update(down_proj="int4/cpu-other/g64"),
        lambda entry: first(entry).pop(),
        lambda entry: first(entry)[3]["segments"][0].__setitem__(1, 10**9),
        lambda entry: first(entry)[0].update(segments=[["elsewhere", 4096, 4096, 0]]),
        lambda entry: first(entry)[0].update(segments=[]),
        lambda entry: first(entry)[0].pop("checksum"),
        lambda entry: entry.pop("layers"),
        lambda entry: entry.clear(),
        None,  # the layer's file is gone
    ],
)
def test_a_journal_that_does_not_fit_is_not_believed(change: Any, whole: dict[str, bytes], tmp_path: Path) -> None:
    root = tmp_path / "store"
    with pytest.raises(ModelError):
        packed(root, RandomExperts(before=stop_after_a_layer))
    path = root / f"packing-{KEY}.json"
    if change is None:
        (root / f"experts-{KEY}-layer000.safetensors").unlink()
    elif isinstance(change, str):
        path.write_text(change)
    else:
        entry = json.loads(path.read_text())
        change(entry)
        path.write_text(json.dumps(entry))
    again = RandomExperts()
    packed(root, again)
    assert again.reads[0] == (0, 0)
    assert contents(root) == whole


def test_leftovers_that_nothing_vouches_for_are_removed(
    whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    empty_store(root)
    (root / f"experts-{KEY}-layer002.safetensors").write_bytes(b"from a lost journal")
    (root / "experts-8-layer000.partial").write_bytes(b"from a killed process")
    (root / "notes.partial").write_bytes(b"not ours")
    usage = shutil.disk_usage

    def measured(path: Path) -> Any:
        assert not list(root.glob("experts-*"))  # what is to go takes no space any more
        return usage(path)

    monkeypatch.setattr(pack.shutil, "disk_usage", measured)
    packed(root)
    assert contents(root) == {**whole, "notes.partial": b"not ours"}


def test_progress_and_errors_are_reported(tmp_path: Path) -> None:
    store, seen = empty_store(tmp_path), []
    for bits, low, high in ((8, 0.001, 0.02), (4, 0.03, 0.15), (2, 0.3, 0.45)):
        seen.clear()
        precision = pack_experts(
            store, RandomExperts(), bits, "hqq", progress=lambda done, all_: seen.append((done, all_))
        )
        assert seen == [(done, 12) for done in range(1, 13)]
        errors = [error for layer in precision.layers for error in layer.errors]
        assert all(low < error < high for error in errors)
        again = open_store(tmp_path).precisions["8" if bits == 8 else f"{bits}-hqq"]
        reread = [error for layer in again.layers for error in layer.errors]
        assert reread == pytest.approx(errors, abs=1e-6)


def test_forgetting_one_precision_leaves_the_others(whole: dict[str, bytes], tmp_path: Path) -> None:
    store = packed(tmp_path, bits=8)
    packed(tmp_path)
    forget(store, "4-hqq", None)
    assert set(open_store(tmp_path).precisions) == {"8"}
    assert sorted(contents(tmp_path)) == [
        *(f"experts-8-layer00{index}.safetensors" for index in range(3)),
        "store.json",
    ]
    packed(tmp_path)
    assert {name: text for name, text in contents(tmp_path).items() if KEY in name} == {
        name: text for name, text in whole.items() if KEY in name
    }


def test_the_stamp_of_a_journal_is_the_store_s(tmp_path: Path) -> None:
    """A new format version makes old journals void without anybody thinking of it."""
    journal = pack.Journal(tmp_path, KEY, empty_store(tmp_path).source)
    journal.add(0, PackedLayer({}, [], []))
    versions = {json.loads(file.read_text())["version"] for file in (journal.path, tmp_path / "store.json")}
    assert len(versions) == 1


def test_workers_write_the_same_files(whole: dict[str, bytes], tmp_path: Path) -> None:
    seen: list[int] = []
    pack_experts(
        empty_store(tmp_path), RandomExperts(), 4, "hqq", progress=lambda done, _: seen.append(done), workers=3
    )
    assert seen == list(range(1, 13))
    experts = {name: text for name, text in contents(tmp_path).items() if name != "store.json"}
    assert experts == {name: text for name, text in whole.items() if name != "store.json"}
