"""Page at `/`: chat, and a view of the experts. One file, which connects to its own server alone."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import HTMLResponse


@cache
def _html() -> str:
    return files("tiermoe.serve").joinpath("page.html").read_text(encoding="utf-8")


@cache
def _policy() -> str:
    """Content policy of the page: its own script, its own style, its own server."""
    return (
        f"default-src 'none'; script-src {_hash('script')}; style-src {_hash('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(element: str) -> str:
    """Hash of the text of the page's only `element`, as a policy names it."""
    (text,) = re.findall(f"<{element}>(.*?)</{element}>", _html(), re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page() -> HTMLResponse:
    """The page, with its content policy."""
    headers = {
        "Content-Security-Policy": _policy(),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(_html(), headers=headers)
