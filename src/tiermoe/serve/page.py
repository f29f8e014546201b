"""What a server shows without a model: the page at `/` (chat, and a view of the experts), and how far loading is."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tiermoe.serve.dialects import RETRY_S, Json, Refused, error_body

_STYLE = re.compile(r'<link rel="stylesheet" href="([^"]+)">')
_SCRIPT = re.compile(r'<script src="([^"]+)"></script>')


@cache
def _html() -> str:
    """`web/page.html` with the files that it names in their places."""
    html = _STYLE.sub(lambda found: f"<style>\n{_file(found[1])}</style>", _file("page.html"))
    return _SCRIPT.sub(lambda found: f"<script>\n{_file(found[1])}</script>", html)


def _file(name: str) -> str:
    return files("tiermoe.serve").joinpath("web", name).read_text(encoding="utf-8")


@cache
def _policy() -> str:
    """Content policy of the page: its own scripts, its own style, its own server. HTML is made of text by DOMPurify
    alone."""
    return (
        f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    )


def _hashes(element: str) -> str:
    """Hashes of the texts of the page's elements of one name, as a policy names them."""
    texts = re.findall(f"<{element}>(.*?)</{element}>", _html(), re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def page() -> HTMLResponse:
    """The page, with its content policy."""
    headers = {
        "Content-Security-Policy": _policy(),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(_html(), headers=headers)


def root(headers: Mapping[str, str]) -> Response:
    """The answer of `/`: the page for what shows pages, what Ollama's clients look for otherwise."""
    return page() if "text/html" in headers.get("accept", "") else PlainTextResponse("Ollama is running")


# --- while the model is loaded ---


class StartupApp:
    """ASGI app in front of the server's own `app`, which is None until the model is loaded.

    Until then it shows the page and answers everything else with status 503, `/health` with the progress of loading."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None
        self._progress: Json | None = None

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
        body: Json = {"status": "loading", "progress": self._progress}
        if path != "/health":
            message = "the model is being loaded; /health says how far it is"
            body = error_body(path, Refused(503, message, kind="overloaded_error"))
        return JSONResponse(body, 503, {"Retry-After": str(RETRY_S)})
