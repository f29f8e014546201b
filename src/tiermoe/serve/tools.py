"""Calls of tools in an answer's text, in the formats that model families write them in.

The format is found in the model's chat template, which describes it to the model. An answer's text is read as it comes:
what may begin a call is held back, and a call is told once it is whole. The text that was sampled stays what it is: a
client sends the call back, and the template writes it again.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiermoe.serve.detokenize import overlap


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: JSON, as OpenAI has it."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


Types = Mapping[str, Mapping[str, Any]]
"""Function → parameter → its JSON schema: what text between tags is a value of."""


@dataclass(frozen=True, slots=True)
class Format:
    """Calls stand between `begin` and `end`. mark: what a chat template of this format has in it. read: the text
    between → calls; ValueError where it is none."""

    mark: str
    begin: str
    end: str
    read: Callable[[str, Types], list[ToolCall]]


def _json_call(text: str, _: Types) -> list[ToolCall]:
    """{"name": …, "arguments": {…}} (Qwen2, Qwen3, Hermes)."""
    said = json.loads(text)
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        raise ValueError("no name")
    arguments = said.get("arguments", said.get("parameters", {}))
    return [ToolCall(said["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))]


def _tagged(names: re.Pattern[str], parameters: re.Pattern[str]) -> Callable[[str, Types], list[ToolCall]]:
    """Calls as tags: `names` finds each function's name and body, `parameters` a body's names and values."""

    def read(text: str, types: Types) -> list[ToolCall]:
        found = []
        for name, body in names.findall(text):
            schemas = types.get(name.strip(), {})
            values = {
                key.strip(): _value(value, schemas.get(key.strip(), {})) for key, value in parameters.findall(body)
            }
            found.append(ToolCall(name.strip(), json.dumps(values, ensure_ascii=False)))
        if not found:
            raise ValueError("no call")
        return found

    return read


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """The value that text between tags stands for: as it is where a string is asked for, else JSON where it is that."""
    text = text.removeprefix("\n").removesuffix("\n")
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
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
    ),
    Format(
        "<arg_key>", "<tool_call>", "</tool_call>",
        _tagged(
            _regex(r"^\s*([\w.-]+)\s*((?:<arg_key>.*)?)$"),
            _regex(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"),
        ),
    ),
    Format(
        "<function=", "<tool_call>", "</tool_call>",
        _tagged(
            _regex(r"<function=([^>]+)>(.*?)</function>"),
            _regex(r"<parameter=([^>]+)>(.*?)</parameter>"),
        ),
    ),
    Format("<tool_call>", "<tool_call>", "</tool_call>", _json_call),
)  # fmt: skip
"""MiniMax-M2, GLM-4.5, Qwen3-Coder, and those whose calls are JSON; the first whose mark a template has."""


def format_of(template: str | None) -> Format | None:
    """The format that a chat template asks for; None where it is none of these."""
    return next((each for each in FORMATS if each.mark in (template or "")), None)


def types_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Of tools as OpenAI has them."""
    return {
        tool["function"]["name"]: (tool["function"].get("parameters") or {}).get("properties") or {} for tool in tools
    }


class CallReader:
    """Reads one answer: text in, text and whole calls out. What turns out to be no call is text."""

    def __init__(self, form: Format, types: Types) -> None:
        self.calls: list[ToolCall] = []
        self._form = form
        self._types = types
        self._held = ""

    def add(self, text: str, last: bool = False) -> tuple[str, list[ToolCall]]:
        """The text that belongs to no call, and the calls that are whole now. last: no more comes."""
        self._held += text
        said, new = "", list[ToolCall]()
        while True:
            before, begin, rest = self._held.partition(self._form.begin)
            if not begin:
                kept = 0 if last else overlap(self._held, self._form.begin)
                said += self._held[: len(self._held) - kept]
                self._held = self._held[len(self._held) - kept :]
                break
            inside, end, after = rest.partition(self._form.end)
            if not end and not last:
                said += before
                self._held = begin + rest
                break
            said += before
            try:
                new += self._form.read(inside, self._types)
            except ValueError:
                said += begin + inside + end
            self._held = after
        if self.calls or new:
            said = said.strip("\n") if not said.strip() else said  # line breaks between calls
        self.calls += new
        return said, new
