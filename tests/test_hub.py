"""Models on the hub: planned from headers, downloaded once, and what is said where that cannot be. The hub is local."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tiny
from fake_hub import FakeHub, Run, commands_with, serving
from tiermoe.config import format_size
from tiermoe.engine.load import plan
from tiermoe.errors import ModelError
from tiermoe.formats.safetensors import Checkpoint, read_header
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.hf.hub import RemoteCheckpoint
from tiermoe.platform import file_io

MODEL, LARGE = "someone/tiny-moe", "someone/larger-moe"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sharded model with the same weights in other formats beside it, and models that cannot be used."""
    root = tmp_path_factory.mktemp("hub")
    whole = tiny.write(root / "whole", "qwen3_moe", torch.bfloat16, shard="60KB")
    large = tiny.write(root / "large", "qwen3_moe", torch.bfloat16, vocab_size=1 << 17)
    for folder in (whole, large):
        for name in ("pytorch_model.bin", "model-Q4_K_M.gguf", "consolidated.safetensors", "model.py", "picture.png"):
            (folder / name).write_bytes(bytes(1 << 20))
    no_weights = root / "pickled"
    no_weights.mkdir()
    shutil.copy(whole / "config.json", no_weights)
    (no_weights / "pytorch_model.bin").write_bytes(b"x")
    dense = root / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps({"model_type": "llama"}))
    shutil.copy(whole / "model.safetensors.index.json", dense)
    return {MODEL: whole, LARGE: large, "someone/pickled": no_weights, "someone/dense": dense, "someone/gated": whole}


@pytest.fixture(scope="module")
def hub(folders: dict[str, Path]) -> Iterator[FakeHub]:
    served = FakeHub(folders, gated={"someone/gated"}, broken={"someone/broken"})
    with serving(served):
        yield served


@pytest.fixture(scope="module")
def run(hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """`tiermoe` in a process that uses the hub: words → how it ended."""
    with commands_with(hub, tmp_path_factory.mktemp("home")) as command:
        yield command


SAME = ("--memory", "4GiB", "--machine", "laptop-ddr4")


def test_a_plan_before_a_download(run: Run, hub: FakeHub, folders: dict[str, Path]) -> None:
    ended = run("plan", MODEL, *SAME, "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    whole = folders[MODEL]
    shards = sorted(set(json.loads((whole / "model.safetensors.index.json").read_text())["weight_map"].values()))
    assert len(shards) > 2
    sizes = {file: (whole / file).stat().st_size for file in shards}
    assert found["download"] == {"files": len(shards), "nbytes": sum(sizes.values())}
    wanted = plan(whole, memory="4GiB", device="cpu")
    for part in ("dense", "kv_cache", "experts", "staging"):
        assert found[part] == getattr(wanted, part), part
    assert found["all_slots"] == wanted.all_slots
    assert not [file for file in hub.served if file.endswith((".bin", ".gguf", ".png", ".py"))]
    assert json.loads(run("plan", MODEL, *SAME, "--json").out)["download"] == found["download"]  # not here since
    shown = json.loads(run("show", MODEL, "--json").out)
    assert shown["download_bytes"] == sum(sizes.values())
    assert shown["experts_a_layer"] == inspect_model(whole, "x").layers[0].experts


def test_headers_are_asked_for_by_ranges(run: Run, hub: FakeHub, folders: dict[str, Path]) -> None:
    """Of a shard that is larger than the first request the values stay where they are."""
    hub.served.clear()
    assert run("plan", LARGE, *SAME).code == 0
    assert (folders[LARGE] / "model.safetensors").stat().st_size > 30 << 20
    assert 0 < hub.served["model.safetensors"] < 300_000


def test_a_download_goes_on_where_it_stopped(run: Run, hub: FakeHub, folders: dict[str, Path]) -> None:
    hub.served.clear()
    size = (folders[LARGE] / "model.safetensors").stat().st_size
    kept = 20 << 20  # huggingface_hub writes 10 MiB at a time
    hub.cut["model.safetensors"] = kept + 1000
    stopped = run("pack", LARGE, "--bits", "16", "--dense-bits", "16")
    assert stopped.code == 2
    lines = [line for line in stopped.err.splitlines() if "|" not in line]  # progress bars
    assert lines[0] == f"downloading {LARGE}: {format_size(size)} in 1 file; if it is interrupted, run this again"
    assert re.search(r"download of model.safetensors .* stopped after 20 MiB .*run this again", lines[-1])

    hub.back()
    hub.served.clear()
    ended = run("pack", LARGE, "--bits", "16", "--dense-bits", "16")
    assert ended.code == 0, ended.err
    assert f"{format_size(size - kept)} in 1 file (20 MiB are here already)" in ended.err
    assert hub.served["model.safetensors"] == size - kept
    assert not hub.served.keys() & {"pytorch_model.bin", "model-Q4_K_M.gguf", "consolidated.safetensors", "picture.png"}

    # another precision, and nobody to ask
    again = run("pack", LARGE, "--bits", "8", "--dense-bits", "16", offline=True)
    assert again.code == 0, again.err
    assert "downloading" not in again.err


def test_a_download_is_listed_and_leaves(run: Run, hub: FakeHub, folders: dict[str, Path]) -> None:
    """Alone: all repositories of this hub have commits of the same name."""
    assert run("pack", LARGE, "--bits", "8").code == 0
    assert run("plan", MODEL, *SAME).code == 0
    listed = {each["name"]: each for each in json.loads(run("list", "--json").out)["downloads"]}
    assert listed[LARGE]["weights"] == ["model.safetensors"]
    fetched = [file for file in folders[LARGE].iterdir() if file.suffix in (".json", ".jinja")]
    nbytes = sum(file.stat().st_size for file in (*fetched, folders[LARGE] / "model.safetensors"))
    assert listed[LARGE]["nbytes"] == nbytes
    assert f"{LARGE} │ downloaded" in " ".join(run("list").out.split())

    assert run("remove", LARGE, "--yes").code == 0
    assert f"'{LARGE}' has no store; its download takes {format_size(nbytes)}" in run("remove", LARGE, "--yes").cause
    part = Path(listed[LARGE]["root"]) / "blobs" / "0123.tiermoe-part"
    with open(part, "wb") as begun:
        begun.write(bytes(1000))
        begun.flush()
        file_io.lock(begun.fileno())
        cause = run("remove", LARGE, "--download", "--yes").cause
        assert f"'{LARGE}' is being downloaded by another process" in cause
    ended = run("remove", LARGE, "--download", "--yes")
    assert ended.code == 0, ended.err
    assert f"removed {LARGE}: {format_size(nbytes + 1000)} are free again" in ended.err
    assert not Path(listed[LARGE]["root"]).exists()
    assert [each["name"] for each in json.loads(run("list", "--json").out)["downloads"]] == [MODEL]


REFUSED = {
    "someone/nothing": r"there is no model 'someone/nothing' on the hub, or it is private; check the name",
    "someone/gated": r"'someone/gated' is gated: accept its terms at http\S+/someone/gated, log in with",
    "someone/pickled": r"'someone/pickled' holds no safetensors weights \(it has PyTorch's own format\)",
    "someone/dense": r"is a 'llama' model without experts",
    "someone/broken": r"'someone/broken' cannot be read from the hub \(.*503.*\); try again later",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(run: Run, name: str) -> None:
    assert re.search(REFUSED[name], run("plan", name, *SAME).cause)


def test_nobody_to_ask(run: Run, hub: FakeHub) -> None:
    offline = run("plan", "someone/gated", *SAME, offline=True).cause
    assert offline.startswith(
        "tiermoe: 'someone/gated' cannot be downloaded: HF_HUB_OFFLINE is set. There is neither a folder"
    )
    assert offline.endswith("; unset it, or name a model directory")
    hub.close()
    no_route = run("plan", "someone/gated", *SAME).cause
    assert re.search(
        rf": {hub.url} does not answer \(.*refused.*\)\. .* in the hub cache, \S+; check the connection,", no_route
    )


def test_values_are_not_there_before_a_download(folders: dict[str, Path]) -> None:
    header, start = read_header(folders[LARGE] / "model.safetensors")
    checkpoint = RemoteCheckpoint(folders[LARGE], LARGE, {"model.safetensors": header}, {"model.safetensors": 1 << 30})
    wanted = Checkpoint(folders[LARGE])
    assert {name: (each.dtype, each.shape, each.nbytes) for name, each in checkpoint.tensors.items()} == {
        name: (each.dtype, each.shape, each.nbytes) for name, each in wanted.tensors.items()
    }
    assert checkpoint.fingerprint() == checkpoint.fingerprint() != wanted.fingerprint()
    with pytest.raises(ModelError, match=f"norm.weight cannot be read, '{LARGE}' is not downloaded; 'tiermoe pack"):
        checkpoint.read("model.norm.weight")
    with pytest.raises(ModelError, match="is truncated"):
        RemoteCheckpoint(folders[LARGE], LARGE, {"model.safetensors": header}, {"model.safetensors": start})
