"""`tiermoe serve --replicas`: two processes on Ray Serve behind one address, of which one is killed."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from benchmarks.serving import free_port
from commands import Command
from patience import PATIENCE_S, until
from serving import make_certificate, wait_until_loaded
from tiermoe.cli.serve import one_share


def replicas(server: subprocess.Popen[str]) -> list[psutil.Process]:
    found = []
    for each in psutil.Process(server.pid).children(recursive=True):
        try:
            if each.cmdline()[:1] and each.cmdline()[0].startswith("ray::ServeReplica"):
                found.append(each)
        except psutil.Error:  # it has just ended
            continue
    return found


@pytest.fixture
def server(shipped: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """The command and a client, by HTTPS: one file has the certificate and its key."""
    pytest.importorskip("ray")
    make_certificate(tmp_path, "a")
    both = tmp_path / "both.pem"
    both.write_bytes((tmp_path / "a.crt").read_bytes() + (tmp_path / "a.key").read_bytes())
    port = free_port()
    words = ["--replicas", "2", "--port", str(port), "--memory", "1500MiB", "--lanes", "1", "--context", "256"]
    words += ["--ssl-certfile", str(both)]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}  # else it leaves a token in the user's folder
    process = subprocess.Popen([sys.executable, "-m", "tiermoe", "serve", str(shipped), *words], env=environment)
    trusted = ssl.create_default_context(cafile=tmp_path / "a.crt")
    client = httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusted, timeout=PATIENCE_S)
    try:
        wait_until_loaded(process, client)
        yield process, client
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def conversation(client: openai.OpenAI, number: int) -> tuple[int, int]:
    """Tokens of a first prompt, and those of them that its second turn finds."""
    messages: list[Any] = [{"role": "user", "content": f"Once upon a time there were {number} kings"}]
    first = client.chat.completions.create(model="stories-7m", messages=messages, max_tokens=4, temperature=0)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    messages += [said, {"role": "user", "content": "And then?"}]
    second = client.chat.completions.create(model="stories-7m", messages=messages, max_tokens=4, temperature=0)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    return first.usage.prompt_tokens, second.usage.prompt_tokens_details.cached_tokens or 0


@pytest.mark.long
def test_one_of_two_is_killed_and_requests_go_on(server: tuple[subprocess.Popen[str], httpx.Client]) -> None:
    process, http = server
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=5, http_client=http) as client:
        for number in range(3):  # every turn where the one before was
            tokens, found = conversation(client, number)
            assert found == tokens
        asked = {http.get("/stats", headers={"x-session-id": str(i)}).json()["requests"] for i in range(40)}
        assert len(replicas(process)) == 2
        assert len(asked) == 2  # three conversations fall in two unlike parts
        killed, _ = replicas(process)
        killed.send_signal(signal.SIGKILL)
        for number in range(3, 9):
            tokens, found = conversation(client, number)
            assert tokens > 0
        until(lambda: killed.pid not in {each.pid for each in replicas(process)} and len(replicas(process)) == 2)
        conversation(client, 9)


def test_each_has_its_share() -> None:
    share = one_share({"memory": "3GiB", "bits": 4}, 3)
    assert (share["memory"], share["bits"]) == (1 << 30, 4)
    assert share["threads"] >= 1
    assert one_share({"memory": "1GiB", "threads": 5}, 2)["threads"] == 5
    free = one_share({}, 2)["memory"]
    assert 0 < free < psutil.virtual_memory().total // 2


def test_without_ray_it_says_what_to_install(tiermoe_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'tiermoe[ray]'" in tiermoe_("serve", "nowhere", "--replicas", "2").cause
