"""Calls of tools in an answer's text, in the formats that model families write them in.

The format is found in the model's chat template, which describes it to the model. The text that was sampled stays what
it is: a client sends the call back, and the template writes it again.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json as from_partial_json

from tiermoe.serve.bounds import from_json
from tiermoe.serve.grammar import json_rule


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: JSON, as OpenAI has it. whole: False where the answer was cut off within the call; then the arguments
    are what there was of them."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")
    whole: bool = True

    @property
    def values(self) -> dict[str, Any]:
        """The arguments as an object, of which what was cut off is left out; empty where they are none."""
        try:
            whole, text = self.whole, self.arguments
            found = from_json(text) if whole else from_partial_json(text, allow_partial=_PARTIAL)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


_PARTIAL: Any = "trailing-strings"  # an unfinished string counts as far as it is there
Types = Mapping[str, Mapping[str, Any]]
"""Function → parameter → its JSON schema: what text between tags is a value of."""


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands before a call's parameters, before and after each value, and after them all."""

    head: str
    key: str
    value_end: str
    tail: str

    def rules(self, function: Mapping[str, Any], name: str) -> str:
        """The rule `name` of a grammar: the call of a function, its parameters in the order of its schema."""
        schema = function.get("parameters") or {}
        required, parts, rules = schema.get("required") or (), [_text(self.head.format(function["name"]))], []
        for number, (key, its) in enumerate(_properties(schema).items()):
            value = f"{name}v{number}"
            before = _text(self.key.format(key))
            if its.get("type") == "string" and "enum" not in its:
                rules.append(f"{value}[suffix={_text(self.value_end)}]: /(.|\\n)*/")
                part = f"{before} {value}"
            else:
                rules.append(f"{value}: {self._value(its, schema)}")
                part = f"{before} {value} {_text(self.value_end)}"
            parts.append(part if key in required else f"({part})?")
        parts += [_text(self.tail)] if self.tail else []
        return "\n".join([f"{name}: {' '.join(parts)}", *rules])

    def _value(self, its: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
        words = its.get("enum")
        if words and all(isinstance(word, str) for word in words):
            return " | ".join(_text(word) for word in words)
        return json_rule({**its, **_definitions(schema)})


def _json_rule(function: Mapping[str, Any], name: str) -> str:
    schema = {"type": "object", **(function.get("parameters") or {})}
    its = {"name": {"const": function["name"]}, "arguments": schema}
    whole = {"type": "object", "properties": its, "required": list(its), "additionalProperties": False}
    return f"{name}: {json_rule({**whole, **_definitions(schema)})}"


def _properties(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Parameter → its schema; what is no schema with words restricts nothing."""
    found = schema.get("properties")
    its = found.items() if isinstance(found, dict) else ()
    return {key: value if isinstance(value, dict) else {} for key, value in its}


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What references within a schema point to: they count from the outermost one."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Format:
    """Calls stand between `begin` and `end`. mark: what a chat template of this format has in it. read: the text
    between → calls; ValueError where it is none. tags: how a call is written where it is no JSON."""

    mark: str
    begin: str
    end: str
    read: Callable[[str, Types], list[ToolCall]]
    tags: Tags | None = None

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


def _tagged(names: re.Pattern[str], parameters: re.Pattern[str]) -> Callable[[str, Types], list[ToolCall]]:
    """Calls as tags: `names` finds each function's name and body, `parameters` a body's names and values."""

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
    """The value that text between tags stands for: as it is where a string is asked for, else JSON where it is that."""
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
        _tagged(
            _regex(r'<invoke name="?([^">]+)"?>(.*?)</invoke>'),
            _regex(r'<parameter name="?([^">]+)"?>(.*?)</parameter>'),
        ),
        Tags('<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n", "</invoke>"),
    ),
    Format(
        "<arg_key>", "<tool_call>", "</tool_call>",
        _tagged(
            _regex(r"^\s*([\w.-]+)\s*((?:<arg_key>.*)?)$"),
            _regex(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"),
        ),
        Tags("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", ""),
    ),
    Format(
        "<function=", "<tool_call>", "</tool_call>",
        _tagged(
            _regex(r"<function=([^>]+)>(.*?)</function>"),
            _regex(r"<parameter=([^>]+)>(.*?)</parameter>"),
        ),
        Tags("<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>"),
    ),
    Format("<tool_call>", "<tool_call>", "</tool_call>", _json_call),
)  # fmt: skip
"""MiniMax-M2, GLM-4.5, Qwen3-Coder, and those whose calls are JSON; the first whose mark a template has."""


def format_of(template: str | None) -> Format | None:
    """The format that a chat template asks for; None where it is none of these."""
    return next((each for each in FORMATS if each.mark in (template or "")), None)


def types_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Of tools as OpenAI has them."""
    return {tool["function"]["name"]: _properties(tool["function"].get("parameters") or {}) for tool in tools}
