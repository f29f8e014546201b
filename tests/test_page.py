"""The page at `/`: it comes from the server, and asks nobody else."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from serving import running
from tiermoe.serve.app import create_app
from tiermoe.serve.served import Served
from tiermoe.serve.startup import StartupApp


@pytest.fixture(scope="module")
def page(address: str) -> httpx.Response:
    """As one gets it without a key."""
    return httpx.get(f"{address}/")


def test_the_page_comes_with_its_policy(page: httpx.Response) -> None:
    assert (page.status_code, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["Content-Security-Policy"].split(";"))
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    for element in ("script", "style"):
        (text,) = re.findall(f"<{element}>(.*?)</{element}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{element}-src"] == f"'sha256-{digest}'"


def test_the_page_names_nothing_elsewhere(page: httpx.Response) -> None:
    assert not re.findall(r"https?:|wss?://|['\"(]//|@import|url\(|<(script|link|img|iframe)[^>]* src=", page.text)
    for address in re.findall(r"(?:href|src|action)=\"([^\"]*)\"", page.text):
        assert address.startswith(("#", "data:"))
    asked = re.findall(r"ask\(\"([^\"]*)\"", page.text)
    assert {"v1/chat/completions", "v1/models", "stats", "experts", "health"} == set(asked)


def test_the_page_inserts_text_and_no_html(page: httpx.Response) -> None:
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|eval\(", page.text)


def test_every_control_has_a_name(page: httpx.Response) -> None:
    labelled = set(re.findall(r"<label for=\"(\w+)\"", page.text))
    controls = re.findall(r"(<label>[^<]*)?<(?:input|textarea|canvas)([^>]*)>", page.text)
    assert len(controls) == 7
    for label, its in controls:
        identity = re.search(r"id=\"(\w+)\"", its)
        assert label or "aria-label" in its or 'role="img"' in its or (identity and identity[1] in labelled), its
    assert all(text.strip() for text in re.findall(r"<button[^>]*>([^<]*)</button>", page.text))


def test_the_page_is_there_while_the_model_is_loaded(page: httpx.Response) -> None:
    async def asked() -> list[httpx.Response]:
        gate = StartupApp()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://test") as client:
            found = [await client.get("/health")]
            gate.report("packing experts", 3, 8)
            return [*found, *[await client.get(path) for path in ("/health", "/", "/v1/models")]]

    unknown, health, shown, models = asyncio.run(asked())
    assert (unknown.status_code, unknown.json()) == (503, {"status": "loading", "progress": None})
    assert health.json() == {"status": "loading", "progress": {"what": "packing experts", "done": 3, "total": 8}}
    assert (shown.status_code, shown.text) == (200, page.text)
    assert (models.status_code, models.json()["error"]["type"]) == (503, "overloaded_error")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_page_runs_in_a_browser(served: Served, tmp_path: Path) -> None:
    """What its policy would stop is seen here: the name of the model is what the script writes."""
    with running(create_app(replace(served, name="a model <b>with</b> signs"))) as address:
        command = [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
            "--virtual-time-budget=3000", "--dump-dom", f"{address}/#experts",
        ]  # fmt: skip
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert '<span id="model">a model &lt;b&gt;with&lt;/b&gt; signs</span>' in shown
    assert "Hit rate" in shown
    assert re.search(r"</i>16 bits: \d+<", shown)
