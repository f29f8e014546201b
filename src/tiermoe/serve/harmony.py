"""Harmony format (gpt-oss): answers as messages in channels, between special tokens.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

`analysis` is the thought; `final`, and a message in `commentary` to nobody, is the answer; a message to a function is a
call (github.com/openai/harmony, docs/format.md). The prompt ends within the first message's header, after
`<|start|>assistant`; `<|return|>` and `<|call|>` end the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiermoe.engine.detokenize import overlap
from tiermoe.model.chat.literals import ObjectReader
from tiermoe.model.chat.reader import CallPiece, Chunk, ToolCall
from tiermoe.serve.call_rules import expressible
from tiermoe.serve.dialects import Json
from tiermoe.serve.grammar import json_rule

CHANNEL, MESSAGE, END, START = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
_ENDS = (END, "<|call|>", "<|return|>", START, CHANNEL)
"""Ends of a message's content; with the last two the next header begins."""
_NAMED = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"\bto=([\w.-]+)")
_FUNCTIONS = "functions."
_HEADERS = (START, CHANNEL, MESSAGE, "to=")
"""Beginnings of a header, or of the rest of one."""


def speaks(template: str) -> bool:
    """Whether a chat template is of this format."""
    return CHANNEL in template


def message_of(message: Mapping[str, Any]) -> Json:
    """A message as such templates take it, of which transformers calls the thought `thinking`: with calls a thought
    or a text, not both."""
    thought, text = message.get("reasoning_content"), message.get("content")
    if thought is None or not text or not message.get("tool_calls"):
        return dict(message)
    return {**message, "reasoning_content": f"{thought}\n{text}", "content": ""}


def tool_of(tool: Mapping[str, Any]) -> Json:
    """A tool as such templates take it, with a description."""
    return {**tool, "function": {"description": "", **tool["function"]}}


def rules_of(functions: Sequence[Mapping[str, Any]], term: str | None) -> str:
    """The rules of a grammar for an answer that is a call of one of the functions, or what `term` says; the model may
    think before it."""
    rules, either = [], []
    for number, function in enumerate(functions):
        header = json.dumps(f"commentary to={_FUNCTIONS}{function['name']} ", ensure_ascii=False)
        schema, _ = expressible(function.get("parameters") or {"additionalProperties": False})
        arguments = json_rule({"type": "object", **schema}, lenient=True)
        rules.append(f'f{number}: {CHANNEL} {header} <|constrain|> "json" {MESSAGE} a{number}\na{number}: {arguments}')
        either.append(f"f{number}")
    if term is not None:
        rules.append(f'said: {CHANNEL} "final" {MESSAGE} content\ncontent: {term}')
        either.append("said")
    thought = f'thought: {CHANNEL} "analysis" {MESSAGE} TEXT {END} {START} "assistant"\nTEXT: /(.|\\n)*/'
    return "\n".join([f"start: thought? ({' | '.join(either)})", thought, *rules])


def thought_end(calls: bool) -> str:
    """Text that ends a thought, up to a channel where none can begin again. calls: it may be that of calls."""
    return f"{END}{START}assistant{CHANNEL}" + ("commentary" if calls else f"final{MESSAGE}")


@dataclass(slots=True)
class _Message:
    """A message after its header."""

    thinks: bool = False  # whether it is no part of the answer
    call: ToolCall | None = None  # that it is; None: it is text
    begun: bool = False  # whether some of it has been emitted
    arguments: ObjectReader = field(default_factory=ObjectReader)  # of the call
    withheld: str = ""  # content that may begin the arguments

    def add_call(self, call: ToolCall, content: str) -> list[CallPiece]:
        """What more content adds to the call. Content that does not begin as a JSON object is text."""
        if self.begun:
            return call.add(self.arguments.take(content)[0])
        self.withheld = (self.withheld + content).lstrip()
        if not self.withheld.startswith("{"):
            self.call = None if self.withheld else call
            return []
        self.begun = True
        return [*call.begin(), *call.add(self.arguments.take(self.withheld)[0])]

    def end_call(self, call: ToolCall, closed: bool) -> list[CallPiece]:
        """The rest of the call; without content, it has no arguments. closed: it was not cut off."""
        pieces = self.add_call(call, "{}") if closed and not self.begun else []
        if not self.begun:
            pieces = call.begin()
        return [*pieces, *call.end(closed and self.arguments.ended)]


class ChannelReader:
    """Reads one answer as it comes: text with its special tokens in, thought, text and calls out. Messages of a kind
    have a line break between them.

    goes_on: whether the answer begins within a message. thinks: that is a thought, and not to the user."""

    def __init__(self, goes_on: bool = False, thinks: bool = False) -> None:
        self.called = False  # whether a whole call has come
        self._withheld = ""
        self._message = _Message(thinks) if goes_on else None  # None: within a header
        self._first = True  # whether no header has come
        self._emitted: set[bool] = set()  # the values of `thinks` of which something was emitted

    @property
    def inside(self) -> bool:
        """Whether a thought is under way."""
        return self._message is not None and self._message.thinks

    def add(self, text: str, last: bool = False, cut: bool = False) -> Chunk:
        """Thought, answer and what is new of calls that are certain with more text. last: no more text comes. cut:
        because the answer was cut off; then a call that has begun ends without being whole. A message to a function
        that is no JSON object is part of the answer."""
        self._withheld += text
        said, calls = {True: "", False: ""}, list[CallPiece]()
        while (message := self._message or self._read_header(last)) is not None:
            self._message, self._first = message, False
            content, ended = self._read_content(last)
            if message.call is not None:
                calls += message.add_call(message.call, content)
                content = message.withheld if message.call is None else ""
            if message.call is not None and (ended or last):
                calls += message.end_call(message.call, ended or not cut)
            if content:
                said[message.thinks] += self._separator(message) + content
            if not ended:
                break
            self._message = None
        if last:
            self._message = None
        self.called = self.called or any(piece.call.whole for piece in calls)
        return Chunk(said[True], said[False], calls)

    def _read_header(self, last: bool) -> _Message | None:
        """The message after a whole header. Text without a header is an answer as it is."""
        header, whole, rest = self._withheld.partition(MESSAGE)
        if not whole:
            return self._bare(last) if self._first else None
        self._withheld = rest
        channel, to = _NAMED.search(header), _TO.search(header)
        recipient = to[1] if to else ""
        if recipient.startswith(_FUNCTIONS):
            return _Message(call=ToolCall(recipient.removeprefix(_FUNCTIONS)))
        return _Message(thinks=bool(recipient) or (channel is not None and channel[1] == "analysis"))

    def _bare(self, last: bool) -> _Message | None:
        start = self._withheld.lstrip()
        header = any(start.startswith(mark) for mark in _HEADERS)
        may_be = not last and any(mark.startswith(start) for mark in _HEADERS)
        return None if header or may_be or not start else _Message()

    def _read_content(self, last: bool) -> tuple[str, bool]:
        """More of the message's content, and whether it has ended."""
        held = self._withheld
        at, mark = min(((held.find(mark), mark) for mark in _ENDS if mark in held), default=(-1, ""))
        if at >= 0:
            self._withheld = held[at:] if mark in (START, CHANNEL) else held[at + len(mark) :]
            return held[:at], True
        kept = 0 if last else max(overlap(held, mark) for mark in _ENDS)
        self._withheld = held[len(held) - kept :]
        return held[: len(held) - kept], False

    def _separator(self, message: _Message) -> str:
        """Line break before a message's content, where another of its kind came before."""
        between = "" if message.begun or message.thinks not in self._emitted else "\n"
        message.begun = True
        self._emitted.add(message.thinks)
        return between
