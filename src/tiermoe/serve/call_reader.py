"""Calls of tools in an answer's text as it comes: what may begin a call is held back, and a call is told once it is
whole, or once the answer is cut off within it."""

from __future__ import annotations

import json
import re

from tiermoe.serve.detokenize import overlap
from tiermoe.serve.tools import Format, Tags, ToolCall, Types, value_of


class CallReader:
    """Reads one answer: text in, text and calls out. What turns out to be no call is text. one: nothing is told after
    the first call. forced: an answer is a call, so that no beginning of one is text. `calls`: the whole ones so far."""

    def __init__(self, form: Format, types: Types, one: bool = False, forced: bool = False) -> None:
        self.calls: list[ToolCall] = []
        self._one = one
        self._forced = forced
        self._form = form
        self._types = types
        self._held = ""

    def add(self, text: str, last: bool = False, cut: bool = False) -> tuple[str, list[ToolCall]]:
        """The text that belongs to no call, and the calls that are whole now. last: no more comes. cut: because there
        is no room for more; then a call that has begun is told as far as it is there."""
        self._held += text
        said, new = "", list[ToolCall]()
        while not (self._one and (self.calls or new)):
            before, begin, rest = self._held.partition(self._form.begin)
            if not begin:
                kept = 0 if last and not self._forced else overlap(self._held, self._form.begin)
                said += self._held[: len(self._held) - kept]
                self._held = self._held[len(self._held) - kept :]
                break
            said += before
            inside, end, after = rest.partition(self._form.end)
            if not end and not last:
                self._held = begin + rest
                break
            self._held = after
            found = [] if cut and not end else self._read(inside)
            if not found and not end and (cut or self._forced):
                found = _begun(self._form, inside, self._types)
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


def _begun(form: Format, text: str, types: Types) -> list[ToolCall]:
    """The call that a text begins with and does not end; none where not even its function is named."""
    call = _tagged(form.tags, text.lstrip("\n"), types) if form.tags else _json(text)
    return [] if call is None else [call]


_CALL = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")(?:\s*,\s*"(?:arguments|parameters)"\s*:\s*(.*))?', re.DOTALL
)


def _json(text: str) -> ToolCall | None:
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


def _tagged(tags: Tags, text: str, types: Types) -> ToolCall | None:
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
