"""Stores that cannot be used and packing that cannot go on, as the commands tell it."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tiermoe
from commands import Command
from extent_files import flip
from sharded import edit_json
from tiermoe.formats import store_files
from tiermoe.formats.store import open_store
from tiermoe.offload.probe import drive_rate

RUN = ("--memory", "4GiB", "--max-tokens", "4", "--lanes", "1")


@pytest.fixture
def model(sharded: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint to damage."""
    return Path(shutil.copytree(sharded, tmp_path / "model"))


@pytest.fixture
def store(sharded: Path, tmp_path: Path) -> Path:
    """A copy of the store to damage."""
    return Path(shutil.copytree(sharded.parent / "store", tmp_path / "store"))


def run_with(store: Path, sharded: Path) -> tuple[Any, ...]:
    return ("run", sharded, "hi there", *RUN, "--store", store)


def test_a_store_of_another_version(tiermoe_: Command, sharded: Path, store: Path) -> None:
    edit_json(store / "store.json", lambda table: table.update(format="recipes"))
    assert (
        "is not the table of a tiermoe expert store; name another folder" in tiermoe_(*run_with(store, sharded)).cause
    )
    edit_json(store / "store.json", lambda table: table.update(format="tiermoe-expert-store", version=2))
    cause = tiermoe_(*run_with(store, sharded)).cause
    assert "has store format version 2, this tiermoe reads version 1; 'tiermoe pack" in cause
    assert "format version 2" in tiermoe_("show", store).cause
    assert tiermoe_("pack", sharded, "--out", store, "--force").code == 0  # what the message says helps
    assert tiermoe_(*run_with(store, sharded)).code == 0


def test_a_store_of_another_checkpoint(tiermoe_: Command, model: Path, store: Path) -> None:
    edit_json(model / "config.json", lambda config: config.update(rms_norm_eps=1e-5))
    cause = tiermoe_(*run_with(store, model)).cause
    assert re.search(
        r"packed from another checkpoint \(fingerprint \w{16}, this model's is \w{16}\); choose another",
        cause,
    )


def test_codes_in_an_older_order_are_packed_anew(tiermoe_: Command, sharded: Path, store: Path) -> None:
    def older(table: dict[str, Any]) -> None:
        (precision,) = table["precisions"].values()
        precision["machine"] = "cpu-avx2"

    edit_json(store / "store.json", older)
    assert tiermoe_("show", store).code == 0
    assert tiermoe_(*run_with(store, sharded)).code == 0
    (precision,) = json.loads((store / "store.json").read_text())["precisions"].values()
    assert precision["machine"] == "cpu-avx512"


@pytest.mark.parametrize("part", ["layers", "dense"])
def test_a_store_of_a_model_that_another_transformers_describes(
    part: str, tiermoe_: Command, sharded: Path, store: Path
) -> None:
    def rename(table: dict[str, Any]) -> None:
        if part == "layers":
            table["layers"][0]["name"] += ".inner"
        else:
            dense = next(iter(table["dense"].values()))["layers"]
            dense["model.layers.0.self_attn.q_proj.linear"] = dense.pop("model.layers.0.self_attn.q_proj")

    edit_json(store / "store.json", rename)
    cause = tiermoe_(*run_with(store, sharded)).cause
    assert f"the store in {store} does not describe the layers of" in cause
    assert "--force" in cause


def test_a_store_that_is_damaged(tiermoe_: Command, sharded: Path, store: Path, tmp_path: Path) -> None:
    file = next(store.glob("*layer001*"))
    size = file.stat().st_size
    os.truncate(file, size - 1)
    told = rf"layer001\.safetensors is truncated: {size - 1:,} bytes of at least {size:,}; 'tiermoe pack .*--force'"
    assert re.search(told, tiermoe_(*run_with(store, sharded)).cause)
    file.unlink()
    assert "is missing from the expert store" in tiermoe_(*run_with(store, sharded)).cause
    (store / "store.json").write_text("{")
    assert re.search(
        rf"store\.json cannot be read .*; 'tiermoe pack MODEL --store {store} --force' packs",
        tiermoe_(*run_with(store, sharded)).cause,
    )
    assert "there is no store to verify" in tiermoe_("show", sharded, "--verify", "--store", tmp_path / "no").cause


def test_a_flipped_byte_is_found_when_read(tiermoe_: Command, sharded: Path, store: Path) -> None:
    """In every expert of a layer, so that the answer meets one; the message names the layer and an expert. The
    store holds 24 experts and 7 dense layers."""
    layer = open_store(store).precisions["4-hqq"].layers[1]
    for extent in layer.extents:
        flip(Path(extent.segments[0].file), extent.segments[0].offset + 77)
    cause = tiermoe_(*run_with(store, sharded)).cause
    assert re.search(
        r"layer 1, expert \d \(4 bits\) is damaged: its bytes in \S+layer001\.safetensors do not .*--force'",
        cause,
    )
    outcome = tiermoe_("show", store, "--verify")
    assert re.search(r"8 of 31 extents are damaged; pack the model again", outcome.cause)
    assert len(re.findall(r"^layer 1, expert \d .* is damaged", outcome.err, re.MULTILINE)) == 8


def test_a_model_is_usable_after_a_damaged_expert(sharded: Path, store: Path) -> None:
    extents = open_store(store).precisions["4-hqq"].layers[1].extents
    places = [(Path(extent.segments[0].file), extent.segments[0].offset + 5) for extent in extents]
    model, tokenizer = tiermoe.load(sharded, memory="4GiB", store=store, cache="40%", lanes=2)
    ids = tokenizer("once upon", return_tensors="pt").input_ids
    greedy = tiermoe.Sampling(max_tokens=6)
    for place in places:
        flip(*place)
    with pytest.raises(tiermoe.LoadError, match=r"layer 1, expert \d \(4 bits\) is damaged"):
        tiermoe.generate(model, tokenizer, ids, greedy)
    for place in places:
        flip(*place)
    after = tiermoe.generate(model, tokenizer, ids, greedy).token_ids
    model.tiermoe.close()
    fresh, _ = tiermoe.load(sharded, memory="4GiB", store=store, lanes=2)
    assert tiermoe.generate(fresh, tokenizer, ids, greedy).token_ids == after
    fresh.tiermoe.close()


def test_a_flipped_byte_in_a_packed_dense_layer(tiermoe_: Command, sharded: Path, store: Path) -> None:
    words = (*run_with(store, sharded), "--dense-bits", "8")
    assert tiermoe_(*words).code == 0
    flip(store / "dense-8.bin", 10)
    assert re.search(
        r"dense layer \S+ \(8 bits\) in .* is damaged.*--dense-bits 8 --force' packs anew",
        tiermoe_(*words).cause,
    )
    assert tiermoe_("pack", sharded, "--out", store, "--dense-bits", "8", "--force").code == 0
    assert tiermoe_(*words).code == 0


# --- packing ---


def test_a_cache_folder_that_cannot_be_written(
    tiermoe_: Command, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TIERMOE_CACHE", str(tmp_path / "file" / "cache"))
    for words in (("run", sharded, "hi", *RUN), ("pack", sharded)):
        cause = tiermoe_(*words).cause
        assert re.search(
            r"cannot write to \S+/file/cache/tiny-\w{16}: Not a directory; choose another folder with --store",
            cause,
        )
    assert "cannot write to" in tiermoe_("pack", sharded, "--out", tmp_path / "file").cause


def test_a_second_process_waits_for_the_first(
    tiermoe_: Command, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody is packing into the folder, until the command has slept once."""
    for number, words in enumerate((["pack", sharded], ["run", sharded, "hi", *RUN])):
        folder, slept = tmp_path / str(number), threading.Event()
        held = threading.Event()

        def pack(folder: Path = folder, held: threading.Event = held, slept: threading.Event = slept) -> None:
            with store_files.exclusive(folder) as note:
                note(3, 24)
                held.set()
                slept.wait()

        thread = threading.Thread(target=pack)
        thread.start()
        held.wait()
        with monkeypatch.context() as patched:
            patched.setattr(time, "sleep", lambda _, slept=slept: slept.set())
            outcome = tiermoe_(*words, "--store", folder)
        thread.join()
        assert outcome.code == 0, outcome.err
        waiting = f"waiting for process {os.getpid()}, which packs into the same folder"
        assert outcome.err.splitlines()[:3] == [
            f"{waiting}: 24 to do", f"{waiting}: done", "packing experts (once): 24 to do"
        ]  # fmt: skip


def test_a_store_is_not_a_model(tiermoe_: Command, store: Path) -> None:
    assert "has no" in tiermoe_("run", store, "hi").cause


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_look_at_the_drive_leaves_what_it_cannot_read_to_who_needs_the_expert(store: Path) -> None:
    extents = [extent for layer in open_store(store).precisions["4-hqq"].layers for extent in layer.extents]
    for file in {extent.segments[0].file for extent in extents}:
        os.truncate(file, 1)
    assert drive_rate(extents) == 0
