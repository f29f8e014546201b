"""Parameters of tools: which kinds of JSON values their schemas allow, and the value that a text between tags is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tiermoe.model.chat.format import KEY
from tiermoe.model.chat.literals import ObjectReader, from_json

Kinds = frozenset[str]
"""Names of JSON schema's types that a parameter may have; empty: its schema does not say."""
Parameters = Mapping[str, Mapping[str, Kinds]]
"""Function → parameter → its kinds."""

TEXT = Kinds({"string"})
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_ALL = Kinds(TYPES)
_DEPTH = 16
"""Schemas within each other that are looked at, references among them: one may refer to itself."""


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Kinds]]:
    """Kinds of the parameters of tools, which are as OpenAI has them."""
    found = {}
    for tool in tools:
        schema = tool["function"].get("parameters") or {}
        kinds = {key: kinds_of(kind, schema) for key, kind in properties(schema).items()}
        found[tool["function"]["name"]] = kinds
    return found


def properties(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Parameter → its schema; a schema that is no object restricts nothing."""
    found = schema.get("properties")
    items = found.items() if isinstance(found, dict) else ()
    return {key: value if isinstance(value, dict) else {} for key, value in items}


def kinds_of(schema: Any, whole: Mapping[str, Any]) -> Kinds:
    """The kinds that a schema allows, by type, enum, const, anyOf, oneOf, allOf and references within `whole`."""
    kinds = _kinds(schema, whole, _DEPTH)
    return Kinds() if kinds == _ALL else kinds


def _kinds(schema: Any, whole: Mapping[str, Any], depth: int) -> Kinds:
    if not isinstance(schema, dict) or not depth:
        return _ALL
    allowed = _ALL
    if (named := schema.get("type")) is not None:
        names = Kinds(each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str))
        allowed &= names or _ALL
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        allowed &= Kinds(name for value in values for name in _names(value))
    for several in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(several), list) and choices:
            allowed &= Kinds().union(*(_kinds(each, whole, depth - 1) for each in choices))
    for each in every if isinstance(every := schema.get("allOf"), list) else ():
        allowed &= _kinds(each, whole, depth - 1)
    if isinstance(reference := schema.get("$ref"), str):
        allowed &= _kinds(_referred(reference, whole), whole, depth - 1)
    return allowed


def _referred(reference: str, whole: Mapping[str, Any]) -> Any:
    """What `#/…` points to; None if there is no such thing."""
    found: Any = whole
    for name in reference.removeprefix("#").split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found if reference.startswith("#") else None


def _names(value: Any) -> tuple[str, ...]:
    """The types that a JSON value has."""
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int):
        return ("integer", "number")
    named = {str: "string", float: "number", type(None): "null", list: "array", dict: "object"}
    return (named[type(value)],)


def value_of(text: str, kinds: Kinds) -> Any:
    """Parses the text between a parameter's tags as JSON, or as a literal of Python. The text itself is the value if it
    is neither, or if the schema allows a string and not the type that was parsed."""
    try:
        value = _WORDS[text.strip()] if kinds and text.strip() in _WORDS else _parsed(text)
    except ValueError:
        return text
    fits = not kinds or kinds & (Kinds(_names(value)) - TEXT)
    return value if fits or "string" not in kinds else text


def nested(text: str, before: str, after: str) -> Any:
    """The value of a text whose parts are between tags of their own (MiniMax-M3): an object by its entries, a list by
    its `item`s; None if it has none. before, after: what is around a part, with `KEY` for its name."""
    opener = re.compile(re.escape(before).replace(KEY, r"([\w.-]{1,256})"))
    found, rest, depth = list[tuple[str, Any]](), text.strip(), text.count(before.partition(KEY)[0])
    while (begun := opener.match(rest)) and depth <= _PARTS:
        end, at, within = after.replace(KEY, begun[1]), begun.end(), 1
        same = before.replace(KEY, begun[1])
        while within and (closed := rest.find(end, at)) >= 0:
            within += rest.count(same, at, closed) - 1
            at = closed + len(end)
        if within:
            return None
        part = rest[begun.end() : at - len(end)]
        inner = nested(part, before, after)
        found.append((begun[1], value_of(part, Kinds()) if inner is None else inner))
        rest = rest[at:].strip()
    if rest or not found:
        return None
    return [value for _, value in found] if all(name == "item" for name, _ in found) else dict(found)


_PARTS = 4096
"""Tags within a value that is read: their number bounds the depth and the time."""
_WORDS = {"True": True, "False": False, "None": None}


def _parsed(text: str) -> Any:
    try:
        return from_json(text)
    except ValueError:
        if not text.strip().startswith(("[", "{")):
            raise
        made, rest = ObjectReader().take(text.strip())
        if rest:
            raise
        return from_json(made)
