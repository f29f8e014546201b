"""Answers in the harmony format (gpt-oss): messages in channels, told apart by special tokens.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

`analysis` is what the model thinks; `final`, and what it says in `commentary` to nobody, is its answer; what it says to
a function is a call (github.com/openai/harmony, docs/format.md). The prompt ends within the first message's header,
after `<|start|>assistant`; `<|return|>` and `<|call|>` end the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiermoe.serve.bounds import from_json
from tiermoe.serve.detokenize import overlap
from tiermoe.serve.grammar import json_rule
from tiermoe.serve.tools import ToolCall

CHANNEL, MESSAGE, END, START = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
_ENDS = (END, "<|call|>", "<|return|>", START, CHANNEL)
"""What ends a message's content; with the last two the next one's header begins."""
_NAMED = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"\bto=([\w.-]+)")
_FUNCTIONS = "functions."
_HEADERS = (START, CHANNEL, MESSAGE, "to=")
"""What a header, or the rest of one, begins with."""


def speaks(template: str | None) -> bool:
    """Whether a chat template is of this format."""
    return CHANNEL in (template or "")


def message_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as such templates take it: a thought is `thinking` there. Beside calls they take it or a text, not
    both."""
    given = dict(message)
    thought = given.pop("reasoning_content", None)
    if thought is None:
        return given
    if given.get("tool_calls") and given.get("content"):
        thought, given["content"] = f"{thought}\n{given['content']}", ""
    return {**given, "thinking": thought}


def tool_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as such templates take it: each has a description there."""
    return {**tool, "function": {"description": "", **tool["function"]}}


def rules_of(functions: Sequence[Mapping[str, Any]], schema: Mapping[str, Any] | None) -> str:
    """The rules of a grammar for an answer that is a call of one of the functions, or JSON of a schema; the model may
    think before it."""
    rules, either = [], []
    for number, function in enumerate(functions):
        header = json.dumps(f"commentary to={_FUNCTIONS}{function['name']} ", ensure_ascii=False)
        arguments = json_rule({"type": "object", **(function.get("parameters") or {})})
        rules.append(f'f{number}: {CHANNEL} {header} <|constrain|> "json" {MESSAGE} a{number}\na{number}: {arguments}')
        either.append(f"f{number}")
    if schema is not None:
        rules.append(f'said: {CHANNEL} "final" {MESSAGE} json\njson: {json_rule(schema)}')
        either.append("said")
    thought = f'thought: {CHANNEL} "analysis" {MESSAGE} TEXT {END} {START} "assistant"\nTEXT: /(.|\\n)*/'
    return "\n".join([f"start: thought? ({' | '.join(either)})", thought, *rules])


@dataclass(slots=True)
class _Message:
    """thinks: it is none of the answer. function: which it calls. begun: some of it has been told."""

    thinks: bool = False
    function: str | None = None
    begun: bool = False


class ChannelReader:
    """Reads one answer: text with its special tokens in, (thought, answer, calls) out. Several messages of a kind are
    told with a line break between them. goes_on: it begins within a message to the user. `calls`: the whole ones so
    far."""

    def __init__(self, goes_on: bool = False) -> None:
        self.calls: list[ToolCall] = []
        self._held = ""
        self._message = _Message() if goes_on else None  # None: within a header
        self._first = True
        self._told: set[bool] = set()  # of thoughts, of the answer: something was told

    @property
    def inside(self) -> bool:
        """Whether a thought is under way."""
        return self._message is not None and self._message.thinks

    def add(self, text: str, last: bool = False, cut: bool = False) -> tuple[str, str, list[ToolCall]]:
        """What is certain with more text. last: no more comes. cut: because there is no room for more; then a call that
        has begun is told as far as it is there. What turns out to be no call is part of the answer."""
        self._held += text
        told, calls = {True: "", False: ""}, list[ToolCall]()
        while (message := self._message or self._read_header(last)) is not None:
            self._message, self._first = message, False
            content, ended = self._read_content(message, last)
            call = None
            if message.function and cut and not ended:
                call = ToolCall(message.function, content, whole=False)
            elif message.function and (ended or last):
                call = _call(message.function, content)
            if call is not None:
                calls.append(call)
            elif content:
                told[message.thinks] += self._apart(message) + content
            if not ended:
                break
            self._message = None
        if last:
            self._message = None
        self.calls += [call for call in calls if call.whole]
        return told[True], told[False], calls

    def _read_header(self, last: bool) -> _Message | None:
        """The message whose header is whole. What begins with none is an answer as it is."""
        header, whole, rest = self._held.partition(MESSAGE)
        if not whole:
            return self._bare(last) if self._first else None
        self._held = rest
        channel, to = _NAMED.search(header), _TO.search(header)
        recipient = to[1] if to else ""
        function = recipient.removeprefix(_FUNCTIONS) if recipient.startswith(_FUNCTIONS) else None
        elsewhere = bool(recipient) and function is None
        return _Message((channel is not None and channel[1] == "analysis" and function is None) or elsewhere, function)

    def _bare(self, last: bool) -> _Message | None:
        start = self._held.lstrip()
        header = any(start.startswith(mark) for mark in _HEADERS)
        may_be = not last and any(mark.startswith(start) for mark in _HEADERS)
        return None if header or may_be or not start else _Message()

    def _read_content(self, message: _Message, last: bool) -> tuple[str, bool]:
        """More of a message's content, and whether it has ended; of a call only all of it."""
        held = self._held
        at, mark = min(((held.find(mark), mark) for mark in _ENDS if mark in held), default=(-1, ""))
        if at >= 0:
            self._held = held[at:] if mark in (START, CHANNEL) else held[at + len(mark) :]
            return held[:at], True
        kept = 0 if last else max(overlap(held, mark) for mark in _ENDS)
        if message.function and not last:
            kept = len(held)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept], False

    def _apart(self, message: _Message) -> str:
        """What stands before more of a message's content."""
        between = "" if message.begun or message.thinks not in self._told else "\n"
        message.begun = True
        self._told.add(message.thinks)
        return between


def _call(name: str, content: str) -> ToolCall | None:
    """None where the content is no JSON object: an answer that was cut off."""
    arguments = content.strip() or "{}"
    try:
        return ToolCall(name, arguments) if isinstance(from_json(arguments), dict) else None
    except ValueError:
        return None
