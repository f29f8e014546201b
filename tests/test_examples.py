"""The examples run as their users run them."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import httpx
import pytest

from patience import PATIENCE_S
from serving import KEY

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_a_client(address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TIERMOE_API_KEY", KEY)
    monkeypatch.setattr(sys, "argv", ["client.py", "once upon", "--url", f"{address}/v1", "--max-tokens", "5"])
    runpy.run_path(str(EXAMPLES / "client.py"), run_name="__main__")
    asked = {"prompt": "once upon", "max_tokens": 5, "temperature": 0}
    headers = {"Authorization": f"Bearer {KEY}"}
    whole = httpx.post(f"{address}/v1/completions", json=asked, headers=headers, timeout=PATIENCE_S).json()
    assert whole["usage"]["completion_tokens"] == 5
    assert capsys.readouterr().out == whole["choices"][0]["text"] + "\n"


def test_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells, one after the other; the notebook itself asserts that all sizes give one text."""
    notebook = json.loads((EXAMPLES / "cache_sizes.ipynb").read_text())
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # figures of one machine
            exec(compile("".join(cell["source"]), "cache_sizes.ipynb", "exec"), names)
    printed = capsys.readouterr().out
    shares = [int(share) for share in re.findall(r"(\d+)%, \d+ experts read", printed)]
    assert len(shares) == 4
    # two neighbours may change places: what is read ahead, and when, depends on what else runs
    assert shares[0] > shares[-1]
