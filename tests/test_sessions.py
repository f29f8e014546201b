"""Which conversation a request belongs to."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.datastructures import Headers

from tiermoe.serve.replicas import GATHERED, HEADER, SessionId, session_of

SYSTEM, FIRST, ANSWER, SECOND = "be brief", "who is there", "a king", "and who else"
CHAT = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": FIRST}]
SAID = [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": SECOND}]
PARTS = [{"type": "input_text", "text": FIRST}]
TURNS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("chat", {"messages": CHAT}, {"messages": [*CHAT, *SAID], "temperature": 0}),
    ("anthropic", {"system": SYSTEM, "messages": CHAT[1:]}, {"system": SYSTEM, "messages": [*CHAT[1:], *SAID]}),
    (
        "responses",
        {"instructions": SYSTEM, "input": FIRST},
        {"instructions": SYSTEM, "input": [{"role": "user", "content": PARTS}, *SAID]},
    ),
    ("text", {"prompt": "a" * 300}, {"prompt": "a" * 300 + "b"}),
    ("tokens", {"prompt": [[1, 2] * 200, [3]]}, {"prompt": [[1, 2] * 200 + [9]]}),
    ("named", {"messages": CHAT, "prompt_cache_key": "k"}, {"prompt": "other", "prompt_cache_key": "k"}),
]


@pytest.mark.parametrize(("first", "second"), [turns[1:] for turns in TURNS], ids=[turns[0] for turns in TURNS])
def test_turns_of_a_conversation_have_one_session(first: dict[str, Any], second: dict[str, Any]) -> None:
    sessions = {session_of(json.dumps(each).encode()) for each in (first, second)}
    assert len(sessions) == 1
    assert None not in sessions


def test_conversations_have_sessions_of_their_own() -> None:
    others = [
        {"messages": [CHAT[0], {"role": "user", "content": "who was it"}]},
        {"messages": [{"role": "system", "content": "be long"}, CHAT[1]]},
        {"prompt": "a" * 256},
        {"prompt": "b" + "a" * 255},
    ]
    found = {session_of(json.dumps(each).encode()) for each in ({"messages": CHAT}, *others)}
    assert len(found - {None}) == 5


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b'{"prompt": []}', b'{"prompt": {}}', b'{"messages": [3]}'])
def test_what_is_no_conversation_has_none(body: bytes) -> None:
    assert session_of(body) is None


def asked(parts: list[bytes], *headers: tuple[bytes, bytes]) -> tuple[str | None, bytes]:
    """What an app behind finds: the header, and the body."""
    waiting = [
        {"type": "http.request", "body": part, "more_body": index + 1 < len(parts)} for index, part in enumerate(parts)
    ]
    found: list[Any] = []

    async def receive() -> Any:
        return waiting.pop(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        found.extend((Headers(scope=scope).get(HEADER), body))

    async def send(_: Any) -> None:
        raise AssertionError

    asyncio.run(SessionId(app)({"type": "http", "method": "POST", "headers": list(headers)}, receive, send))
    return found[0], found[1]


def test_the_header_is_made_and_the_body_kept() -> None:
    body = json.dumps({"messages": CHAT}).encode()
    assert asked([body[:10], body[10:]]) == (session_of(body), body)
    assert asked([body], (b"x-session-id", b"mine")) == ("mine", body)
    assert asked([b"{"]) == (None, b"{")


def test_a_body_that_is_too_large_is_not_gathered() -> None:
    large = [b" " * (GATHERED + 1), b"{}", b""]
    assert asked(large) == (None, b"".join(large))
