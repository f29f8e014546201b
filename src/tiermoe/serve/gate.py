"""What answers before the model is loaded: that it is being loaded, and how far that is."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tiermoe.serve.errors import RETRY_S
from tiermoe.serve.page import page


class Gate:
    """An ASGI app in front of another one, `app`, that is set once it is there. Until then the page is shown, and
    everything else is answered with status 503, `/health` with what is being done."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None
        self._progress: dict[str, Any] | None = None

    def report(self, what: str, done: int, total: int) -> None:
        """How far loading is."""
        self._progress = {"what": what, "done": done, "total": total}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._loading(scope["path"])(scope, receive, send)

    def _loading(self, path: str) -> Response:
        if path == "/":
            return page()
        body: dict[str, Any] = {"status": "loading", "progress": self._progress}
        if path != "/health":
            message = "the model is being loaded; /health says how far it is"
            # both dialects find theirs in it
            error = {"message": message, "type": "overloaded_error", "param": None, "code": None}
            body = {"type": "error", "error": error}
        return JSONResponse(body, 503, {"Retry-After": str(RETRY_S)})
