"""Startup: answers while the model is being loaded."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tiermoe.serve import ollama_api
from tiermoe.serve.errors import RETRY_S
from tiermoe.serve.page import page


class StartupApp:
    """ASGI app in front of the server's own `app`, which is None until the model is loaded.

    Until then it shows the page and answers everything else with status 503, `/health` with the progress of loading."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None
        self._progress: dict[str, Any] | None = None

    def report(self, what: str, done: int, total: int) -> None:
        """Records the progress of loading."""
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
            # the other dialects find theirs in it
            error = {"message": message, "type": "overloaded_error", "param": None, "code": None}
            body = {"error": message} if path.startswith(ollama_api.PATHS) else {"type": "error", "error": error}
        return JSONResponse(body, 503, {"Retry-After": str(RETRY_S)})
