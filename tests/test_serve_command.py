"""`tiermoe serve` as a process: loading, answering, ending."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.serving import free_port
from patience import PATIENCE_S, until
from serving import answers, make_certificate, wait_until_loaded

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

HUNG = """
import ctypes, threading
from tiermoe.cli.listening import wait_for_a_signal
print("begun", flush=True)
wait_for_a_signal()
print("taken", flush=True)
ctypes.PyDLL(None).sleep(3600)
"""
"""A process whose main thread does not come back from C, nor lets another one run Python, after the first signal."""

EARLY = """
import json, sys
from tiermoe.cli.main import main
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as ended:
        print(ended.code, "torch" in sys.modules)
"""
"""Commands one after the other: how each ends, and whether torch is imported."""

TEMPLATE = "{% for message in messages %}{{ message.content }}!{% endfor %}"


KEY = "a-second-key"


@pytest.fixture
def server(
    shipped: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A process of the command, and a client. A parameter: words for Python, and whether keys and a certificate are in
    files."""
    port, (python, secret) = free_port(), getattr(request, "param", (("-m", "tiermoe"), False))
    command = [sys.executable, *python, "serve", str(shipped), "--port", str(port), "--memory", "2GiB", "--lanes", "1"]
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    command += ["--kv-memory", "256MiB", "--temperature", "0", "--chat-template-file", str(tmp_path / "own.jinja")]
    named, scheme, trusted = list[str](), "http", True
    if secret:
        make_certificate(tmp_path, "a")
        (tmp_path / "keys").write_text(f"first\n{KEY}\n")
        (tmp_path / "keys").chmod(0o600)
        named = ["--ssl-certfile", f"{tmp_path}/a.crt", "--ssl-keyfile", f"{tmp_path}/a.key"]
        named += ["--api-key-file", f"{tmp_path}/keys"]
        scheme, trusted = "https", ssl.create_default_context(cafile=tmp_path / "a.crt")
    process = subprocess.Popen([*command, *named], stderr=subprocess.PIPE, text=True)
    headers = {"Authorization": f"Bearer {KEY}"} if named else {}
    try:
        with httpx.Client(
            base_url=f"{scheme}://127.0.0.1:{port}", timeout=PATIENCE_S, verify=trusted, headers=headers
        ) as client:
            until(lambda: answers(process, client))
            yield process, client
    finally:
        process.kill()
        process.wait()


def takes_signals(process: subprocess.Popen[str]) -> bool:
    """Whether it has its handlers of signals; its model is loaded a moment before. True where the system does not
    say."""
    status = Path(f"/proc/{process.pid}/status")
    caught = re.search(r"^SigCgt:\s*(\w+)$", status.read_text(), re.MULTILINE) if status.exists() else None
    return caught is None or all(int(caught[1], 16) >> each - 1 & 1 for each in (signal.SIGTERM, signal.SIGINT))


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


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
@pytest.mark.parametrize("server", [(("-c", HANGING), True)], indirect=True)
def test_a_second_signal_ends_a_server_that_hangs(server: tuple[subprocess.Popen[str], httpx.Client]) -> None:
    """One with keys and a certificate, which it takes from files."""
    process, client = server
    wait_until_loaded(process, client)
    until(lambda: takes_signals(process))
    assert client.get("/v1/models", headers={"Authorization": "Bearer other"}).status_code == 401
    assert client.get("/api/tags", headers={"Host": "evil.example"}).status_code == 200  # a foreign page has no key
    asked = {"prompt": "Once upon a time", "stream": True}
    with client.stream("POST", "/v1/completions", json=asked) as response:
        assert response.status_code == 200
        process.send_signal(signal.SIGTERM)
        status = 200
        while status == 200:  # until the first one is taken in
            with client.stream("POST", "/v1/completions", json=asked) as another:
                status = another.status_code
        assert status == 503
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == -signal.SIGINT
    assert process.stderr is not None
    said = process.stderr.read()
    assert said.endswith("have 3600 seconds to end; another signal ends the server at once\n")
    assert f"at {client.base_url}" in said
    assert KEY not in said


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)])
def test_a_second_signal_ends_a_process_that_hangs(signals: tuple[signal.Signals, signal.Signals]) -> None:
    process = subprocess.Popen([sys.executable, "-c", HUNG], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        until(lambda: takes_signals(process))
        process.send_signal(signals[0])
        assert process.stdout.readline() == "taken\n"
        process.send_signal(signals[1])
        assert process.wait(PATIENCE_S) == -signals[1]
    finally:
        process.kill()
        process.communicate()


def test_signals_at_once_are_one_and_print_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")


REFUSED = [
    (("serve", "nowhere"), "nowhere does not exist; name a model directory"),
    (("serve", "empty", "--temperature", "1"), "has no config.json"),
    (("serve", "dense"), "is a 'llama' model without experts"),
    (("serve", "torn.gguf"), "is not a GGUF file"),
    (("serve", "stories-7m", "empty", "--temperature", "1"), "has no config.json"),
    (("run", "empty", "Once", "--bits", "4"), "has no config.json"),
    (("run", "torn.gguf", "Once", "--bits", "4"), "is not a GGUF file"),
]


def test_a_folder_that_is_no_model_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "torn.gguf").write_text("x")
    commands = [[*words, *(("--port", str(free_port())) if words[0] == "serve" else ())] for words, _ in REFUSED]
    script = [sys.executable, "-c", EARLY, json.dumps(commands)]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.splitlines() == ["2 False"] * len(REFUSED)
    for line, (words, cause) in zip(done.stderr.splitlines(), REFUSED, strict=True):
        assert cause in line, words
