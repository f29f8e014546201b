"""The page at `/`: chat, and where the experts are. One file, which asks nobody but its own server."""

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
    """What the page may do: run its own script, show its own style, ask its own server."""
    return (
        f"default-src 'none'; script-src {_hash('script')}; style-src {_hash('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(element: str) -> str:
    """Of the text of the page's only `element`, as a policy names it."""
    (text,) = re.findall(f"<{element}>(.*?)</{element}>", _html(), re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page() -> HTMLResponse:
    """The page, with the policy that keeps it to itself."""
    headers = {
        "Content-Security-Policy": _policy(),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(_html(), headers=headers)
