"""What every request passes before it reaches a route: the key, and the size of its body."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiermoe.serve.errors import Refused

LARGEST_BODY = 16 << 20  # bytes
_OPEN = ("/", "/health", "/metrics")  # asked without a key


class Guard:
    """key: what clients must name, None: nothing. body: an error in the shape of the dialect that a path speaks."""

    def __init__(self, app: ASGIApp, key: str | None, body: Callable[[str, Refused], dict[str, Any]]) -> None:
        self._app = app
        self._key = key
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        error = None if self._knows(scope, headers) else _wrong_key()
        length = headers.get("content-length", "0")
        if error is None and length.isdigit() and int(length) > LARGEST_BODY:
            error = _too_large()
        if error is not None:
            await JSONResponse(self._body(scope["path"], error), error.status)(scope, receive, send)
            return
        await self._app(scope, _counted(receive), send)

    def _knows(self, scope: Scope, headers: Headers) -> bool:
        if self._key is None or scope["path"] in _OPEN or scope["method"] == "OPTIONS":
            return True
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), self._key.encode())


def _counted(receive: Receive) -> Receive:
    """A body without a length, in chunks, is refused as soon as it is too large."""
    had = 0

    async def counted() -> Message:
        nonlocal had
        message = await receive()
        had += len(message.get("body", b""))
        if had > LARGEST_BODY:
            raise HTTPException(413, str(_too_large()))
        return message

    return counted


def _wrong_key() -> Refused:
    return Refused(401, "the API key is missing or wrong", kind="authentication_error", code="invalid_api_key")


def _too_large() -> Refused:
    return Refused(413, f"the body has more than {LARGEST_BODY:,} bytes")
