"""The documents of lm-eval's tasks here, from files on this machine.

Where they are: `--metadata '{"data": "FOLDER"}'`, else the environment variable TIERMOE_EVAL_DATA. The folder has
`piqa/valid.jsonl` with `piqa/valid-labels.lst`, and `winogrande/winogrande.jsonl`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from datasets import Dataset


def piqa(data: str | None = None, **_: Any) -> dict[str, Dataset]:
    """goal, sol1, sol2, label."""
    folder = _folder(data) / "piqa"
    labels = (folder / "valid-labels.lst").read_text().split()
    found = _lines(folder / "valid.jsonl")
    documents = [{**document, "label": int(label)} for document, label in zip(found, labels, strict=True)]
    return {"validation": Dataset.from_list(documents)}


def winogrande(data: str | None = None, **_: Any) -> dict[str, Dataset]:
    """context_options, continuation, gold."""
    return {"validation": Dataset.from_list(_lines(_folder(data) / "winogrande" / "winogrande.jsonl"))}


def _folder(data: str | None) -> Path:
    folder = data or os.environ.get("TIERMOE_EVAL_DATA")
    if not folder:
        raise SystemExit('name the folder of the data: --metadata \'{"data": "FOLDER"}\', or TIERMOE_EVAL_DATA')
    return Path(folder)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
