"""Clients that leave before their answer is whole: what they asked for ends with the step that runs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
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


class Client:
    """Asks an app for a completion, and may leave. sent: what the app has answered."""

    def __init__(self, app: Any, tokens: int, stream: bool = False) -> None:
        self.sent: list[Any] = []
        self._gone = asyncio.Event()
        asked = {"prompt": [5, 6, 7], "max_tokens": tokens, "temperature": 0, "stream": stream}
        self._body: bytes | None = json.dumps(asked).encode()
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
            "headers": headers, "query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("test", 80),
        }  # fmt: skip
        self._task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def leave(self) -> None:
        """Returns once the app has given the request up."""
        self._gone.set()
        await self._task

    async def answer(self) -> Any:
        await self._task
        return json.loads(b"".join(each.get("body", b"") for each in self.sent))

    async def _receive(self) -> Any:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


async def happens(happened: Any) -> None:
    while not happened():
        await asyncio.sleep(0.001)


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


@pytest.mark.parametrize("held", ["prefill", "decode"], indirect=True)
def test_a_client_that_waits_for_a_whole_answer_leaves(held: tuple[Held, Worker, Ended, Any]) -> None:
    engine, worker, ended, app = held

    async def asked() -> Client:
        client = Client(app, 50)
        await happens(engine.reached.is_set)
        await client.leave()
        engine.let_go()
        await happens(lambda: not worker.busy)
        return client

    client = asyncio.run(asked())
    assert [each["status"] for each in client.sent if "status" in each] == [499]
    assert not ended
    assert worker.loop.counts.generated_tokens <= 2
    assert worker.loop.counts.aborted == 1


@pytest.mark.parametrize("held", ["decode"], indirect=True)
def test_a_client_leaves_the_queue(held: tuple[Held, Worker, Ended, Any]) -> None:
    engine, worker, ended, app = held

    async def asked() -> Any:
        first = Client(app, 50)
        await happens(engine.reached.is_set)
        second, third = Client(app, 50), Client(app, 3)
        await happens(lambda: worker.waiting == 2)
        await second.leave()
        engine.let_go()
        return await first.answer(), await third.answer()

    answers = asyncio.run(asked())
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [50, 3]
    worker.close(PATIENCE_S)
    assert ended == ["length", "length"]
    assert worker.loop.counts.aborted == 1


@pytest.mark.parametrize("held", ["prefill"], indirect=True)
def test_a_stream_that_waits_is_kept_alive(
    held: tuple[Held, Worker, Ended, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own prompt is being read, or it is in the queue: a comment comes as long as there is nothing to tell."""
    monkeypatch.setattr("tiermoe.serve.answers.KEEP_ALIVE_S", 0.01)
    engine, worker, _, app = held

    def told(client: Client) -> str:
        return b"".join(each.get("body", b"") for each in client.sent).decode()

    async def asked() -> list[str]:
        clients = [Client(app, 3, stream=True) for _ in range(2)]
        await happens(lambda: all(told(client).count(": ping") > 2 for client in clients))
        assert worker.waiting == 1
        before = [told(client) for client in clients]
        engine.let_go()
        await happens(lambda: all("[DONE]" in told(client) for client in clients))
        return before

    for before in asyncio.run(asked()):
        assert "data:" not in before


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
