"""A server over a tiny model, and workers whose answers are given."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_S, until
from tiermoe.model.chat.template import chat_template

KEY = "secret"


@contextmanager
def running(app: Any) -> Iterator[str]:
    """Serves an app from a thread; its address."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_keep_alive=PATIENCE_S))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def answers(process: subprocess.Popen[str], client: Any) -> bool:
    """Whether the server of a process answers /health, be it that it loads."""
    import httpx

    assert process.poll() is None
    try:
        client.get("/health")
    except httpx.TransportError:
        return False
    return True


def wait_until_loaded(process: subprocess.Popen[str], client: Any) -> None:
    """Returns once the server of a process has loaded its model."""
    until(lambda: answers(process, client) and client.get("/health").status_code == 200)


def connected(address: str, path: str, asked: dict[str, Any]) -> socket.socket:
    """A connection over which something was asked for; who closes it leaves."""
    body = json.dumps(asked).encode()
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    lines = (f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", f"Content-Length: {len(body)}")
    connection.sendall("\r\n".join((*lines, "", "")).encode() + body)
    return connection


def make_certificate(folder: Path, name: str, *words: str) -> None:
    """A certificate of 127.0.0.1 and its key, as name.crt and name.key. words: further ones of openssl's command."""
    files = ["-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=IP:127.0.0.1", *files, *(words or ("-nodes",))],
        check=True, capture_output=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A tiny model of texts, four rows of up to 64 tokens."""
    import torch

    import tiermoe
    from tiermoe.engine.sampling import Sampling
    from tiermoe.serve.served import served_of
    from tiny import write

    directory = write(tmp_path_factory.mktemp("served"), "qwen3_moe", torch.float32)
    model, tokenizer = tiermoe.load(
        directory, device="cpu", lanes=1, bits=16, dense_bits=16, memory="4GiB", batch=4, context=64
    )
    model.tiermoe.generation_config.eos_token_id = None  # answers are as long as they are asked for
    served = served_of(model.tiermoe, tokenizer, "tiny", Sampling(max_tokens=16), 8)
    yield served
    served.worker.close(1)
    model.tiermoe.close()


@pytest.fixture(scope="module")
def address(served: Any) -> Iterator[str]:
    from tiermoe.serve.app import create_app

    with running(create_app(served, [KEY])) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(address: str) -> Iterator[Any]:
    import httpx

    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=address, headers=headers, timeout=PATIENCE_S) as client:
        yield client


class Letters:
    """A tokenizer: every token is a letter; 100 and 101 are the halves of one character."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        data = b"".join({100: b"\xc3", 101: b"\xa9"}.get(token, bytes([97 + token % 26])) for token in tokens)
        return data.decode(errors="replace")


def ids(count: int, seed: int = 1) -> list[int]:
    """Random token ids."""
    return random.Random(seed).choices(range(3, 99), k=count)


def parts_of(text: str, count: int) -> list[str]:
    """The text in random parts, some of them empty."""
    cuts = sorted(random.Random(count).choices(range(len(text) + 1), k=count - 1))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def calls_of(pieces: list[Any]) -> list[Any]:
    """The calls that pieces make: each begins, has what its pieces have, and ends before the next begins."""
    calls, sums, kinds = list[Any](), list[str](), ["end"]
    for piece in pieces:
        assert (kinds[-1] == "end") is (piece.kind == "begin")
        if piece.kind == "begin":
            calls.append(piece.call)
            sums.append("")
        assert piece.call is calls[-1]
        assert bool(piece.arguments) is (piece.kind == "arguments")
        sums[-1] += piece.arguments
        kinds.append(piece.kind)
    assert kinds[-1] == "end"
    assert [call.arguments for call in calls] == sums
    assert len({call.id for call in calls}) == len(calls)
    return calls


class WrappedEngine:
    """An engine of which a subclass replaces some attributes."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Counted(WrappedEngine):
    """Counts steps, and tokens that ran in them."""

    steps = ran = 0

    def step(self, batch: Any, *rest: Any, **named: Any) -> Any:
        self.steps += 1
        self.ran += len(batch.tokens)
        return self._engine.step(batch, *rest, **named)


TEMPLATE = (
    '{# {"name": <function-name>, "arguments": <args-json-object>} #}'
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}{% for m in messages %}{{ m.role }}"
    "{{ m.name or '' }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.arguments.city }}){% endfor %};{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}"
)
"""A chat template with tools and thoughts."""
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'


class Scripted:
    """A worker whose answers are given: a piece for each letter. asked: what it was asked for. finish: why they end."""

    def __init__(self, served: Any, text: str, finish: str = "stop") -> None:
        from tiermoe.engine.request import Piece

        self.loop, self.asked = served.worker.loop, list[Any]()
        self.pieces = [*(Piece(1, letter, (1,)) for letter in text), Piece(1, "", (2,), finish=finish)]
        self.most_waiting = 8

    def stalled_s(self) -> float:
        return 0.0

    def submit(self, requests: Any) -> Any:
        from tiermoe.serve.worker import Answers

        self.asked += requests
        answers = Answers(len(requests), lambda: None)
        for index in range(len(requests)):
            for piece in self.pieces:
                answers.put(index, piece)
        return answers


def use_template(monkeypatch: pytest.MonkeyPatch, served: Any, template: str | None) -> None:
    """Gives a server's model a chat template, for one test."""
    monkeypatch.setattr(served.tokenizer, "chat_template", template)
    monkeypatch.setattr(served, "chat", chat_template(served.tokenizer))


def call_app(app: Any, path: str, body: Any = None, method: str = "", **headers: str) -> Any:
    """The response of an app, without a socket. body: JSON, or its bytes; None: GET."""
    import httpx

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            content = body if body is None or isinstance(body, bytes) else json.dumps(body)
            named = {} if body is None else {"content-type": "application/json"}
            named |= {name.lower(): value for name, value in headers.items()}
            verb = method or ("GET" if body is None else "POST")
            return await client.request(verb, path, content=content, headers=named)

    return asyncio.run(asked())


class Stage:
    """A server whose answers are given."""

    def __init__(self, served: Any) -> None:
        from tiermoe.serve.app import create_app

        self._served = replace(served)
        self.app = create_app(self._served)
        self.worker: Any = None

    def says(self, text: str, template: str | None = TEMPLATE, finish: str = "stop") -> Any:
        """From now on. Its worker."""
        self._served.tokenizer.chat_template = template
        self._served.chat = chat_template(self._served.tokenizer)
        self.worker = self._served.worker = Scripted(self._served, text, finish)
        return self.worker

    def ask(self, path: str, body: Any = None, **headers: str) -> Any:
        return call_app(self.app, path, body, **headers)

    @property
    def prompt(self) -> str:
        """Of the last request."""
        text: str = self._served.tokenizer.decode(self.worker.asked[-1].ids)
        return text


@pytest.fixture(scope="module")
def _stage(served: Any) -> Stage:
    return Stage(served)


@pytest.fixture
def stage(_stage: Stage, served: Any, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(served.tokenizer, "chat_template", served.tokenizer.chat_template)  # as it was, in the end
    return _stage
