"""Page at `/`: chat, and a view of the experts. One document, which connects to its own server alone."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import HTMLResponse

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
