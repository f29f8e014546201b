"""The site: built from the documents without a warning, and without anything from elsewhere in its pages."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="the extra `docs` is not installed")
ROOT = Path(__file__).parents[1]
DOCUMENTS = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "examples" / "README.md"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, by the Makefile's command."""
    out = tmp_path_factory.mktemp("site")
    (command,) = re.findall(r"^\t\$\(BIN\)/python (-m sphinx .*) build/site$", (ROOT / "Makefile").read_text(), re.M)
    done = subprocess.run(
        [sys.executable, *shlex.split(command), "-d", str(out / "doctrees"), str(out / "html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


def test_every_document_is_a_page(site: Path) -> None:
    assert [path for path in DOCUMENTS if not (site / path.relative_to(ROOT)).with_suffix(".html").exists()] == []


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(
        r"""<(?:script|img|iframe|link)[^>]*?(?:src|href)=["']?(?:https?:)?//[^>]*>|@import|url\(["']?http"""
    )
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > len(DOCUMENTS)
    assert [(page.name, found) for page in pages for found in loaded.findall(page.read_text())] == []


def test_names_have_their_docstrings(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "docs" / "api.html").read_text())
    for words in ("Loads a MoE model within a memory budget", "The key to evict for", "class tiermoe.Sampling"):
        assert words in text
