"""The documents of the tasks here, from files.

Where they are: `--metadata '{"data": "FOLDER"}'`, else the environment variable TIERMOE_EVAL_DATA. The folder has
`piqa/valid.jsonl` with `piqa/valid-labels.lst`, `winogrande/winogrande.jsonl`, and `wikitext2/wiki.test.raw`.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from datasets import Dataset

_TITLE = re.compile(r"^ = [^=].* = $", re.MULTILINE)


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


def wikitext(data: str | None = None, **_: Any) -> dict[str, Dataset]:
    """page: an article, as WikiText-2 has it, title first."""
    text = (_folder(data) / "wikitext2" / "wiki.test.raw").read_text(encoding="utf-8")
    begins = [found.start() for found in _TITLE.finditer(text)]
    pages = [text[begin:end] for begin, end in zip(begins, [*begins[1:], len(text)], strict=True)]
    return {"test": Dataset.from_list([{"page": page} for page in pages])}


def page_text(document: dict[str, str]) -> str:
    """The page as it is scored."""
    return document["page"]


def page_results(document: dict[str, str], results: list[float]) -> dict[str, tuple[float, int]]:
    """What perplexities are made of: the log-likelihood of a page, and its words or bytes."""
    (likelihood,) = results
    page = document["page"]
    words, size = len(page.split()), len(page.encode())
    return {
        "word_perplexity": (likelihood, words),
        "byte_perplexity": (likelihood, size),
        "bits_per_byte": (likelihood, size),
    }


def _folder(data: str | None) -> Path:
    folder = data or os.environ.get("TIERMOE_EVAL_DATA")
    if not folder:
        raise SystemExit('name the folder of the data: --metadata \'{"data": "FOLDER"}\', or TIERMOE_EVAL_DATA')
    return Path(folder)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
