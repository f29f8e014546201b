"""Tool calls in an answer's text, in the formats that model families write them in.

The format is found in the model's chat template, which describes it to the model. The sampled text stays as it is: a
client sends the call back, and the template writes it again.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json as from_partial_json

from tiermoe.engine.detokenize import overlap
from tiermoe.serve.fields import from_json
from tiermoe.serve.grammar import json_rule


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: str  # JSON, as OpenAI has it; the beginning of it where the call is not whole
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")
    whole: bool = True  # False where the answer was cut off within the call

    @property
    def values(self) -> dict[str, Any]:
        """The arguments as an object, without what was cut off; empty where they are no object."""
        try:
            whole, text = self.whole, self.arguments
            found = from_json(text) if whole else from_partial_json(text, allow_partial=_PARTIAL)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


_PARTIAL: Any = "trailing-strings"  # an unfinished string counts as far as it is there
Types = Mapping[str, Mapping[str, Any]]
"""Function → parameter → its JSON schema."""


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags of a call that is not JSON."""

    head: str  # before the parameters; {} is the function
    key: str  # before each value; {} is the parameter
    value_end: str  # behind each value
    tail: str  # behind the parameters

    def rules(self, function: Mapping[str, Any], name: str) -> str:
        """The rule `name` of a grammar: the call of a function, its parameters in the order of its schema."""
        schema = function.get("parameters") or {}
        required, parts, rules = schema.get("required") or (), [_text(self.head.format(function["name"]))], []
        for number, (key, kind) in enumerate(_properties(schema).items()):
            value = f"{name}v{number}"
            before = _text(self.key.format(key))
            if kind.get("type") == "string" and "enum" not in kind:
                rules.append(f"{value}[suffix={_text(self.value_end)}]: /(.|\\n)*/")
                part = f"{before} {value}"
            else:
                rules.append(f"{value}: {self._value(kind, schema)}")
                part = f"{before} {value} {_text(self.value_end)}"
            parts.append(part if key in required else f"({part})?")
        parts += [_text(self.tail)] if self.tail else []
        return "\n".join([f"{name}: {' '.join(parts)}", *rules])

    def _value(self, kind: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
        words = kind.get("enum")
        if words and all(isinstance(word, str) for word in words):
            return " | ".join(_text(word) for word in words)
        return json_rule({**kind, **_definitions(schema)})


def _json_rule(function: Mapping[str, Any], name: str) -> str:
    schema = {"type": "object", **(function.get("parameters") or {})}
    fields = {"name": {"const": function["name"]}, "arguments": schema}
    whole = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return f"{name}: {json_rule({**whole, **_definitions(schema)})}"


def _properties(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Parameter → its schema; a schema that is no object restricts nothing."""
    found = schema.get("properties")
    items = found.items() if isinstance(found, dict) else ()
    return {key: value if isinstance(value, dict) else {} for key, value in items}


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Definitions that references in a schema point to: they count from the outermost schema."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Format:
    """A format of tool calls."""

    mark: str  # part of every chat template of this format
    begin: str  # before a call
    end: str  # behind a call
    read: Callable[[str, Types], list[ToolCall]]  # the text between → calls; ValueError where it is none
    tags: Tags | None = None  # None: a call is JSON

    def rule(self, functions: Sequence[Mapping[str, Any]]) -> str:
        """The rule `call` of a grammar: one call of one of the functions."""
        bodies = [self.tags.rules(f, f"f{n}") if self.tags else _json_rule(f, f"f{n}") for n, f in enumerate(functions)]
        either = " | ".join(f"f{number}" for number in range(len(functions)))
        call = f"call: {_text(self.begin)} /\\n?/ ({either}) /\\n?/ {_text(self.end)}"
        return "\n".join([call, *bodies])


def _json_call(text: str, _: Types) -> list[ToolCall]:
    """{"name": …, "arguments": {…}} (Qwen2, Qwen3, Hermes)."""
    said = from_json(text)
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        raise ValueError("no name")
    arguments = said.get("arguments", said.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = from_json(arguments)  # a client sends them back, and templates take no others
    return [ToolCall(said["name"], json.dumps(arguments))]


def _tagged_reader(names: re.Pattern[str], parameters: re.Pattern[str]) -> Callable[[str, Types], list[ToolCall]]:
    """Reader of calls as tags. names: finds each function and its body; parameters: each parameter of a body and its
    value."""

    def read(text: str, types: Types) -> list[ToolCall]:
        found = []
        for name, body in names.findall(text):
            schemas = types.get(name.strip(), {})
            values = {
                key.strip(): value_of(value, schemas.get(key.strip(), {})) for key, value in parameters.findall(body)
            }
            found.append(ToolCall(name.strip(), json.dumps(values, ensure_ascii=False)))
        if not found:
            raise ValueError("no call")
        return found

    return read


def value_of(text: str, schema: Mapping[str, Any]) -> Any:
    """Value of the text between tags: the text where the schema is a string, else JSON where the text is that."""
    text = text.removeprefix("\n").removesuffix("\n")
    if schema.get("type") == "string":
        return text
    try:
        return from_json(text)
    except ValueError:
        return text


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


FORMATS = (
    Format(
        "<minimax:tool_call>", "<minimax:tool_call>", "</minimax:tool_call>",
        _tagged_reader(
            _regex(r'<invoke name="?([^">]+)"?>(.*?)</invoke>'),
            _regex(r'<parameter name="?([^">]+)"?>(.*?)</parameter>'),
        ),
        Tags('<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n", "</invoke>"),
    ),
    Format(
        "<arg_key>", "<tool_call>", "</tool_call>",
        _tagged_reader(
            _regex(r"^\s*([\w.-]+)\s*((?:<arg_key>.*)?)$"),
            _regex(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"),
        ),
        Tags("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", ""),
    ),
    Format(
        "<function=", "<tool_call>", "</tool_call>",
        _tagged_reader(
            _regex(r"<function=([^>]+)>(.*?)</function>"),
            _regex(r"<parameter=([^>]+)>(.*?)</parameter>"),
        ),
        Tags("<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>"),
    ),
    Format("<tool_call>", "<tool_call>", "</tool_call>", _json_call),
)  # fmt: skip
"""Formats of MiniMax-M2, GLM-4.5, Qwen3-Coder, and families whose calls are JSON; the first whose mark a template has
counts."""


def format_of(template: str | None) -> Format | None:
    """The format of tool calls in a chat template; None where this server does not know it."""
    return next((each for each in FORMATS if each.mark in (template or "")), None)


def types_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Types of the parameters of tools, which are as OpenAI has them."""
    return {tool["function"]["name"]: _properties(tool["function"].get("parameters") or {}) for tool in tools}


class CallReader:
    """Reads one answer as it comes: text in, text and calls out.

    Text that may begin a call is withheld. A call comes once it is whole, or once the answer is cut off within it; what
    turns out to be no call is text. one: nothing comes after the first call. forced: the answer must be a call, so that
    its beginning is never text."""

    def __init__(self, form: Format, types: Types, one: bool = False, forced: bool = False) -> None:
        self.calls: list[ToolCall] = []  # the whole ones so far
        self._one = one
        self._forced = forced
        self._form = form
        self._types = types
        self._withheld = ""

    def add(self, text: str, last: bool = False, cut: bool = False) -> tuple[str, list[ToolCall]]:
        """Text that belongs to no call, and new calls. last: no more text comes. cut: because the answer was cut off;
        then a call that has begun comes as far as it is there."""
        self._withheld += text
        said, new = "", list[ToolCall]()
        while not (self._one and (self.calls or new)):
            before, begin, rest = self._withheld.partition(self._form.begin)
            if not begin:
                kept = 0 if last and not self._forced else overlap(self._withheld, self._form.begin)
                said += self._withheld[: len(self._withheld) - kept]
                self._withheld = self._withheld[len(self._withheld) - kept :]
                break
            said += before
            inside, end, after = rest.partition(self._form.end)
            if not end and not last:
                self._withheld = begin + rest
                break
            self._withheld = after
            found = [] if cut and not end else self._read(inside)
            if not found and not end and (cut or self._forced):
                found = _partial_call(self._form, inside, self._types)
            new += found
            if not found and (end or not self._forced):
                said += begin + inside + end
        if self._forced or self.calls or new:
            said = said.strip("\n") if not said.strip() else said  # line breaks before calls and between them
        self.calls += [call for call in new if call.whole]
        return said, new

    def _read(self, inside: str) -> list[ToolCall]:
        try:
            return self._form.read(inside, self._types)[: 1 if self._one else None]
        except ValueError:
            return []


def _partial_call(form: Format, text: str, types: Types) -> list[ToolCall]:
    """The call that a text begins and does not end; none where not even its function is named."""
    call = _partial_tagged(form.tags, text.lstrip("\n"), types) if form.tags else _partial_json(text)
    return [] if call is None else [call]


_CALL = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")(?:\s*,\s*"(?:arguments|parameters)"\s*:\s*(.*))?', re.DOTALL
)


def _partial_json(text: str) -> ToolCall | None:
    found = _CALL.match(text)
    if found is None:
        return None
    try:
        name = json.loads(found[1])
    except ValueError:
        return None
    arguments = found[2] or ""
    try:
        _, end = json.JSONDecoder().raw_decode(arguments)
    except (ValueError, RecursionError):
        end = len(arguments)
    return ToolCall(name, arguments[:end], whole=False)


def _partial_tagged(tags: Tags, text: str, types: Types) -> ToolCall | None:
    head, key = (re.compile(re.escape(each).replace(r"\{\}", "(.+?)")) for each in (tags.head, tags.key))
    named = head.match(text)
    if named is None:
        return None
    schemas, parts, at = types.get(named[1], {}), list[str](), named.end()
    while found := key.search(text, at):
        schema = schemas.get(found[1], {})
        end = text.find(tags.value_end, found.end())
        at = len(text) if end < 0 else end + len(tags.value_end)
        if end >= 0:
            value = json.dumps(value_of(text[found.end() : end], schema), ensure_ascii=False)
        else:
            value = text[found.end() : at - overlap(text, tags.value_end)]
            if schema.get("type", "string") == "string":
                value = json.dumps(value, ensure_ascii=False)[:-1]
        parts.append(f"{json.dumps(found[1], ensure_ascii=False)}: {value}")
    return ToolCall(named[1], "{" + ", ".join(parts), whole=False)
