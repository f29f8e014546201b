"""Clients that leave before their answer is whole: what they asked for ends with the step that runs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from patience import PATIENCE_S, until
from serving import connected, running
from tiermoe.batch import Batch
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.serve.app import create_app
from tiermoe.serve.served import Served
from tiermoe.serve.worker import Worker


class Held:
    """An engine that waits in each step of `phase` until that is let go. reached: such a step has begun."""

    def __init__(self, engine: Any, phase: str) -> None:
        self.reached, self._steps = threading.Event(), threading.Semaphore(0)
        self._engine, self._phase = engine, phase
        self.more_read = 0

    def step(self, rows: Batch, cache: Any, every: bool = False) -> Any:
        if rows.phase == self._phase:
            self.reached.set()
            self._steps.acquire()
        return self._engine.step(rows, cache, every)

    def let_go(self, steps: int = 1000) -> None:
        self._steps.release(steps)

    def snapshot(self) -> Any:
        now = self._engine.snapshot()
        return replace(now, bytes_read=now.bytes_read + self.more_read)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Ended(list[str]):
    """The reasons of ends that a worker tells of."""

    def __call__(self, piece: Any, _: Any) -> None:
        self.append(piece.finish)


@pytest.fixture
def held(served: Served, request: pytest.FixtureRequest) -> Iterator[tuple[Held, Worker, Ended, Any]]:
    """An engine held in a phase, a worker of one row over it, the ends that it tells of, and the app."""
    engine, ended = Held(served.engine, request.param), Ended()
    worker = Worker(RequestLoop(engine, served.tokenizer, 1, set()), 8, ended)
    yield engine, worker, ended, create_app(replace(served, worker=worker))
    engine.let_go()
    worker.close(1)


class Counted:
    """An app; done: how many requests it has given up or answered."""

    def __init__(self, app: Any) -> None:
        self.done = 0
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            self.done += 1


SAID = [{"role": "user", "content": "once upon"}]
MOST = 50  # tokens; each of them waits to be let go
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6, 7], "max_tokens": MOST, "n": 2},
    "/v1/chat/completions": {"messages": SAID, "max_tokens": MOST, "n": 2},
    "/v1/responses": {"input": "once upon", "max_output_tokens": MOST},
    "/v1/messages": {"messages": SAID, "max_tokens": MOST},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("held", "path"), [*(("decode", path) for path in ASKED), ("prefill", "/v1/completions")], indirect=["held"]
)
def test_closed_connections_end_their_requests_with_the_step(
    held: tuple[Held, Worker, Ended, Any], path: str, stream: bool
) -> None:
    """One is at work (its prompt is read, or it is answered), others wait for its row."""
    engine, worker, ended, app = held
    counted, counts = Counted(app), worker.loop.counts
    with running(counted) as address:
        body = ASKED[path] | {"model": "tiny", "stream": stream, "temperature": 0}
        connections = [connected(address, path, body)]
        assert engine.reached.wait(PATIENCE_S)
        connections.append(connected(address, path, body))
        asked = 2 * ASKED[path].get("n", 1)
        until(lambda: worker.waiting == asked - 1)
        for each in connections:
            each.close()
        until(lambda: counted.done == 2)
        engine.let_go(1)
        until(lambda: not worker.busy)
    assert (counts.requests, counts.aborted, worker.loop.scheduler.running, worker.waiting) == (asked, asked, 0, 0)
    assert counts.generated_tokens <= 2
    assert not ended


@pytest.mark.parametrize("held", ["decode"], indirect=True)
def test_a_client_leaves_the_queue(held: tuple[Held, Worker, Ended, Any]) -> None:
    """Those before and after it are answered."""
    engine, worker, ended, app = held
    counted, path = Counted(app), "/v1/completions"
    with running(counted) as address, ThreadPoolExecutor(2) as threads:

        def asks(tokens: int) -> Future[httpx.Response]:
            body = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": tokens}
            return threads.submit(httpx.post, f"{address}{path}", json=body, timeout=PATIENCE_S)

        first = asks(MOST)
        assert engine.reached.wait(PATIENCE_S)
        with connected(address, path, ASKED[path]):
            until(lambda: worker.waiting == 2)
        until(lambda: counted.done == 1)
        third = asks(3)
        until(lambda: worker.waiting == 3)
        engine.let_go()
        tokens = [each.result().json()["usage"]["completion_tokens"] for each in (first, third)]
    assert tokens == [MOST, 3]
    worker.close(PATIENCE_S)
    assert ended == ["length", "length"]
    assert worker.loop.counts.aborted == 2


def told(connection: socket.socket, enough: Callable[[str], bool]) -> str:
    """What comes over a connection until it is enough."""
    connection.settimeout(PATIENCE_S)
    text = ""
    while not enough(text):
        text += connection.recv(1 << 16).decode()
    return text


@pytest.mark.parametrize("held", ["prefill"], indirect=True)
@pytest.mark.parametrize(
    ("path", "asked", "sign", "end"),
    [
        ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 3, "stream": True}, ": ping", "[DONE]"),
        ("/api/generate", {"prompt": "a", "options": {"num_predict": 3}}, '"response": ""', '"done": true'),
    ],
)
def test_a_stream_that_waits_is_kept_alive(
    held: tuple[Held, Worker, Ended, Any], monkeypatch: pytest.MonkeyPatch, path: str, asked: Any, sign: str, end: str
) -> None:
    """Its own prompt is being read, or it is in the queue: a comment comes, or an object without a text."""
    monkeypatch.setattr("tiermoe.serve.answers.KEEP_ALIVE_S", 0.01)
    engine, worker, _, app = held
    with running(app) as address, connected(address, path, asked) as one, connected(address, path, asked) as other:
        for before in [told(each, lambda text: text.count(sign) > 2) for each in (one, other)]:
            assert "data:" not in before
            assert end not in before
        assert worker.waiting == 1
        engine.let_go()
        for each in (one, other):
            told(each, lambda text: end in text)


@pytest.mark.parametrize("held", ["prefill"], indirect=True)
def test_health_tells_of_a_batch_that_gets_no_further(
    held: tuple[Held, Worker, Ended, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiermoe.serve.app.STALLED_S", 0)
    engine, worker, _, app = held
    with running(app) as address:

        def health() -> tuple[int, Any]:
            told = httpx.get(f"{address}/health", timeout=PATIENCE_S)
            return told.status_code, told.json()

        assert [health() for _ in range(2)] == [(200, {"status": "ok"})] * 2
        with connected(address, "/v1/completions", ASKED["/v1/completions"] | {"temperature": 0}):
            assert engine.reached.wait(PATIENCE_S)
            assert health() == (200, {"status": "ok"})
            status, told = health()
            assert (status, told["status"], told["stalled_s"] >= 0) == (503, "stalled", True)
            engine.more_read += 1  # a step that takes long, and reads
            assert health() == (200, {"status": "ok"})
            assert health()[0] == 503
            engine.let_go()
            until(lambda: not worker.busy)
        # idle, and its thread has left the last step
        until(lambda: [health() for _ in range(2)] == [(200, {"status": "ok"})] * 2)
