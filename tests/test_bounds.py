"""What clients may ask of a server: sizes, counts, nesting, names of the host, pages of others."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from patience import PATIENCE_S, until
from serving import KEY, Scripted, call_app, running
from tiermoe.serve import guards
from tiermoe.serve.app import create_app
from tiermoe.serve.guards import Hosts
from tiermoe.serve.intake import Intake
from tiermoe.serve.served import Served

JSON = {"Content-Type": "application/json"}


class Watched:
    """A tokenizer that is told of each call before it is made."""

    def __init__(self, tokenizer: Any, called: Callable[[], object]) -> None:
        self._tokenizer, self._called = tokenizer, called

    def __call__(self, *args: Any, **named: Any) -> Any:
        self._called()
        return self._tokenizer(*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)


MUCH: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("/v1/completions", {"prompt": [[1]] * 20_000, "n": 128}, 413, None),
    ("/v1/completions", {"prompt": [[1]] * 2049}, 400, "prompt"),
    ("/v1/completions", {"prompt": ["a"] * 3, "n": 3}, 400, "n"),
    ("/v1/completions", {"prompt": "a", "n": 9}, 400, "n"),
    ("/v1/completions", {"prompt": "a", "stop": ["x"] * 17}, 400, "stop"),
    ("/v1/completions", {"prompt": "a", "stop": "x" * 257}, 400, "stop"),
    ("/v1/completions", {"prompt": "a", "stop": ["x"] * 300_000}, 413, None),
    ("/v1/completions", {"prompt": "a", "logit_bias": {str(n): 1 for n in range(1025)}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "a" * 20_000}, 400, "prompt"),
    ("/v1/completions", {"prompt": "a" * 10_000_000}, 413, None),
    ("/v1/completions", {"prompt": "a", "user": [{}] * 100_000}, 413, None),
    ("/v1/chat/completions", {"messages": [1] * 1_000_000}, 413, None),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 2049}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 9}, 400, "n"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}] * 2049, "max_tokens": 1}, 400, None),
    ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 2049}, 400, "input"),
    ("/v1/responses", {"input": "a", "tools": [{"type": "x"}] * 513}, 400, "tools"),
    ("/tokenize", {"prompt": "a" * 15_000_000}, 413, None),
    ("/tokenize", {"prompt": "a" * 20_000}, 400, "prompt"),
    ("/detokenize", {"tokens": [5] * 65}, 400, "tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param"), MUCH)
def test_too_much_is_refused_before_anything_is_made_of_it(
    served: Served, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    calls: list[int] = []
    app = create_app(replace(served, tokenizer=Watched(served.tokenizer, lambda: calls.append(1))))
    response = call_app(app, path, body)
    assert (response.status_code, calls) == (status, [])
    assert response.json()["error"].get("param") == param


def test_punctuation_of_a_text_is_no_structure(http: httpx.Client) -> None:
    text = '[{"a\\\\":1,},' * 10_000
    assert http.post("/tokenize", json={"prompt": "a", "metadata": text}).status_code == 200
    assert http.post("/tokenize", json={"prompt": "a", "metadata": [{"a": 1}] * 30_000}).status_code == 413


def test_nobody_waits_for_a_text_that_is_tokenized(served: Served) -> None:
    """Neither for a large one where a small one comes."""
    begun, go_on = threading.Event(), threading.Event()

    def called() -> None:
        if not begun.is_set():
            begun.set()
            go_on.wait()

    scripted: Any = Scripted(served, "a")
    app = create_app(replace(served, tokenizer=Watched(served.tokenizer, called), worker=scripted))
    large = {"prompt": "a", "user": "b" * 20_000}
    with running(app) as address, httpx.Client(base_url=address, timeout=PATIENCE_S) as client:
        first = threading.Thread(target=lambda: httpx.post(f"{address}/v1/completions", json=large, timeout=PATIENCE_S))
        first.start()
        try:
            assert begun.wait(PATIENCE_S)
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        finally:
            go_on.set()
            first.join()


def test_requests_in_flight_hold_no_more_than_is_planned(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_BODY_S", PATIENCE_S)  # else a slow machine drops the first before the last has come
    intake, refused = Intake(served.context, lambda: None), served.worker.loop.counts.refused
    part = b" " * intake.largest_body
    head = f"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{len(part):x}\r\n".encode()
    with running(create_app(served)) as address, httpx.Client(base_url=address, timeout=PATIENCE_S) as client:
        place = urlsplit(address)

        def asked() -> httpx.Response:
            return client.post("/tokenize", json={"prompt": "a", "padding": "b" * 200_000})

        assert asked().is_success
        with ExitStack() as bodies:  # whose ends do not come
            for _ in range(intake.most // len(part)):
                connection = bodies.enter_context(socket.create_connection((place.hostname, place.port)))
                connection.sendall(head + part)
            until(lambda: asked().status_code == 503)
            full = asked()
            assert (full.status_code, full.headers["Retry-After"]) == (503, "5")
            assert "requests in flight hold" in full.json()["error"]["message"]
        until(lambda: asked().is_success)
    assert served.worker.loop.counts.refused > refused


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = {"a": [found]}
    return found


def test_nesting_has_a_bound(http: httpx.Client) -> None:
    """Within it is no error of the server, whatever copies it, writes it or tells it back."""
    for path, body in (("/v1/completions", "[" * 10_000), ("/v1/responses", json.dumps({"metadata": nested(110)}))):
        response = http.post(path, content=body, headers=JSON)
        assert (response.status_code, response.json()["error"]["param"]) == (400, None)
        assert "recursion limit" in response.json()["error"]["message"]
    deep = nested(95)
    tool = {"type": "function", "name": "f", "parameters": deep}
    call = {"id": "1", "function": {"name": "f", "arguments": json.dumps(deep)}}
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    chat = {"messages": [*said, {"role": "tool", "tool_call_id": "1", "content": "b"}], "max_tokens": 1}
    asked = {"input": "a", "metadata": {"a": deep}, "tools": [tool], "tool_choice": "none", "max_output_tokens": 1}
    assert http.post("/v1/responses", json=asked).json()["metadata"] == {"a": deep}
    assert http.post("/v1/chat/completions", json=chat).is_success


def by_http_client(url: str, body: Any, headers: Any) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("POST", urlsplit(url).path, body, headers)
    response = connection.getresponse()
    return response.status, response.read()


def by_urllib(url: str, body: Any, headers: Any) -> tuple[int, Any]:
    """Which closes its connections."""
    with pytest.raises(urllib.error.HTTPError) as told:
        urllib.request.urlopen(urllib.request.Request(url, body, headers))
    with told.value:
        return told.value.code, told.value.read()


def by_httpx(url: str, body: Any, headers: Any) -> tuple[int, Any]:
    response = httpx.post(url, content=body, headers={**headers, "Connection": "close"}, timeout=PATIENCE_S)
    return response.status_code, response.content


@pytest.mark.parametrize("ask", [by_http_client, by_urllib, by_httpx])
@pytest.mark.parametrize("chunks", [False, True])
def test_clients_hear_that_a_body_is_too_large(address: str, ask: Any, chunks: bool) -> None:
    body = (b" " * (1 << 20) for _ in range(17)) if chunks else b" " * (17 << 20)
    status, told = ask(f"{address}/v1/completions", body, {**JSON, "Authorization": f"Bearer {KEY}"})
    assert (status, b"body has more than" in told) == (413, True)


def test_a_body_has_one_length(address: str) -> None:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret\r\nContent-Type: application/json\r\n"
    )
    body = "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n0\r\n\r\n"
    place = urlsplit(address)
    with socket.create_connection((place.hostname, place.port)) as connection:
        connection.sendall((head + body).encode())
        with connection.makefile("rb") as answer:
            assert answer.readline().startswith(b"HTTP/1.1 400")
            assert b"not both" in answer.read()  # and the connection is closed


def test_any_of_the_keys_opens_however_its_scheme_is_written(served: Served) -> None:
    app = create_app(served, ["one", "two"])
    opens = ["Bearer one", "bearer two", "BEARER one"]
    for value in (*opens, "Bearer on", "Bearer onetwo", "Bearer one two", "bearer wrong", "Basic one"):
        assert call_app(app, "/v1/models", Authorization=value).is_success is (value in opens), value
    for key in ("one", "two"):
        assert call_app(app, "/v1/models", **{"X-Api-Key": key}).is_success
    for headers in ({}, {"X-Api-Key": ""}):
        response = call_app(app, "/v1/models", **headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert response.json()["error"]["type"] == "authentication_error"
    assert call_app(app, "/health").json() == {"status": "ok"}  # without a key


@pytest.mark.parametrize(
    ("hosts", "names", "others"),
    [
        (Hosts("127.0.0.1"), ("localhost:8000", "LOCALHOST", "127.0.0.1", "[::1]:80", "[::1]"),
         ("evil.example:8000", "localhost.evil.example", "192.168.0.7", "[::2]", "")),
        (Hosts("box.lan", ("[fd00::1]", "proxy.lan:443")), ("box.lan", "proxy.lan", "[fd00::1]:8", "localhost"),
         ("lan", "192.168.0.7")),
        (Hosts("0.0.0.0"), ("192.168.0.7:8000", "[fd00::1]"), ("evil.example", "box.lan")),
        (Hosts("127.0.0.1", "*"), ("evil.example",), ()),
        (None, ("evil.example",), ()),
    ],
)  # fmt: skip
def test_a_page_that_rebinds_its_name_reaches_nothing(
    served: Served, hosts: Hosts | None, names: tuple[str, ...], others: tuple[str, ...]
) -> None:
    app = create_app(served, hosts=hosts)
    for name in names:
        assert call_app(app, "/v1/models", Host=name).status_code == 200, name
    for name in others:
        response = call_app(app, "/v1/models", Host=name)
        assert (response.status_code, "--allowed-hosts" in response.text) == (403, True), name


def test_pages_of_others_are_let_ask_where_they_are_named(served: Served) -> None:
    def asked(origins: tuple[str, ...], origin: str) -> tuple[int, str | None]:
        app, asks = create_app(served, origins=origins), {"Access-Control-Request-Method": "POST"}
        before = call_app(app, "/v1/models", method="OPTIONS", Origin=origin, **asks)
        told = call_app(app, "/v1/models", Origin=origin)
        return before.status_code, told.headers.get("Access-Control-Allow-Origin")

    mine, other = "http://localhost:3000", "http://localhost:4000"
    assert asked((), mine) == (405, None)
    assert asked((mine,), mine) == (200, mine)
    assert asked((mine,), other) == (400, None)
