"""`tiermoe serve` as a process: loading, answering, ending."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.serving import free_port
from patience import PATIENCE_S, until
from serving import answers, wait_until_loaded

HANGING = """
import ctypes, sys
from tiermoe.cli import serve
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.cli.main import main
serve.GRACE_S = 3600
RequestLoop.step = lambda self: ctypes.CDLL(None).sleep(3600)
sys.exit(main())
"""
"""The command, whose steps never come back from C. It waits an hour for them."""


AT_ONCE = """
import os, signal, sys, threading, time
from tiermoe.cli.listening import wait_for_a_signal
def both():
    before = signal.default_int_handler, signal.SIG_IGN  # ignored where a shell runs tests in the background
    while signal.getsignal(signal.SIGINT) in before:
        time.sleep(0.01)
    sys.setswitchinterval(60)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=both).start()
wait_for_a_signal()
"""
"""A process that gets two signals before its main thread runs again."""

EARLY = """
import sys
from tiermoe.cli.main import main
try:
    main()
finally:
    print("torch" in sys.modules)
"""
"""The command, which says whether it has imported torch."""

TEMPLATE = "{% for message in messages %}{{ message.content }}!{% endfor %}"


@pytest.fixture
def server(
    shipped: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    port = free_port()
    command = [sys.executable, *getattr(request, "param", ("-m", "tiermoe"))]
    command += ["serve", str(shipped), "--port", str(port), "--memory", "2GiB", "--lanes", "1", "--kv-memory", "256MiB"]
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    command += ["--temperature", "0", "--chat-template-file", str(tmp_path / "own.jinja")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            until(lambda: answers(process, client))
            yield process, client
    finally:
        process.kill()
        process.wait()


def takes_signals(process: subprocess.Popen[str]) -> bool:
    """Whether it has a handler for SIGTERM; its model is loaded a moment before. True where the system does not say."""
    status = Path(f"/proc/{process.pid}/status")
    caught = re.search(r"^SigCgt:\s*(\w+)$", status.read_text(), re.MULTILINE) if status.exists() else None
    return caught is None or bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def signal_another_thread(process: subprocess.Popen[str]) -> None:
    """SIGTERM for any thread but the first, where the system can name one: it takes one where the first has a signal
    already."""
    if sys.platform != "linux":
        process.send_signal(signal.SIGTERM)
        return
    threads = [int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir() if int(task.name) != process.pid]
    assert any(ctypes.CDLL(None).tgkill(process.pid, each, signal.SIGTERM) == 0 for each in threads)  # one may end


def test_a_server_answers_while_it_loads_and_ends_its_answers(
    server: tuple[subprocess.Popen[str], httpx.Client],
) -> None:
    process, client = server
    health = client.get("/health")
    if health.status_code == 503:  # it may be there already
        assert health.json()["status"] == "loading"
        assert health.headers["Retry-After"]
    models = client.get("/v1/models")
    assert models.status_code == 200 or "being loaded" in models.json()["error"]["message"]
    wait_until_loaded(process, client)
    until(lambda: takes_signals(process))
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/health", headers={"Host": "evil.example:8000"}).status_code == 403
    assert "Access-Control-Allow-Origin" not in client.get("/health", headers={"Origin": "http://localhost:1"}).headers
    texts = [
        client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 12, **more}).json()["choices"][0]["text"]
        for more in ({}, {"temperature": 0})
    ]
    assert texts[0] == texts[1]  # as the command says; the model's own temperature is .7
    ids = client.post("/tokenize", json={"messages": [{"role": "user", "content": "Once"}]}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "Once!"
    asked = {"prompt": "Once upon a time", "max_tokens": 60, "stream": True, "temperature": 0}
    with client.stream("POST", "/v1/completions", json=asked) as response:
        lines = response.iter_lines()
        told = [next(lines)]
        signal_another_thread(process)
        told += [line for line in lines if line]
    assert told[-1] == "data: [DONE]"
    (end,) = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in told[-2:-1]]
    assert end in ("length", "stop")
    assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("server", [("-c", HANGING)], indirect=True)
@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)])
def test_a_second_signal_ends_a_server_that_hangs(
    server: tuple[subprocess.Popen[str], httpx.Client], signals: tuple[signal.Signals, signal.Signals]
) -> None:
    process, client = server
    wait_until_loaded(process, client)
    until(lambda: takes_signals(process))
    asked = {"prompt": "Once upon a time", "stream": True}
    with client.stream("POST", "/v1/completions", json=asked) as response:
        assert response.status_code == 200
        process.send_signal(signals[0])
        status = 200
        while status == 200:  # until the first one is taken in
            with client.stream("POST", "/v1/completions", json=asked) as another:
                status = another.status_code
        assert status == 503
        process.send_signal(signals[1])
        assert process.wait(PATIENCE_S) == -signals[1]
    assert process.stderr is not None
    assert process.stderr.read().endswith("have 3600 seconds to end; another signal ends the server at once\n")


def test_signals_at_once_are_one_and_print_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("serve", "nowhere"), "nowhere does not exist; name a model directory"),
        (("serve", "empty", "--temperature", "1"), "has no config.json"),
        (("serve", "dense"), "is a 'llama' model without experts"),
        (("serve", "torn.gguf"), "is not a GGUF file"),
        (("serve", "stories-7m", "empty", "--temperature", "1"), "has no config.json"),
        (("run", "empty", "Once", "--bits", "4"), "has no config.json"),
        (("run", "torn.gguf", "Once", "--bits", "4"), "is not a GGUF file"),
    ],
)
def test_a_folder_that_is_no_model_is_refused_before_torch_is_imported(
    tmp_path: Path, words: tuple[str, ...], cause: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "torn.gguf").write_text("x")
    port = ("--port", str(free_port())) if words[0] == "serve" else ()
    command = [sys.executable, "-c", EARLY, *words, *port]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert cause in done.stderr
