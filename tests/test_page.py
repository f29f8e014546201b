"""The page at `/`: it comes from the server, and asks nobody else."""

from __future__ import annotations

import base64
import hashlib
import re

import httpx
import pytest

from patience import PATIENCE_S
from serving import call_app
from tiermoe.serve.page import StartupApp

SCRIPTS = re.compile(r"<script>.*?</script>", re.DOTALL)
LIBRARIES = re.compile(r"<script>\n/\*.*?</script>", re.DOTALL)
"""Scripts that begin with a licence."""


@pytest.fixture(scope="module")
def page(address: str) -> httpx.Response:
    """As one gets it without a key."""
    return httpx.get(f"{address}/", headers={"Accept": "text/html,*/*"}, timeout=PATIENCE_S)


def test_the_page_comes_with_its_policy(page: httpx.Response) -> None:
    assert (page.status_code, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["Content-Security-Policy"].split(";"))
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    for element, count in (("script", 9), ("style", 1)):
        texts = re.findall(f"<{element}>(.*?)</{element}>", page.text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert len(texts) == count
        assert policy[f"{element}-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert (policy["require-trusted-types-for"], policy["trusted-types"]) == ("'script'", "dompurify")


def test_the_page_names_nothing_elsewhere(page: httpx.Response) -> None:
    own, libraries = LIBRARIES.subn("", page.text)
    assert libraries == 3
    assert not re.findall(r"https?://|wss?://|['\"(]//|@import|url\(|<(script|link|img|iframe)[^>]* src=", own)
    for address in re.findall(r"(?:href|src|action)=\"([^\"]*)\"", SCRIPTS.sub("", own)):
        assert address.startswith(("#", "data:"))
    asked = re.findall(r"ask\(\"([^\"]*)\"", own)
    assert {"v1/chat/completions", "v1/models", "stats", "experts", "health"} == set(asked)


def test_the_page_inserts_text_and_no_html(page: httpx.Response) -> None:
    own = LIBRARIES.sub("", page.text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|eval\(", own)


def test_every_control_has_a_name(page: httpx.Response) -> None:
    markup = SCRIPTS.sub("", page.text)
    labelled = set(re.findall(r"<label for=\"(\w+)\"", markup))
    controls = re.findall(r"(<label[^>]*>[^<]*)?<(?:input|textarea|canvas)([^>]*)>", markup)
    assert len(controls) == 11
    for label, its in controls:
        identity = re.search(r"id=\"(\w+)\"", its)
        assert label or "aria-label" in its or 'role="img"' in its or (identity and identity[1] in labelled), its
    assert all(text.strip() for text in re.findall(r"<button[^>]*>([^<]*)</button>", markup))


def test_the_page_is_there_while_the_model_is_loaded(page: httpx.Response) -> None:
    gate = StartupApp()
    unknown = call_app(gate, "/health")
    gate.report("packing experts", 3, 8)
    health, shown, models = (call_app(gate, path) for path in ("/health", "/", "/v1/models"))
    assert (unknown.status_code, unknown.json()) == (503, {"status": "loading", "progress": None})
    assert health.json() == {"status": "loading", "progress": {"what": "packing experts", "done": 3, "total": 8}}
    assert (shown.status_code, shown.text) == (200, page.text)
    assert (models.status_code, models.json()["error"]["type"]) == (503, "overloaded_error")
