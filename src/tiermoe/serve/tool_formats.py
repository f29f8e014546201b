"""Formats in which model families write tool calls: found in the chat template, and as rules of a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiermoe.serve.dialects import Json
from tiermoe.serve.grammar import json_rule

Types = Mapping[str, Mapping[str, Any]]
"""Function → parameter → its JSON schema."""


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags of a call that is not JSON."""

    name: re.Pattern[str]  # finds the function, which begins a call
    parameter: re.Pattern[str]  # finds a parameter, up to its value
    head: str  # as they are written: before the parameters; {} is the function
    key: str  # before each value; {} is the parameter
    value_end: str  # behind each value
    tail: str  # behind the parameters

    def rules(self, function: Mapping[str, Any], name: str) -> str:
        """The rule `name` of a grammar: the call of a function, its parameters in the order of its schema."""
        schema = function.get("parameters") or {}
        required, parts, rules = schema.get("required") or (), [json_text(self.head.format(function["name"]))], []
        for number, (key, kind) in enumerate(_properties(schema).items()):
            value = f"{name}v{number}"
            before = json_text(self.key.format(key))
            if kind.get("type") == "string" and "enum" not in kind:
                rules.append(f"{value}[suffix={json_text(self.value_end)}]: /(.|\\n)*/")
                part = f"{before} {value}"
            else:
                rules.append(f"{value}: {self._value(kind, schema)}")
                part = f"{before} {value} {json_text(self.value_end)}"
            parts.append(part if key in required else f"({part})?")
        parts += [json_text(self.tail)] if self.tail else []
        return "\n".join([f"{name}: {' '.join(parts)}", *rules])

    def _value(self, kind: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
        words = kind.get("enum")
        if words and all(isinstance(word, str) for word in words):
            return " | ".join(json_text(word) for word in words)
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


def _definitions(schema: Mapping[str, Any]) -> Json:
    """Definitions that references in a schema point to: they count from the outermost schema."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Format:
    """A format of tool calls."""

    mark: str  # part of every chat template of this format
    begin: str  # before a call
    end: str  # behind a call
    tags: Tags | None = None  # None: a call is JSON

    def rule(self, functions: Sequence[Mapping[str, Any]]) -> str:
        """The rule `call` of a grammar: one call of one of the functions."""
        bodies = [self.tags.rules(f, f"f{n}") if self.tags else _json_rule(f, f"f{n}") for n, f in enumerate(functions)]
        either = " | ".join(f"f{number}" for number in range(len(functions)))
        call = f"call: {json_text(self.begin)} /\\n?/ ({either}) /\\n?/ {json_text(self.end)}"
        return "\n".join([call, *bodies])


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


FORMATS = (
    Format(
        "<minimax:tool_call>", "<minimax:tool_call>", "</minimax:tool_call>",
        Tags(
            _regex(r'<invoke name="?([^">]+)"?>'), _regex(r'<parameter name="?([^">]+)"?>'),
            '<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n", "</invoke>",
        ),
    ),
    Format(
        "<arg_key>", "<tool_call>", "</tool_call>",
        Tags(
            _regex(r"^\s*([\w.-]+)\s*(?=<arg_key>|</tool_call>)"), _regex(r"<arg_key>(.*?)</arg_key>\s*<arg_value>"),
            "{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "",
        ),
    ),
    Format(
        "<function=", "<tool_call>", "</tool_call>",
        Tags(
            _regex(r"<function=([^>]+)>"), _regex(r"<parameter=([^>]+)>"),
            "<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>",
        ),
    ),
    Format("<tool_call>", "<tool_call>", "</tool_call>"),
)  # fmt: skip
"""Formats of MiniMax-M2, GLM-4.5, Qwen3-Coder, and families whose calls are JSON; the first whose mark a template has
counts."""


def format_of(template: str | None) -> Format | None:
    """The format of tool calls in a chat template; None if this server does not know it."""
    return next((each for each in FORMATS if each.mark in (template or "")), None)


def types_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Types of the parameters of tools, which are as OpenAI has them."""
    return {tool["function"]["name"]: _properties(tool["function"].get("parameters") or {}) for tool in tools}
