"""Learning a chat format from the template itself: it renders conversations that differ in one thing, and the
differences are the format. What was learned is tried on the template's own text; what does not read there is dropped,
with the reason."""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from tiermoe.errors import first_line
from tiermoe.model.chat.format import (
    ARGUMENTS,
    FUNCTIONS,
    ID,
    INDEX,
    KEY,
    NAME,
    PLAIN,
    VALUE,
    CallFormat,
    ChatFormat,
)
from tiermoe.model.chat.jinja import render
from tiermoe.model.chat.parameters import TEXT, Kinds
from tiermoe.model.chat.reader import AnswerReader, CallPatterns, ToolCall

Message = dict[str, Any]

_USER, _TEXT, _THOUGHT = "qzuserq", "qztextq", "qzthoughtq"
_FIRST, _SECOND = "qzcalla", "qzcallb"  # functions, of one length as keys are
_KEYS, _VALUES = ("qzkeya", "qzkeyb"), ("qzvalue", "qzmore")
_NUMBER, _INNER = 31337, "qzinner"
_IDS = ("qzid00001", "qzid00002")
_TYPES: dict[str, Any] = {
    "string": _VALUES[0], "integer": _NUMBER, "number": _NUMBER + 0.5, "boolean": True, "null": None,
    "array": [_VALUES[0], {_INNER: _VALUES[1]}], "object": {_INNER: [_VALUES[0]]},
}  # fmt: skip
_HARD = "a \"b\"\n'c' <d> & \\e {f} é"
"""A string of letters that some ways of writing cannot hold."""
_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
_SWITCHES = ("enable_thinking", "thinking", "enable_reasoning")
_ARGUMENTS: tuple[Literal["object", "text"], ...] = ("object", "text")
_TAGS = r"<[^<>\n]{1,80}>|\[/?[A-Z_]{2,}\]"
_SCHEMAS = {f"p{kind}": {"type": kind, "description": "d"} for kind in ("string", "integer", "number", "boolean")}
_KINDS = {
    name: {**dict.fromkeys(_KEYS, TEXT), **{f"p{kind}": Kinds({kind}) for kind in _TYPES}} for name in (_FIRST, _SECOND)
}
_TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {
        "type": "object", "required": [], "properties": {
            **_SCHEMAS, **{key: {"type": "string", "description": "d"} for key in _KEYS},
        },
    }}}
    for name in (_FIRST, _SECOND)
]  # fmt: skip


def _asked(text: str = _USER) -> Message:
    return {"role": "user", "content": text}


def _said(text: str = "", **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def _in_parts(message: Message) -> Message:
    text = message.get("content")
    return {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message


class _Unlearned(Exception):
    """A template that cannot be learned from, and why."""


@dataclass(slots=True)
class _Probe:
    """A template and its renderings. error: the last that a rendering raised."""

    rendered: Callable[..., str]  # render, of messages and variables
    atoms: _Atoms
    blank: str | None = ""  # content of a message with calls alone
    arguments: Literal["object", "text"] = "object"
    names: bool = False  # whether ids hold the function
    parts: bool = False  # whether contents must be lists of parts
    error: str = ""
    dangling: str = ""  # the next prompt, which some templates always add
    known: dict[str, str | None] = field(default_factory=dict)

    def text(self, messages: Sequence[Message], **variables: Any) -> str | None:
        """A rendered conversation; None if the template refuses it."""
        if self.parts:
            messages = [_in_parts(each) for each in messages]
        key = json.dumps([messages, variables])
        if key not in self.known:
            try:
                self.known[key] = self.rendered(messages, tools=_TOOLS, **variables)
            except MemoryError:
                raise
            except Exception as error:  # templates raise errors of every kind
                self.error = first_line(error)
                self.known[key] = None
        return self.known[key]

    def after(self, messages: Sequence[Message], **variables: Any) -> str | None:
        """What follows the user's first text."""
        text = self.text([_asked(), *messages], **variables)
        return None if text is None or _USER not in text else text.rpartition(_USER)[2]

    def body(self, text: str | None, header: str) -> str:
        """A turn after its header."""
        return (text or "")[len(self.atoms.beginning(text or "", header)) :].removesuffix(self.dangling)

    def prompt(self, **variables: Any) -> str | None:
        return self.after([], add_generation_prompt=True, **variables)

    def id_of(self, name: str, number: int) -> str:
        return FUNCTIONS.replace(NAME, name).replace(INDEX, str(number)) if self.names else _IDS[number]

    def calls(self, *calls: tuple[str, Mapping[str, Any]], **more: Any) -> Message:
        """An assistant's message with calls, in the form that the template takes."""
        given = []
        for number, (name, arguments) in enumerate(calls):
            said = json.dumps(arguments) if self.arguments == "text" else dict(arguments)
            given.append(
                {"id": self.id_of(name, number), "type": "function", "function": {"name": name, "arguments": said}}
            )
        return {"role": "assistant", "content": self.blank, "tool_calls": given, **more}


# --- texts that are compared by their atoms ---


def _shared(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """What the first begins with as the other does, whatever blanks they have."""
    at = to = end = 0
    while at < len(one) and to < len(other):
        if one[at] == other[to]:
            at, to = at + 1, to + 1
            end = at
        elif one[at].isspace():
            at += 1
        elif other[to].isspace():
            to += 1
        else:
            break
    return list(one[:end])


def _without(text: str, tags: Sequence[str]) -> str:
    """A text without an empty thought."""
    for tag in tags:
        text = text.replace(tag, "") if tag else text
    return text if text.strip() else ""


class _Atoms:
    """Splits texts into atoms: tags, words, single letters. special: tokens that are one, too."""

    def __init__(self, special: Sequence[str]) -> None:
        tag = "|".join([*map(re.escape, sorted(special, key=len, reverse=True)), _TAGS])
        self.tag, self._atom = re.compile(tag), re.compile(rf"{tag}|\w+|\s|.", re.DOTALL)

    def of(self, text: str) -> list[str]:
        return self._atom.findall(text)

    def last_tag(self, text: str) -> str:
        """The tag that a text ends with; empty if it ends otherwise."""
        tags = self.tag.findall(text)
        return tags[-1] if tags and text.rstrip().endswith(tags[-1]) else ""

    def beginning(self, *texts: str) -> str:
        """What all texts begin with."""
        first, *others = map(self.of, texts)
        for each in others:
            first = _shared(first, each)
        return "".join(first)

    def ending(self, one: str, other: str) -> str:
        """What both end with. A tag that comes again in it is no beginning of it."""
        shared = _shared(self.of(one)[::-1], self.of(other)[::-1])[::-1]
        while shared and shared[0] in shared[1:] and self.tag.fullmatch(shared[0]):
            del shared[0]
        return "".join(shared)


# --- what is learned ---


def learned(rendered: Callable[..., str], template: str, special: Sequence[str] = ()) -> ChatFormat:
    """The format of a template. rendered: renders (messages, add_generation_prompt, tools, variables).
    special: the special tokens of the vocabulary.

    What cannot be learned is left out; `no_calls` says why calls are."""
    probe = _Probe(rendered, _Atoms(special))
    if probe.text([_asked()]) is None:
        return replace(PLAIN, no_calls=f"the chat template refuses a user's message: {probe.error}")
    form = replace(PLAIN, **_roles(probe))
    plain = probe.after([_said(_TEXT)])
    if plain is None or _TEXT not in plain:
        return replace(form, no_calls="the chat template leaves out what the assistant says")
    switch = next((each for each in _SWITCHES if each in template and _switches(probe, each)), "")
    header = _header(probe, plain, switch)
    thought, where = _thought(probe, template, header, switch)
    form = replace(form, thought=thought, thought_field=where, switch=switch)
    before, _, after = probe.body(plain, header).partition(_TEXT)
    after, probe.dangling = _turn_end(probe, after)
    tags = thought or ("", "")
    try:
        calls, kept = _calls(probe, header, tags, after)
        form = replace(form, calls=calls, arguments=probe.arguments, id_form=_id_form(probe))
        closed = after[: len(after.rstrip()) - len(kept)]
    except _Unlearned as error:
        stated = next((calls for mark, calls in STATED.items() if mark in template), None)
        form, kept, closed = replace(form, calls=stated, no_calls=str(error)), after, ""
    form = replace(form, text=(_without(before, tags).strip(), closed.strip()), blank=probe.blank is not None)
    return _tried(_with_ends(form, probe, kept, after), probe, header)


def _switches(probe: _Probe, name: str) -> bool:
    return probe.prompt(**{name: True}) != probe.prompt(**{name: False})


def _roles(probe: _Probe) -> dict[str, Any]:
    """Which messages the template takes."""
    roles, odd = {"user", "assistant"}, "qzoddq"

    def has(*messages: Message) -> bool:
        return odd in (probe.text(messages) or "")

    probe.parts = not has(_asked(odd)) and has(_in_parts(_asked(odd)))
    system, developer = ({"role": role, "content": odd} for role in ("system", "developer"))
    roles |= {each["role"] for each in (system, developer) if has(each, _asked())}
    two = [system, {"role": "system", "content": "qzagainq"}, _asked()]
    later = has(_asked(), _said(_TEXT), system, _asked()) and has(*two) and "qzagainq" in (probe.text(two) or "")
    tool = {"role": "tool", "content": odd, "tool_call_id": _IDS[0], "name": _FIRST}
    called = probe.calls((_FIRST, {_KEYS[0]: _VALUES[0]}))
    probe.arguments = "text"
    also = probe.calls((_FIRST, {_KEYS[0]: _VALUES[0]}))
    probe.arguments = "object"
    if has(_asked(), called, tool) or has(_asked(), also, tool):
        roles.add("tool")
    return {
        "roles": frozenset(roles), "first_system": not later, "parts": probe.parts,
        "alternates": not has(_asked(odd), _asked()),
    }  # fmt: skip


def _header(probe: _Probe, plain: str, switch: str) -> str:
    """What begins every turn of the assistant."""
    texts = [plain.partition(_TEXT)[0]]
    for each in ({}, *({switch: value} for value in (True, False) if switch)):
        prompt = probe.prompt(**each)
        texts += [prompt] if prompt and prompt != probe.after([], **each) else []  # some have none
    earlier = probe.text([_asked(), _said(_TEXT), _asked("qzlaterq")]) or ""
    if _USER in earlier.partition(_TEXT)[0] and _TEXT in earlier:
        texts.append(earlier.partition(_TEXT)[0].rpartition(_USER)[2])
    thinking = [probe.after([_said(_TEXT, **{name: _THOUGHT})]) or "" for name in _THOUGHT_FIELDS]
    texts += [each.partition(_THOUGHT)[0] for each in thinking if _THOUGHT in each]
    # not what a switch puts before it
    texts = texts[:1] + [each for each in texts[1:] if probe.atoms.beginning(texts[0], each)]
    header = probe.atoms.of(probe.atoms.beginning(*texts))
    rests = [each.partition(_TEXT)[0][len("".join(header)) :] for each in (plain, *thinking)]
    if header and probe.atoms.tag.fullmatch(header[-1]) and any(header[-1] in each for each in rests):
        header.pop()  # it begins each part of a turn
    return "".join(header)


def _thought(probe: _Probe, template: str, header: str, switch: str) -> tuple[tuple[str, str] | None, str]:
    """What begins and ends a thought, and the field of a message that it is in."""
    on = {switch: True} if switch else {}
    prompts = [each for each in (probe.prompt(**on), probe.prompt()) if each]
    for where in _THOUGHT_FIELDS:
        text = probe.body(probe.after([_said(_TEXT, **{where: _THOUGHT})], **on), header)
        other = probe.body(_with_call(probe, where, on), header)
        betweens = [each.partition(_THOUGHT)[2].partition(mark)[0] for each, mark in ((text, _TEXT), (other, _FIRST))]
        betweens = [each for each in betweens if each]
        if not betweens:
            continue
        before = (text if _THOUGHT in text else other).partition(_THOUGHT)[0]
        said = probe.body(probe.after([_said(_TEXT)], **on), header).partition(_TEXT)[0].strip()
        between = probe.atoms.beginning(*betweens) or betweens[0]
        if said and betweens[0].rstrip().endswith(said) and betweens[0].strip() != said:
            between = betweens[0].rstrip().removesuffix(said)
        if len(betweens) == 1 and (tag := probe.atoms.tag.search(between)):
            between = between[: tag.end()]
        begin, end = before.strip(), between.strip()
        if not begin:
            begin = _opened(probe, header, end) or (probe.body(prompts[0], header).strip() if prompts else "")
        if begin and end:
            return (begin, end), where
    inside = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _TEXT}]
    text = probe.body(probe.after([{"role": "assistant", "content": inside}]), header)
    before, thought, rest = text.partition(_THOUGHT)
    if thought and before.strip() and "type" not in before and _TEXT in rest and rest.partition(_TEXT)[0].strip():
        return (before.strip(), rest.partition(_TEXT)[0].strip()), "parts"
    for prompt in prompts:
        for tag in reversed(probe.atoms.tag.findall(prompt)):
            closer = f"{tag[0]}/{tag[1:]}"
            if closer in template and prompt.rstrip().endswith((tag, closer)):
                return (tag, closer), _THOUGHT_FIELDS[0]
    found = re.search(r"([<\[])/([\w:]*think[\w:]*[>\]])", template, re.IGNORECASE)
    return ((found[1] + found[2], found[0]) if found else None), _THOUGHT_FIELDS[0]


def _with_call(probe: _Probe, where: str, on: Mapping[str, Any]) -> str:
    """A turn with a thought and a call, whatever form of arguments the template takes."""
    for probe.arguments in _ARGUMENTS:
        text = probe.after([probe.calls((_FIRST, _args(0)), **{where: _THOUGHT})], **on) or ""
        if _THOUGHT in text and _FIRST in text.partition(_THOUGHT)[2]:
            break
    probe.arguments = "object"
    return text


def _opened(probe: _Probe, header: str, end: str) -> str:
    """The tag at the end of a text that another closes."""
    tag = probe.atoms.last_tag(header)
    return tag if tag and tag.strip("<>[]|") in end else ""


# --- calls ---


def _args(number: int) -> dict[str, Any]:
    return {_KEYS[number]: _VALUES[number]}


@dataclass(frozen=True, slots=True)
class _Cut:
    """A turn with a call: up to the function or the id, from there to the arguments, and after these."""

    before: str
    head: str
    after: str
    json: bool  # whether the arguments are one JSON object


def _cut(probe: _Probe, text: str, number: int) -> _Cut | None:
    """Where a text has a call of `_args`; None if it has none."""
    name, identity = (_FIRST, _SECOND)[number], probe.id_of((_FIRST, _SECOND)[number], number)
    found = [at for each in (name, identity) if (at := text.find(each)) >= 0]
    if not found or name not in text:
        return None
    for at in (match.start() for match in re.finditer(r"\{", text)):
        try:
            value, end = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            continue
        if value == _args(number):
            if at < min(found):
                raise _Unlearned("arguments come before the function")
            return _Cut(text[: min(found)], text[min(found) : at], text[end:], True)
    key, value = text.find(_KEYS[number], min(found)), text.find(_VALUES[number], min(found))
    if not min(found) < key < value:
        return None
    return _Cut(text[: min(found)], text[min(found) : key], text[value + len(_VALUES[number]) :], False)


def _one(probe: _Probe, header: str) -> _Cut:
    """A turn with one call, in the form of ids and arguments that the template takes."""
    printed = None
    for probe.names, probe.blank, probe.arguments in product((False, True), ("", None), _ARGUMENTS):
        text = probe.body(probe.after([probe.calls((_FIRST, _args(0)))]), header)
        cut = _cut(probe, text, 0)
        if cut is None or '\\"' in text:
            continue
        if cut.json or f"{{'{_KEYS[0]}'" not in text:
            return cut
        printed = printed or (cut, probe.names, probe.blank, probe.arguments)  # as Python prints an object
    if printed is not None:
        cut, probe.names, probe.blank, probe.arguments = printed
        return cut
    probe.names, probe.blank, probe.arguments = False, "", "object"
    why = f"it refuses an assistant's message with one: {probe.error}" if probe.error else "it leaves them out"
    raise _Unlearned(f"the chat template shows no calls of tools ({why})")


def _slotted(probe: _Probe, text: str, number: int) -> str:
    identity = FUNCTIONS if probe.names else ID
    text = text.replace(probe.id_of((_FIRST, _SECOND)[number], number), identity).replace(
        (_FIRST, _SECOND)[number], NAME
    )
    return text.replace(_KEYS[number], KEY)


def _indexed(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """What both begin with, with a slot where the number of the second is one more."""
    found = []
    for a, b in zip(first, second, strict=False):
        if a != b and not (a.isdigit() and b.isdigit() and int(b) == int(a) + 1):
            break
        found.append(a if a == b else INDEX)
    return found


def _calls(probe: _Probe, header: str, thought: Sequence[str], after_text: str) -> tuple[CallFormat, str]:
    """How calls are written, and what ends the turn after them."""
    one = _one(probe, header)
    two = probe.body(probe.after([probe.calls((_FIRST, _args(0)), (_SECOND, _args(1)))]) or "", header)
    first = _cut(probe, two, 0)
    second = None if first is None else _cut(probe, first.after, 1)
    if first is None or second is None:  # the template takes one alone
        kept = probe.atoms.ending(one.after.rstrip(), after_text.rstrip())
        call = _slotted(probe, _without(one.before, thought) + one.head, 0)
        form, begin, between = CallFormat(call, single=True), "", ""
        tail, rest = one.after.rstrip()[: len(one.after.rstrip()) - len(kept)], kept
    else:
        before = _without(first.before, thought)
        atoms, seconds = probe.atoms.of(before), probe.atoms.of(second.before)
        lead = _indexed(atoms[::-1], seconds[::-1])[::-1]
        size = len("".join(atoms[len(atoms) - len(lead) :]))
        gap = seconds[: len(seconds) - len(lead)]
        tail = probe.atoms.beginning("".join(gap), one.after)
        head = _indexed(probe.atoms.of(_slotted(probe, first.head, 0)), probe.atoms.of(_slotted(probe, second.head, 1)))
        begin, between = before[: len(before) - size], "".join(gap)[len(tail) :]
        form, rest = CallFormat("".join([*lead, *head])), second.after.rstrip()
        rest = rest[len(tail) :]  # whose id may be another
        kept = probe.atoms.ending(rest, after_text.rstrip())
    begin = begin if begin.strip() else ""
    form = replace(form, begin=begin, between=between, end=rest[: len(rest) - len(kept)])
    if one.json:
        return replace(form, call=form.call + ARGUMENTS + _slotted(probe, tail, 0)), kept
    return _with_parameters(probe, header, form, one, tail), kept


def _with_parameters(probe: _Probe, header: str, form: CallFormat, one: _Cut, tail: str) -> CallFormat:
    """How parameters are written, of a call that is so far known up to the first one. tail: after a value."""

    def values(**given: Any) -> str:
        return probe.body(probe.after([probe.calls((_FIRST, given))]) or "", header)

    two = values(**{_KEYS[0]: _VALUES[0], _KEYS[1]: _VALUES[1]})
    gap = two.partition(_VALUES[0])[2].partition(_KEYS[1])[0]
    if not gap:
        raise _Unlearned("a call with two parameters cannot be read")
    key = probe.atoms.ending(form.call, gap)
    head = form.call[: len(form.call) - len(key)]
    after = probe.atoms.beginning(gap[: len(gap) - len(key)], tail)
    rest = one.after[len(after) :]
    ways = dict[str, list[str]]()
    spans = dict[str, tuple[str, str]]()
    for kind, value in _TYPES.items():
        text = values(**{_KEYS[0]: value}).partition(_KEYS[0])[2]
        written = text[: len(text) - len(rest)] if text.endswith(rest) else ""
        if span := _span(written, value):
            spans[kind] = written[: span[0]], written[span[1] :]
            form = replace(form, python=form.python or written[slice(*span)] == "True")
    if "string" not in spans or "integer" not in spans:
        raise _Unlearned("the values of a call's parameters cannot be read")
    plain = spans["integer"]
    closed = tail[len(after) :].strip()
    if not plain[1].strip() and head.rstrip().endswith(("(", "{")) and closed.startswith((")", "}")):
        quote = spans["string"][0].removeprefix(plain[0]).strip()
        call = f"{head.rstrip()[:-1]}{ARGUMENTS}{closed[1:]}"
        return replace(form, call=call, style="literals", quote="" if quote in ("'", '"') else quote)
    for kind in _TYPES:
        before, ended = spans.get(kind, plain)
        ways[kind] = [f"{key}{KEY}{before}{VALUE}{ended.replace(_KEYS[0], KEY)}"]
    hard = values(**{_KEYS[0]: _HARD}).partition(_KEYS[0])[2]
    if _HARD not in hard or not hard.endswith(rest):
        raise _Unlearned("the chat template changes the letters of a string between tags")
    before, _, ended = hard[: len(hard) - len(rest)].partition(_HARD)
    way = f"{key}{KEY}{before}{VALUE}{ended.replace(_KEYS[0], KEY)}"
    ways["string"] += [] if way in ways["string"] else [way]
    call = f"{head}{ARGUMENTS}{tail[len(after) :]}"
    return replace(form, call=call, style="tags", parameter=ways)


def _span(written: str, value: Any) -> tuple[int, int] | None:
    """Where a text has a value as JSON or as a literal of Python has it; a string as it is."""
    if isinstance(value, str):
        at = written.find(value)
        return None if at < 0 else (at, at + len(value))
    names = {json.dumps(value), json.dumps(value, separators=(",", ":")), repr(value)}
    found = [(at, at + len(name)) for name in names if (at := written.rfind(name)) >= 0]
    return max(found, key=lambda span: span[1] - span[0], default=None)


def _id_form(probe: _Probe) -> Literal["any", "nine", "functions"]:
    if probe.names:
        return "functions"
    call = probe.calls((_FIRST, _args(0)))
    call["tool_calls"][0]["id"] = "call_0123456789abcdef"
    text = probe.after([call])
    return "any" if text is not None and _FIRST in text else "nine"


_JSON = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
STATED = {
    "<|tool_response_start|>": (  # LFM2
        CallFormat(NAME + ARGUMENTS, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", style="literals")
    ),
    "respond only with <|tool_call|> followed by a JSON list": CallFormat(
        _JSON, "<|tool_call|>[", ", ", "]"
    ),  # Granite 3
    '{"name": <function-name>, "arguments": <args-json-object>}': (  # SmolLM3
        CallFormat(f"<tool_call>\n{_JSON}\n</tool_call>", between="\n")
    ),
}
"""Words of a template that shows no calls → how its model writes them; the first that it has counts."""


# --- ends, and the trial ---


def _turn_end(probe: _Probe, after: str) -> tuple[str, str]:
    """What ends a turn of text, and what more comes where nothing should. after: what follows the text."""
    earlier = probe.text([_asked(), _said(_TEXT), _asked("qzlaterq")]) or ""
    kept = probe.atoms.beginning(after, earlier.partition(_TEXT)[2])
    prompt = probe.prompt() or ""
    if after.strip() and after.strip() == prompt.strip():  # that of the user's turn is the same
        kept = after[: tag.end()] if (tag := probe.atoms.tag.search(after)) else after
    if kept and kept != after and prompt.strip().endswith(after[len(kept) :].strip()):
        return kept, after[len(kept) :]
    return after, ""


def _later_end(probe: _Probe) -> str:
    """What a turn ends with where another follows, of a template that ends the last one with nothing."""
    once, twice = (probe.text([_asked(), *more]) or "" for more in ([], [_said(_TEXT), _asked("qzlaterq")]))
    user = probe.atoms.ending(once.partition(_USER)[0], twice.partition("qzlaterq")[0])
    return twice.partition(_TEXT)[2].partition("qzlaterq")[0].removesuffix(user)


def _with_ends(form: ChatFormat, probe: _Probe, kept: str, after: str) -> ChatFormat:
    """With the tokens that end a turn, which stand nowhere else in it. kept: what every turn ends with. after: what a
    text ends with; they differ where a turn of calls ends with another token."""
    calls, ends = form.calls, list[str]()
    candidates = [kept]
    if not probe.atoms.last_tag(kept):
        candidates = [after, *([calls.end] if calls else [])] if probe.atoms.last_tag(after) else [_later_end(probe)]
    inside = [*(form.thought or ()), *((calls.begin, calls.call, calls.between) if calls else ())]
    for each in candidates:
        tag = probe.atoms.last_tag(each)
        if tag and not any(tag in text for text in inside):
            ends.append(tag)
    text, turn_end = form.text, kept.strip()
    for tag in ends:
        text, turn_end = (text[0], text[1].removesuffix(tag).strip()), turn_end.removesuffix(tag).strip()
        if calls is not None:
            calls = replace(calls, end=calls.end.partition(tag)[0])
    return replace(form, calls=calls, ends=tuple(ends), text=text, turn_end=turn_end)


def _read(form: ChatFormat, text: str, inside: bool = False) -> tuple[str, str, list[ToolCall]]:
    """Thought, text and calls that a text is read as."""
    calls = CallPatterns(form.calls, _KINDS) if form.calls else None
    chunk = AnswerReader(form, calls, inside).add(text, last=True)
    return chunk.thought, chunk.text, [piece.call for piece in chunk.calls if piece.kind == "end"]


def _tried(form: ChatFormat, probe: _Probe, header: str) -> ChatFormat:
    """The format without what is not read of the template's own text."""

    def body(message: Message, **variables: Any) -> str:
        text = probe.body(probe.after([message], **variables), header)
        for end in form.ends:
            text = text.partition(end)[0]
        return text.rstrip().removesuffix(form.turn_end)

    if form.thought is not None:
        on = {form.switch: True} if form.switch else {}
        text = body(_said(_TEXT, **{form.thought_field: _THOUGHT}), **on)
        inside = form.thought[0] not in text
        thought, said, _ = _read(form, text, inside)
        if _THOUGHT in text and (thought, said.strip()) != (_THOUGHT, _TEXT):
            form = replace(form, thought=None)
    if form.calls is None or form.no_calls:
        return form
    hard = _VALUES[0] if form.calls.style == "literals" and not form.calls.quote else _HARD
    several = {f"p{kind}": value for kind, value in _TYPES.items()} | {_KEYS[0]: hard}
    none: dict[str, Any] = {}
    for given in ([(_FIRST, several)], [(_FIRST, none)], [(_SECOND, _args(1)), (_FIRST, several)]):
        if len(given) > 1 and form.calls.single:
            continue
        text = body(probe.calls(*given))
        try:
            thought, said, calls = _read(form, text)
            read = [(call.name, json.loads(call.arguments)) for call in calls]
        except ValueError:
            read, thought, said = [], "", ""
        # some templates leave out null
        kept = [(name, {key: value for key, value in args.items() if key in text}) for name, args in given]
        if read != kept or thought or said.strip():
            return replace(
                form, calls=None, no_calls=f"calls are not read as the chat template writes them: {text!r:.300}"
            )
    return form


# --- the process ---


_LONGEST = 16 << 20  # characters of a rendered conversation of a few words


def main(seconds: int, memory: int) -> None:
    """Prints the format of the template on standard input, as JSON: [template, special tokens by variable, special
    tokens]. seconds, memory: limits of the process (CPU seconds, bytes)."""
    template, variables, special = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    if sys.platform == "linux":
        most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    def rendered(messages: Sequence[Message], **more: Any) -> str:
        text = render(template, messages, variables, **more)
        if len(text) > _LONGEST:
            raise SystemExit(f"a conversation of a few words becomes {len(text):,} characters")
        return text

    try:
        form = learned(rendered, template, special)
    except MemoryError:
        raise SystemExit(f"it needs more than {memory >> 20} MiB") from None
    except Exception as error:  # a template of a kind that nobody has seen
        form = replace(PLAIN, no_calls=f"nothing is learned from the chat template ({first_line(error)})")
    print(json.dumps(form.as_dict()))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
