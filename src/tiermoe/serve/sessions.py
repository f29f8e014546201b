"""Sessions: the conversation that a request belongs to, so that all turns reach the replica that holds their prefix.

Ray Serve's router chooses a replica by the header `x-session-id`. Clients hardly send it, so it is made from the
beginning of the conversation, which all turns have.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiermoe.serve.fields import from_json

HEADER = "x-session-id"
GATHERED = 1 << 20
"""Most bytes of a body that is looked into: every request waits while it is parsed."""
_BEGIN = 256
"""Characters, or token ids, of a continued text that name its session: more come with every call."""


def middlewares() -> list[Middleware]:
    """Middleware of Ray Serve's proxy, which finds this function by its name."""
    return [Middleware(SessionId)]


class SessionId:
    """ASGI middleware that adds the header to a request without it, from the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks = scope["type"] == "http" and scope["method"] == "POST" and HEADER not in Headers(scope=scope)
        if not asks:
            await self._app(scope, receive, send)
            return
        parts = deque(await _body_parts(receive))
        session = session_of(b"".join(part.get("body", b"") for part in parts))
        if session is not None:
            scope = {**scope, "headers": [*scope["headers"], (HEADER.encode(), session.encode())]}

        async def again() -> Message:
            return parts.popleft() if parts else await receive()

        await self._app(scope, again, send)


async def _body_parts(receive: Receive) -> list[Message]:
    """All of a body, or more than `GATHERED` bytes of it."""
    parts, had, more = list[Message](), 0, True
    while more and had <= GATHERED:
        parts.append(await receive())
        had += len(parts[-1].get("body", b""))
        more = parts[-1].get("more_body", False)
    return parts


def session_of(body: bytes) -> str | None:
    """Session of a request in any dialect: a digest of `prompt_cache_key`, else of the conversation up to the user's
    first message. None where it has neither."""
    try:
        asked = from_json(body)
    except ValueError:
        return None
    begun = _beginning(asked) if isinstance(asked, dict) else None
    return hashlib.sha256(begun.encode()).hexdigest()[:32] if begun else None


def _beginning(asked: Mapping[str, Any]) -> str | None:
    if isinstance(key := asked.get("prompt_cache_key"), str):
        return key
    prompt = asked.get("prompt")
    if prompt:
        while isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]  # of several prompts, the first
        return json.dumps(prompt[:_BEGIN]) if isinstance(prompt, str | list) else None
    turns = asked.get("messages", asked.get("input"))
    said = [_text(asked.get("system") or asked.get("instructions"))]
    if isinstance(turns, str):
        return "\n".join([*said, turns])
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict):
            said.append(_text(turn.get("content")))
            if turn.get("role") == "user":
                return "\n".join(said)
    return None


def _text(content: Any) -> str:
    """Text of a content, which is text or parts with text."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
