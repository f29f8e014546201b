"""`tiermoe serve A B C` as processes: answers by turns, memory of all, no process left behind, and what is refused."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from benchmarks.serving import free_port
from commands import Command
from patience import PATIENCE_S, until
from serving import wait_until_loaded
from tiermoe.cli import serve_models
from tiermoe.config import parse_size
from tiermoe.model.tokenizer import load_tokenizer
from tiny import oracle

FAMILIES = ("qwen3_moe", "mixtral")
WORDS = ("--bits", "16", "--dense-bits", "16", "--context", "64", "--lanes", "1", "--threads", "1", "--device", "cpu")
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def models(tiny_model: Callable[..., Path]) -> dict[str, Path]:
    """Family → a checkpoint."""
    return {family: tiny_model(family, torch.float32) for family in FAMILIES}


class Memory:
    """The most that a process and its descendants held together in resident sets, in bytes, sampled until the end of a
    `with`."""

    def __init__(self, process: int) -> None:
        self.resident = self.samples = 0
        self._root = psutil.Process(process)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            resident = 0
            for each in (self._root, *self._root.children(recursive=True)):
                with suppress(psutil.Error):
                    resident += each.memory_info().rss
            self.resident = max(self.resident, resident)
            self.samples += 1


@contextmanager
def serving(*words: object, memory: str) -> Iterator[tuple[psutil.Process, httpx.Client]]:
    port = free_port()
    named = ["--port", str(port), "--memory", memory, *WORDS]
    command = [sys.executable, "-m", "tiermoe", "serve", *map(str, words), *named]
    process = subprocess.Popen(command)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            wait_until_loaded(process, client)
            yield psutil.Process(process.pid), client
    finally:
        process.kill()
        process.wait()


def ask(client: httpx.Client, model: str) -> str:
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    text: str = client.post("/v1/completions", json=asked).raise_for_status().json()["choices"][0]["text"]
    return text


def expected(directory: Path, family: str) -> str:
    """What transformers' eager experts answer."""
    tokenizer = load_tokenizer(directory)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    told = oracle(directory, family, torch.float32).generate(ids, max_new_tokens=12, do_sample=False)
    text: str = tokenizer.decode(told[0, ids.shape[1] :], skip_special_tokens=True)
    return text


def gone(processes: Sequence[psutil.Process]) -> bool:
    return all(not each.is_running() or each.status() == psutil.STATUS_ZOMBIE for each in processes)


def least_budget(*words: object) -> str:
    """Of which one of the models has room beside the router: what a process of its own says that is refused more than
    200 MiB. What torch takes depends on its build."""
    named = ["serve", *words, "--memory", "200MiB", "--port", free_port(), *WORDS]
    told = subprocess.run([sys.executable, "-m", "tiermoe", *map(str, named)], capture_output=True, text=True).stderr
    assert re.search("cannot be served: it needs .* of 200 MiB without the router's", told), told
    (least,) = re.findall(r"use --memory (\d+)MiB or more", told)
    return f"{int(least) + 16}MiB"  # another process may take a little more


def test_models_of_a_folder_answer_by_turns_as_each_does_alone_within_the_budget(
    models: dict[str, Path], tmp_path: Path
) -> None:
    for family, directory in models.items():
        (tmp_path / family).symlink_to(directory)
    (tmp_path / "nothing").mkdir()
    named = ("--models-dir", tmp_path)
    budget = least_budget(*named)
    with serving(*named, "--alias", f"first={FAMILIES[0]}", memory=budget) as (process, client):
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == sorted(FAMILIES)
        with Memory(process.pid) as held:
            for family in FAMILIES:
                assert ask(client, family) == expected(models[family], family)
        assert held.samples > 10
        assert held.resident <= parse_size(budget)
        stats = {each["name"]: each for each in client.get("/stats").json()["models"]}
        assert [stats[family]["loads"] for family in FAMILIES] == [1, 1]
        assert [stats[family]["status"] for family in FAMILIES] == ["unloaded", "loaded"]  # one at a time
        own = client.get(f"/stats?model={FAMILIES[1]}").json()
        assert own["memory_budget_bytes"] == stats[FAMILIES[1]]["memory_budget_bytes"]
        with ThreadPoolExecutor(1) as thread:  # it ends while another one is loaded
            waiting = thread.submit(client.post, "/v1/completions", json={"model": "first", "prompt": PROMPT})
            until(lambda: client.get("/health").json()["models"][FAMILIES[0]] == "loading")
            children = until(process.children)
            process.terminate()
            assert waiting.result().status_code == 503
        assert process.wait(PATIENCE_S) == 0
        assert gone(children)


def test_the_server_of_a_model_ends_with_its_input(models: dict[str, Path], tmp_path: Path) -> None:
    """And so when the router has ended, however it has."""
    words = ["-m", "tiermoe.cli.serve_models", "serve", models[FAMILIES[0]], "--host", tmp_path / "a.sock", *WORDS]
    process = subprocess.Popen([sys.executable, *map(str, words)], stdin=subprocess.PIPE)
    try:
        until((tmp_path / "a.sock").exists)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 1
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name a model, several, or a folder of models with --models-dir"),
        (("A", "--alias", "x=A"), "--alias does nothing for one model; leave it out, or name several models"),
        (("A", "--keep-alive", "5m"), "--keep-alive does nothing for one model"),
        (("A", "--models-max", "2"), "--models-max does nothing for one model"),
        (("A", "B", "--name", "x"), "--name belongs to one model, and several are named"),
        (("A", "B", "--replicas", "2"), "--replicas belongs to one model"),
        (("A", "B", "--draft", "C"), "--draft MODEL belongs to one model"),
        (("A", "B", "--also", "there"), "--also belongs to one model"),
        (("A", "B", "--store", "there"), "--store belongs to one model"),
        (("A", "A"), "two models are called A: A and A; rename one, or serve one of them"),
        (("A", "B", "--keep-alive", "soon"), "--keep-alive 'soon' is not a time; write it like 90s, 10m, 2h or never"),
        (("A", "B", "--alias", "x"), "--alias x is not NAME=MODEL; write it like --alias small=A"),
        (("A", "B", "--alias", "x=C"), "--alias x=C: there is no model C; there are A, B"),
        (("A", "B", "--alias", "x=A", "--alias", "x=B"), "--alias x=B: x is an alias of A already; choose another one"),
        (("A", "B", "--alias", "B=A"), "--alias B=A: B is the name of a model; choose another alias"),
        (("--models-dir", "nowhere"), "--models-dir nowhere is no folder; name the folder that has the models'"),
        (
            ("A", "B", "--host", "nowhere/x.sock"),
            "cannot listen on nowhere/x.sock: No such file or directory, or choose",
        ),
    ],
)
def test_what_is_refused_before_anything_is_planned(
    words: Sequence[str], message: str, tiermoe_: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in tiermoe_("serve", *words, "--port", free_port()).cause


def test_sampling_out_of_range(tiermoe_: Command, shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_models, "_ask_for_budgets", lambda asked: serve_models._budgets(**asked))
    outcome = tiermoe_("serve", "--models-dir", shipped.parent, "--top-p", "2", "--port", free_port())
    assert "top-p must be from 0, the likeliest token alone, to 1, got 2" in outcome.cause


def test_a_folder_without_models(tiermoe_: Command, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    outcome = tiermoe_("serve", "--models-dir", tmp_path, "--port", free_port())
    assert f"--models-dir {tmp_path} has no models: no folder with a config.json, and no GGUF file" in outcome.cause
    assert f"{tmp_path / 'nothing'} has no model (no config.json, no GGUF file) and is left out" in outcome.err
