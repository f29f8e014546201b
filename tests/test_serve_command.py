"""`tiermoe serve` as a process: loading, answering, ending."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.serving import free_port


@pytest.fixture
def server(shipped: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    port = free_port()
    command = [sys.executable, "-m", "tiermoe", "serve", str(shipped), "--port", str(port), "--memory", "2GiB"]
    command += ["--lanes", "1", "--kv-memory", "256MiB"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    transport = httpx.HTTPTransport(retries=20)  # it listens once its modules are imported
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, transport=transport) as client:
        yield process, client
    process.kill()
    process.wait()


def test_a_server_answers_while_it_loads_and_ends_its_answers(
    server: tuple[subprocess.Popen[str], httpx.Client],
) -> None:
    process, client = server
    health = client.get("/health")
    if health.status_code == 503:  # it may be there already
        assert health.json()["status"] == "loading"
        assert health.headers["Retry-After"]
    while client.get("/health").status_code == 503 and process.poll() is None:
        models = client.get("/v1/models")
        assert models.status_code == 200 or "being loaded" in models.json()["error"]["message"]
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/health", headers={"Host": "evil.example:8000"}).status_code == 403
    assert "Access-Control-Allow-Origin" not in client.get("/health", headers={"Origin": "http://localhost:1"}).headers
    asked = {"prompt": "Once upon a time", "max_tokens": 60, "stream": True, "temperature": 0}
    with client.stream("POST", "/v1/completions", json=asked) as response:
        lines = response.iter_lines()
        told = [next(lines)]
        process.send_signal(signal.SIGTERM)
        told += [line for line in lines if line]
    assert told[-1] == "data: [DONE]"
    (end,) = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in told[-2:-1]]
    assert end in ("length", "stop")
    assert process.wait(timeout=60) == 0
