"""Tool calls: the formats in which model families write them, their rules of a grammar, and the reader of an answer's
text as it comes.

The sampled text stays as it is: a client sends the call back, and the template writes it again.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tiermoe.engine.detokenize import overlap
from tiermoe.serve.dialects import Json, from_json
from tiermoe.serve.fields import readable_object
from tiermoe.serve.grammar import json_rule
from tiermoe.serve.parameters import TEXT, Kinds, Parameters, kinds_of, properties, value_of

# --- formats ---


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags of a call that is not JSON."""

    name: re.Pattern[str]  # finds the function, which begins a call
    parameter: re.Pattern[str]  # finds a parameter, up to its value
    head: str  # as they are written: before the parameters; {} is the function
    key: str  # before each value; {} is the parameter
    value_end: str  # after each value
    tail: str  # after the parameters

    def rules(self, function: Mapping[str, Any], name: str) -> str:
        """The rule `name` of a grammar: the call of a function, its parameters in the order of its schema."""
        schema = function.get("parameters") or {}
        required, parts, rules = schema.get("required") or (), [json_text(self.head.format(function["name"]))], []
        for number, (key, kind) in enumerate(properties(schema).items()):
            value = f"{name}v{number}"
            before = json_text(self.key.format(key))
            if "string" in kinds_of(kind, schema) and "enum" not in kind:
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
    schema = {"type": "object", **(function.get("parameters") or {"additionalProperties": False})}
    fields = {"name": {"const": function["name"]}, "arguments": schema}
    whole = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return f"{name}: {json_rule({**whole, **_definitions(schema)})}"


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
    end: str  # after a call
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


# --- reading ---


@dataclass(slots=True)
class ToolCall:
    """A call of a tool, as far as it has come."""

    name: str
    arguments: str = ""  # JSON, as OpenAI has it; the beginning of it where the call is not whole
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")
    whole: bool = False  # True once it has ended, unless its arguments were not complete

    @property
    def values(self) -> Json:
        """The arguments as an object, without what was cut off; empty if they are no object."""
        return readable_object(self.arguments)

    def begin(self) -> list[CallPiece]:
        return [CallPiece(self, "begin")]

    def add(self, arguments: str) -> list[CallPiece]:
        """Adds to the arguments."""
        self.arguments += arguments
        return [CallPiece(self, "arguments", arguments)] if arguments else []

    def end(self, whole: bool) -> list[CallPiece]:
        self.whole = whole
        return [CallPiece(self, "end")]


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What happens next to a call: it begins, it gets more arguments, it ends."""

    call: ToolCall
    kind: Literal["begin", "arguments", "end"]
    arguments: str = ""  # those that come now


class JsonObject:
    """Incremental scanner of one JSON object: finds its end, and escapes control characters in its strings."""

    def __init__(self) -> None:
        self.ended = self.quoted = False
        self._depth = 0
        self._escaped = False

    def take(self, text: str) -> tuple[str, str]:
        """What of more text belongs to the object, and the rest."""
        taken = list[str]()
        for at, letter in enumerate(text):
            if self.ended:
                return "".join(taken), text[at:]
            if self.quoted:
                # behind a backslash the rest of the escape
                taken.append(json_text(letter)[1 + self._escaped : -1] if letter < " " else letter)
                self.quoted = letter != '"' or self._escaped
                self._escaped = letter == "\\" and not self._escaped
                continue
            taken.append(letter)
            if letter == '"':
                self.quoted = True
            elif letter in "{}[]":
                self._depth += 1 if letter in "{[" else -1
                self.ended = self._depth == 0
        return "".join(taken), ""


_CALL = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]+)"(\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{))?')
"""The beginning of a call as JSON: the function, and whether its arguments follow, so that they can pass."""


class _JsonBlock:
    """A call as JSON: {"name": …, "arguments": {…}} (Qwen2, Qwen3, Hermes). Its arguments pass as they are written. One
    that begins otherwise is read once it is whole."""

    def __init__(self) -> None:
        self.held = ""  # of which nothing has come
        self._call: ToolCall | None = None
        self._arguments = JsonObject()

    @property
    def named(self) -> bool:
        """Whether a call has begun."""
        return self._call is not None

    def ends(self, tag: str) -> bool:
        """Whether a tag that comes now ends the block: within a string it does not."""
        scanned = self._arguments
        if self._call is None:
            scanned = JsonObject()
            scanned.take(self.held)
        return not scanned.quoted

    def add(self, text: str) -> list[CallPiece]:
        """What is certain with more text."""
        if self._call is not None:
            return self._call.add(self._arguments.take(text)[0])
        self.held += text
        found = _CALL.match(self.held)
        if found is None or found[2] is None:
            return []
        self._call = ToolCall(found[1])
        return [*self._call.begin(), *self.add(self.held[found.end() :])]

    def end(self, closed: bool) -> list[CallPiece]:
        """The rest. closed: it was not cut off."""
        if self._call is not None:
            return self._call.end(closed and self._arguments.ended)
        try:
            name, arguments = _whole_call(self.held) if closed else _cut_call(self.held)
        except ValueError:
            return []
        self._call = ToolCall(name)
        return [*self._call.begin(), *self._call.add(arguments), *self._call.end(closed)]


def _whole_call(text: str) -> tuple[str, str]:
    """Function and arguments; ValueError if the text is no call."""
    taken, rest = JsonObject().take(text)
    said = from_json(taken + rest)
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        raise ValueError("no name")
    arguments = said.get("arguments", said.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = from_json(arguments)  # a client sends them back, and templates take no others
    return said["name"], json.dumps({} if arguments is None else arguments)


def _cut_call(text: str) -> tuple[str, str]:
    """The function alone; ValueError if the text does not name one."""
    found = _CALL.match(text)
    if found is None:
        raise ValueError("no name")
    return found[1], ""


class _TaggedBlock:
    """Calls as tags: each parameter passes once it is whole, and a string as it is written. end: the tag after the
    block."""

    def __init__(self, tags: Tags, end: str, parameters: Parameters) -> None:
        self.named = False  # whether a call has begun
        self.held = ""  # of which nothing has come
        self._tags = tags
        self._end = end
        self._parameters = parameters
        self._value_end = tags.value_end.strip()
        self._call: ToolCall | None = None  # None: between calls
        self._kinds: Kinds | None = None  # of the value that is written; None: between parameters
        self._value_begun = False

    def ends(self, tag: str) -> bool:
        """Whether a tag that comes now ends the block: one that begins another may be part of a value."""
        return tag == self._end or self._kinds is None

    def add(self, text: str) -> list[CallPiece]:
        """What is certain with more text."""
        self.held += text
        pieces = list[CallPiece]()
        while (new := self._next()) is not None:
            pieces += new
        return pieces

    def end(self, closed: bool) -> list[CallPiece]:
        """The rest. closed: it was not cut off."""
        pieces = self.add(self._end) if closed and self._kinds is None else []
        if self._call is None:
            return pieces
        if self._kinds and "string" not in self._kinds:
            pieces += self._call.add(self.held[: len(self.held) - overlap(self.held, self._value_end)].strip())
        return [*pieces, *self._ended(self._call, closed and self._kinds is None)]

    def _next(self) -> list[CallPiece] | None:
        """What the held text adds next; None: nothing without more."""
        if self._call is None:
            return self._begun()
        return self._parameter(self._call) if self._kinds is None else self._value(self._call, self._kinds)

    def _begun(self) -> list[CallPiece] | None:
        found = self._tags.name.search(self.held)
        if found is None:
            return None
        self._call, self.named, self.held = ToolCall(found[1].strip()), True, self.held[found.end() :]
        return self._call.begin()

    def _parameter(self, call: ToolCall) -> list[CallPiece] | None:
        """Begins the next parameter, or ends the call."""
        found, tail = self._tags.parameter.search(self.held), self._tags.tail or self._end
        at = self.held.find(tail)
        if at >= 0 and (found is None or at < found.start()):
            self.held = self.held[at + len(tail) :]
            return self._ended(call, True)
        if found is None:
            return None
        key, self.held = found[1].strip(), self.held[found.end() :]
        self._kinds, self._value_begun = self._parameters.get(call.name, {}).get(key, Kinds()), False
        quote = '"' * (self._kinds == TEXT)
        return call.add(f"{', ' if call.arguments else '{'}{json_text(key)}: {quote}")

    def _value(self, call: ToolCall, kinds: Kinds) -> list[CallPiece] | None:
        """More of a value. It ends where the call does, too."""
        string = kinds == TEXT
        if string and not self._value_begun and self.held:
            self._value_begun, self.held = True, self.held.removeprefix("\n")
        marks = [mark for mark in (self._value_end, self._tags.tail) if mark]
        at = min((at for mark in marks if (at := self.held.find(mark)) >= 0), default=-1)
        if at >= 0:
            text, self.held, self._kinds = self.held[:at], self.held[at:].removeprefix(self._value_end), None
            return call.add(json_text(text.removesuffix("\n"))[1:] if string else json_text(value_of(text, kinds)))
        kept = max(overlap(self.held, mark) for mark in marks)
        text = self.held[: len(self.held) - kept].removesuffix("\n")
        if not string or not text:
            return None
        self.held = self.held[len(text) :]
        return call.add(json_text(text)[1:-1])

    def _ended(self, call: ToolCall, whole: bool) -> list[CallPiece]:
        self._call = None
        return [*(call.add("}" if call.arguments else "{}") if whole else []), *call.end(whole)]


class CallReader:
    """Reads one answer as it comes: text in, text and calls out.

    Text that may begin a call is withheld. A call begins once its function and its arguments are certain to; what turns
    out to be no call is text. A call that begins with a tag of its own and a tool's name may lack the tags around it:
    Qwen3-Coder leaves them out now and then. one: nothing comes after the first call. forced: the answer must be a
    call, so that its beginning is never text."""

    def __init__(self, form: Format, parameters: Parameters, one: bool = False, forced: bool = False) -> None:
        self.called = False  # whether a whole call has come
        self._one = one
        self._forced = forced
        self._form = form
        self._parameters = parameters
        self._withheld = ""
        head = form.tags.head.rstrip("\n") if form.tags is not None else ""
        self._heads = [head.format(name) for name in parameters] if head.startswith("<") else []
        self._bare = False  # whether the block that is read, or was last, has no tags around it
        self._block: _JsonBlock | _TaggedBlock | None = None  # that is read; None: between blocks
        self._begun = self._ended = False  # whether some call has

    def add(self, text: str, last: bool = False, cut: bool = False) -> tuple[str, list[CallPiece]]:
        """Text that belongs to no call, and what is new of calls. last: no more text comes. cut: because the answer was
        cut off; then a call that has begun ends without being whole."""
        self._withheld += text
        said, pieces = "", list[CallPiece]()
        while not (self._one and self._ended):
            if self._block is None:
                said += self._before_block(last)
            if self._block is None:
                break
            more, new = self._within(self._block, last, cut)
            said += more
            pieces += new
            self._begun = self._begun or bool(new)
            self._ended = self._ended or any(piece.kind == "end" for piece in new)
            if self._block is not None:
                break
        self.called = self.called or any(piece.call.whole for piece in pieces)
        return said, pieces

    def _before_block(self, last: bool) -> str:
        """Text before the next block, which begins where it does."""
        form, openers = self._form, (self._form.begin, *self._heads)
        if self._bare:  # the tag after it may be there
            start = self._withheld.lstrip()
            if not last and len(start) < len(form.end) and form.end.startswith(start):
                return ""
            self._bare = False
            if start.startswith(form.end):
                self._withheld = start.removeprefix(form.end)
        found = min(((at, opener) for opener in openers if (at := self._withheld.find(opener)) >= 0), default=None)
        if found is not None:
            at, opener = found
            self._bare = opener != form.begin
            self._block = _JsonBlock() if form.tags is None else _TaggedBlock(form.tags, form.end, self._parameters)
        else:
            kept = 0 if last and not self._forced else max(overlap(self._withheld, opener) for opener in openers)
            at = len(self._withheld) - kept
        text = self._withheld[:at]
        if (self._forced or self._begun) and not text.strip():
            if found is None and not last:
                return ""  # line breaks before calls and between them are no text
            text = text.strip("\n")
        self._withheld = self._withheld[at:].removeprefix(form.begin if found else "")
        return text

    def _within(self, block: _JsonBlock | _TaggedBlock, last: bool, cut: bool) -> tuple[str, list[CallPiece]]:
        """A block's calls; its text if it has ended without one. It ends where another begins, too."""
        tail = self._form.tags.tail if self._bare and self._form.tags is not None else ""
        tags, pieces, end = (tail or self._form.end, self._form.begin), list[CallPiece](), ""
        while not end and (found := [(at, tag) for tag in tags if (at := self._withheld.find(tag)) >= 0]):
            at, tag = min(found)
            pieces += block.add(self._withheld[:at])
            if tag == tail:
                pieces += block.add(tail)
                end, self._withheld = tag, self._withheld[at + len(tail) :]
            elif block.ends(tag):
                end, self._withheld = tag, self._withheld[at:].removeprefix(self._form.end)
            else:
                pieces += block.add(tag)
                self._withheld = self._withheld[at + len(tag) :]
        if not end:
            kept = 0 if last else max(overlap(self._withheld, tag) for tag in tags)
            pieces += block.add(self._withheld[: len(self._withheld) - kept])
            self._withheld = self._withheld[len(self._withheld) - kept :]
        said = ""
        if end or last:
            text, self._block = f"{self._form.begin}{block.held}{end if end == self._form.end else ''}", None
            pieces += block.end(bool(end) or not cut)
            said = "" if block.named or (self._forced and not end) else text
        if self._one and any(piece.kind == "end" for piece in pieces):  # a block may have several calls
            pieces = pieces[: [piece.kind for piece in pieces].index("end") + 1]
        return said, pieces
