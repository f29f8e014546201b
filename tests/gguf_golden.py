"""Golden headers of GGUF files: names, shapes and entries that llama.cpp's converter wrote of the tests' small models,
and where each element of a tensor comes from."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden" / "gguf"
HELD = ("e_score_correction_bias", "expert_bias", "tid2eid", "layer_scalar")
"""Ends of the buffers that a file holds."""
CONSTANT = "constant"
_TYPES = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
_OF_LISTS = {**_TYPES, int: "INT32"}


@dataclass
class Tensor:
    """A tensor of a file. What the converter does to its values: nothing, "1+", "exp" or "-exp"; or "constant", and
    `sources` are the values themselves."""

    shape: list[int]
    sources: list[Any]  # paths of parameters in their order, or (path, first element, sizes, strides)
    function: str = ""
    type: str = "F32"


@dataclass
class Golden:
    """A file's header: what it says without tokenizer and general entries."""

    architecture: str
    entries: dict[str, tuple[str, Any]]  # name without the architecture → type, value
    tensors: dict[str, Tensor]


def typed(value: Any) -> tuple[str, Any]:
    """A value with the type that entries of its kind have; (type, value) as it is."""
    if isinstance(value, tuple):
        return value
    return (f"{_OF_LISTS[type(value[0])]}[]" if isinstance(value, list) else _TYPES[type(value)]), value


@cache
def golden(family: str, name: str) -> Golden:
    """The header of a case."""
    cases = json.loads((FOLDER / f"{family}.json").read_text())["cases"]
    found = cases[name]
    first = cases[next(iter(cases))]
    parts = {
        part: {key: row for key, row in {**first[part], **found[part]}.items() if row is not None}
        for part in ("entries", "tensors")
    }
    entries = {
        key: (row["type"], row["value"]) if isinstance(row, dict) else typed(row)
        for key, row in parts["entries"].items()
    }
    tensors = {}
    for key, row in parts["tensors"].items():
        before, layers, after = re.fullmatch(r"(?:(.*)\{(.*)\})?(.*)", key).groups()  # type: ignore[union-attr]
        for layer in (layers or "").split(","):
            own = json.loads(json.dumps(row).replace("#", layer))
            tensors[f"{before or ''}{layer}{after}"] = Tensor(*own)
    return Golden(first["architecture"], entries, tensors)


def save(family: str, version: str, cases: dict[str, Golden]) -> None:
    """Writes the headers of a family's cases, a line an entry and a kind of tensor: the first one's, and of the others
    what they have otherwise (null: not at all)."""
    lines = [f'{{"converter": {json.dumps(version)}, "cases": {{']
    first: dict[str, dict[str, Any]] = {}
    for index, (name, case) in enumerate(cases.items()):
        parts = {"entries": {key: _entry(*entry) for key, entry in case.entries.items()}, "tensors": _folded(case)}
        lines.append(f'{json.dumps(name)}: {{"architecture": {json.dumps(case.architecture)}, ')
        for part, rows in parts.items():
            usual = first.setdefault(part, {})
            other = {key: row for key, row in rows.items() if index == 0 or usual.get(key) != row}
            other |= {key: None for key in usual if key not in rows}
            usual |= rows if index == 0 else {}
            body = [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in other.items()]
            lines += [f'"{part}": {{', *(f"{row}," for row in body[:-1]), *body[-1:]]
            lines.append("}," if part == "entries" else "}}," if index < len(cases) - 1 else "}}")
    (FOLDER / f"{family}.json").write_text("\n".join([*lines, "}}", ""]))


def _entry(kind: str, value: Any) -> Any:
    return value if value != [] and typed(value)[0] == kind else {"type": kind, "value": value}


def _folded(case: Golden) -> dict[str, list[Any]]:
    """Tensors that layers have alike as one row: `blk.{0,2}.attn_q.weight` → what `Tensor` has, # for the layer."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, tensor in case.tensors.items():
        row = [tensor.shape, tensor.sources, tensor.function, tensor.type]
        while row[-1] in ("", "F32"):
            row.pop()
        layer, text = re.match(r"blk\.(\d+)\.", name), json.dumps(row)
        if layer is not None:
            name, text = name.replace(layer[1], "#", 1), text.replace(f"layers.{layer[1]}.", "layers.#.")
        found.setdefault((name, text), []).extend([layer[1]] if layer is not None else [])
    return {name.replace("#", f"{{{','.join(layers)}}}"): json.loads(text) for (name, text), layers in found.items()}
