"""Reader of an answer's text as it comes: thought, text and calls of tools, as a chat format has them.

The reading is one generator that goes on where the text goes on. Blanks between the texts of a format may be others
than the template's. The sampled text stays as it is: a client sends calls back, and the template writes them again.
"""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import regex

from tiermoe.model.chat.format import FUNCTIONS, ID, INDEX, KEY, NAME, SLOTS, VALUE, CallFormat, ChatFormat
from tiermoe.model.chat.literals import ObjectReader, from_json, json_text
from tiermoe.model.chat.parameters import TEXT, Kinds, Parameters, nested, value_of

# --- what is read ---


@dataclass(slots=True)
class ToolCall:
    """A call of a tool, as far as it has come."""

    name: str
    arguments: str = ""  # JSON, as OpenAI has it; the beginning of it where the call is not whole
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")
    whole: bool = False  # True once it has ended, unless its arguments were not complete

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


@dataclass(slots=True)
class Chunk:
    """What more text brings."""

    thought: str = ""
    text: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    finish: str | None = None  # the answer's end, for a server: 'stop', 'length', 'tool_calls'; None while more comes


def nine_letters() -> str:
    """An id of a call as Mistral's templates ask for: nine letters and digits."""
    return "".join(random.choices(string.ascii_letters + string.digits, k=9))


# --- patterns ---


Pattern: TypeAlias = "regex.Pattern[str]"
Match: TypeAlias = "regex.Match[str]"
_CERTAIN = regex.compile(r"<[|｜]|[|｜]>|\[/?[A-Z_]+\]")  # marks that are in no text
_JSON_BEGINS = regex.compile(r'[-\d"tfn{\[]')
_LINE = regex.compile(r"\n|(?=[^\n])")
_BLANK = r"\s*+"
_TOKENS = regex.compile(rf"\s+|[{{}}\[\]:,]|[{SLOTS}]|[^\s{{}}\[\]:,{SLOTS}]+")
_TAG = regex.compile(r"<[^<>]+>|\[/?[A-Z_]+\]")
_TAGGED = regex.compile(rf"(?:{_TAG.pattern})(?:(?!{_TAG.pattern}).)*", regex.DOTALL)
_PLAIN_NAME = r"""[^\s<>"'()\[\]{}=,|]{1,256}"""
_QUOTED_NAME = r'(?:[^"\\\x00-\x1f]|\\.){1,256}'


def _written(text: str, names: Sequence[str] = (), known: bool = False) -> str:
    """Regular expression of a format's text, with groups for its slots, where blanks may be others.

    names: of tools. known: the function must be one of them."""
    quoted = f'"{NAME}"' in text
    either = [json_text(name)[1:-1] if quoted else name for name in sorted(names, key=len, reverse=True)]
    any_name = [] if known else [_QUOTED_NAME if quoted else _PLAIN_NAME]
    slots = {
        NAME: f"(?P<name>{'|'.join([*map(regex.escape, either), *any_name])})",
        ID: r"(?P<id>[\w.:-]{1,128})", INDEX: r"(?P<index>\d{1,6})", KEY: r'(?P<key>[^<>"=\n/][^<>"=\n]{0,255})',
    }  # fmt: skip
    parts = list[str]()
    for token in _TOKENS.findall(text.strip()):
        if token.isspace():
            parts.append(_BLANK)
        elif token in slots:
            parts.append(slots[token])
            slots[token] = regex.sub(r"\(\?P<(\w+)>.*", r"(?P=\1)", slots[token])  # the same again
        else:
            parts.append(f"{_BLANK}{regex.escape(token)}{_BLANK}" if token in "{}[]:," else regex.escape(token))
    return regex.sub(r"(\\s\*\+)+", lambda _: _BLANK, "".join(parts))


def _pattern(*texts: str) -> Pattern:
    """Of texts with blanks around them, or nothing at all where one is empty."""
    return regex.compile(_BLANK + _BLANK.join(filter(None, texts)), regex.DOTALL)


def _either_word(pattern: str) -> str:
    """A pattern of a call as JSON in which arguments may be called parameters, too, as some models do."""
    return regex.sub('"(arguments|parameters)"', '"(?:arguments|parameters)"', pattern)


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to write a parameter between texts."""

    before: Pattern
    after: str  # what ends the value, with a slot for the parameter
    kinds: Kinds | None  # of values that are written so; None: the schema says
    breaks: tuple[bool, bool]  # whether a line break before the value is of the format, and one after it
    around: tuple[str, str] | None  # what is around values within each other; None: they are JSON


class CallPatterns:
    """What calls of a format look like. parameters: of the tools that may be called."""

    def __init__(self, form: CallFormat, parameters: Parameters) -> None:
        self.form, self.parameters = form, parameters
        names, head = list(parameters), form.head
        first = min(at for slot in (NAME, ID, INDEX) if (at := head.find(slot)) >= 0)
        cut = max((found.end() for found in _TAG.finditer(head, 0, first)), default=0)
        prefix, core = head[:cut].strip(), head[cut:].strip()
        mark = head[cut:first].strip()  # of the call itself: `<function=`, `{"name": "`
        begin, between, tags = form.begin.strip(), form.between.strip(), _TAGGED.findall(form.tail)
        call, known = (_either_word(_written(core, names, each)) + self._follows(tags) for each in (False, True))
        tag = f"(?:{_written(prefix)})" if prefix else ""
        self.alone = list[Pattern]()  # without a mark of its own a call is all of an answer
        bare = _pattern(f"(?P<bare>{known})")
        starts = [_pattern(f"(?P<opens>{_written(each)})") for each in (begin, prefix) if _TAG.search(each)]
        if names and mark.startswith("<"):  # Qwen3-Coder leaves out the tags around it now and then
            starts.append(bare)
        if names and not starts:
            self.alone = [_pattern(_written(begin), f"(?P<bare>{known})") if begin else bare]
        if names and not starts and _CERTAIN.search(between):  # what is between calls is between a text and a call, too
            starts.append(_pattern(_written(between), f"(?P<bare>{known})"))
        self.anywhere = starts
        self.first = _pattern(f"{tag}?" if tag and (mark or begin) else "", call)
        self.later = _pattern(_written(between), tag, call) if between or tag or begin or starts else None
        self.whole = _pattern(f"{tag}?" if tag else "", r"(?=[{\[])") if mark.startswith(("{", "[")) else None
        self.tail = _pattern(_written(form.tail.partition(tags[0])[0] if tags else form.tail))
        depth = sum(map(core.count, "{[")) - sum(map(core.count, "}]"))
        self.rest = regex.compile(rf"[^{{}}\[\]<>]{{0,256}}+(?:[}}\]]\s*+){{{depth}}}") if depth > 0 else None
        self.tags = [_pattern(_written(each)) for each in tags]
        self.last = next((each.strip() for each in reversed((*tags, form.end)) if each.strip()), "")
        """The text that a call ends with, or a block of calls."""
        self.end = _pattern(_written(form.end)) if form.end.strip() else None
        self.ways = self._ways() if form.style == "tags" else []
        around = [_written(each) for each in (*tags, form.end, begin, prefix) if each.strip()]
        self.follows = [*(way.before for way in self.ways), *map(_pattern, around)]
        """What may follow a parameter."""
        self.next = regex.compile(f"(?={'|'.join(each.pattern for each in self.follows) or '$'})", regex.DOTALL)
        self.closed = _pattern(*map(_written, tags)) if tags else None
        """The end of a call as a whole, where a parameter lacks its own."""
        self.beyond = [*self.anywhere, *filter(None, (self.later, self.end))]
        """What may follow a call within an answer, beside text."""

    def _follows(self, tags: Sequence[str]) -> str:
        """What must follow the function."""
        form = self.form
        if form.style != "tags":
            return rf"{_BLANK}(?=[{{{'(' if form.style == 'literals' else ''}])"
        if not form.head.rstrip().endswith(NAME):
            return ""
        keys = [text.partition(KEY)[0] for several in form.parameter.values() for text in several]
        return f"{_BLANK}(?={'|'.join(_written(each) for each in dict.fromkeys((*keys, *tags[:1])))})"

    def _ways(self) -> list[_Way]:
        """Longer ones first, of which others may be the beginning."""
        kinds = dict[str, set[str]]()
        for kind, several in self.form.parameter.items():
            for text in several:
                kinds.setdefault(text, set()).add(kind)
        usual = {several[0] for several in self.form.parameter.values()}
        ways = []
        for text in sorted(kinds, key=len, reverse=True):
            before, _, after = text.partition(VALUE)
            certain = Kinds(kinds[text]) if len(usual) > 1 or text not in usual else None
            opener = _pattern(_written(before))
            breaks = before.endswith("\n"), after.startswith("\n")
            around = (before.strip(), after.strip()) if KEY in after else None
            ways.append(_Way(opener, after.strip(), certain, breaks, around))
        return ways


_NAMED = regex.compile(rf'\s*\{{\s*"(?:tool_)?name"\s*:\s*"({_QUOTED_NAME})"\s*,')


def _calls_in(text: str) -> Iterator[tuple[str, str]]:
    """Function and arguments of calls as JSON, one or a list; none if one of them is no call."""
    try:
        said = from_json(text)
        found = [_call_in(each) for each in (said if isinstance(said, list) else [said])]
    except ValueError:
        return
    yield from found


def _call_in(said: Any) -> tuple[str, str]:
    """ValueError if it is none."""
    said = said.get("function", said) if isinstance(said, dict) else {}
    if not isinstance(said, dict):
        raise ValueError("no object")
    name = said.get("name", said.get("tool_name"))
    if not isinstance(name, str) or not name:
        raise ValueError("no name")
    arguments = next((said[each] for each in ("arguments", "parameters") if each in said), None)
    if isinstance(arguments, str):
        arguments = from_json(arguments)  # a client sends them back, and templates take no others
    return name, json_text({} if arguments is None else arguments)


# --- reading ---


Steps = Generator[None, None, Any]


class AnswerReader:
    """Reads one answer as it comes: text in, thought, text and calls out.

    Text that may begin something else is withheld. A call begins once its function and its arguments are certain to;
    what turns out to be no call is text. Line breaks around a thought belong to neither side, and blanks before a call
    are no text. Tags of a thought that are written once more are left out.

    calls: None where there can be none. inside: the answer begins within a thought. begun: it continues that thought's
    text, or the text of an answer. one: nothing comes after the first call. forced: the answer must be a call, so that
    its beginning is never text."""

    def __init__(
        self,
        form: ChatFormat,
        calls: CallPatterns | None = None,
        inside: bool = False,
        begun: bool = False,
        one: bool = False,
        forced: bool = False,
    ) -> None:
        self.called = False  # whether a whole call has come
        self.inside = inside  # whether a thought is under way
        self._calls, self._one, self._forced = calls, one, forced
        self._buffer = ""
        self._last = self._cut = False
        self._chunk = Chunk()
        self._trim = inside and not begun  # whether line breaks that come next are dropped
        self._dropped = forced  # whether blanks are that nothing else follows
        self._thinks = form.thought is not None
        begin, end = map(_written, form.thought or ("", ""))
        self._begin, self._end = _pattern(begin), regex.compile(rf"\n*+{end}")
        marks = [
            _pattern(f"(?P<mark>{_written(each)})") for each in (*form.text, form.turn_end) if _CERTAIN.search(each)
        ]
        opener = _pattern(f"(?P<thought>{begin})") if self._thinks else None
        again = _pattern(f"(?P<again>{end})") if self._thinks else None
        certain = opener if opener and _CERTAIN.search((form.thought or ("", ""))[0]) else None
        anywhere = calls.anywhere if calls else []
        self._amid, self._amid_again = (
            tuple(filter(None, (*anywhere, *marks, certain, each))) for each in (None, again)
        )
        self._first = tuple(filter(None, (*anywhere, *marks, opener, again, *(calls.alone if calls else ()))))
        self._steps: Steps | None = self._read(begun)

    def add(self, text: str, last: bool = False, cut: bool = False) -> Chunk:
        """What is certain with more text. last: no more text comes. cut: because the answer was cut off; then a call
        that has begun ends without being whole."""
        self._buffer, self._last, self._cut, self._chunk = self._buffer + text, last, cut, Chunk()
        if self._steps is not None and next(self._steps, self) is self:
            self._steps = None
        self.called = self.called or any(piece.call.whole for piece in self._chunk.calls)
        return self._chunk

    def _read(self, begun: bool) -> Steps:
        amid = self._amid
        if self.inside:
            yield from self._thought(not begun)
            amid, begun = self._amid_again, False
        while True:
            found = None if begun else (yield from self._match(*self._first))
            if found is None:
                found = yield from self._search(self._add_text, *amid)
            if found is None:
                return
            groups, begun = found.groupdict(), False
            if groups.get("thought") is not None:
                self.inside = True
                yield from self._thought(True)
                amid = self._amid_again
            elif groups.get("again") is not None:
                self._trim, amid = True, self._amid
            elif groups.get("mark") is None and self._calls is not None:
                read = yield from self._block(self._calls, found)
                if read and self._one:
                    return
                self._dropped, begun = self._dropped or read, not read

    def _thought(self, fresh: bool) -> Steps:
        """fresh: nothing of it has come."""
        self._trim = fresh
        if fresh:
            yield from self._match(self._begin)
        if (yield from self._search(self._add_thought, self._end, closes=True)) is not None:
            self.inside, self._trim = False, True

    # calls

    def _block(self, calls: CallPatterns, opened: Match) -> Generator[None, None, bool]:
        """Reads calls up to where no other follows; whether there was one. What is none goes on as text."""
        head = opened if opened.groupdict().get("bare") is not None else (yield from self._match(calls.first))
        read = False
        while head is not None:
            yield from self._call(calls, head)
            read = True
            if self._one:
                return True
            ended = yield from self._match(calls.end, closes=True)
            head = None if ended else (yield from self._match(calls.later))
        if not read:
            whole = yield from self._match(calls.whole)
            taken = opened[0] + (whole[0] if whole else "")
            read, text = (yield from self._whole(calls)) if whole else (False, "")
            if not read and self._forced and self._last and self._cut:
                self._buffer = ""
            elif not read:
                self._add_text(taken + text)
        if read:
            for tag in (*calls.tags, calls.end):
                yield from self._match(tag, closes=True)
        return read

    def _call(self, calls: CallPatterns, head: Match) -> Steps:
        """Reads a call whose head has come."""
        groups = head.groupdict()
        name = from_json(f'"{groups["name"]}"') if f'"{NAME}"' in calls.form.head else groups["name"]
        call = ToolCall(name)
        if FUNCTIONS in calls.form.head:
            call.id = FUNCTIONS.replace(NAME, name).replace(INDEX, groups["index"])
        elif groups.get("id"):
            call.id = groups["id"]
        elif ID in calls.form.call:
            call.id = nine_letters()
        self._chunk.calls += call.begin()
        whole = yield from self._parameters(calls, call) if calls.form.style == "tags" else self._object(calls, call)
        closed = yield from self._match(calls.tail, calls.rest, closes=True)
        ended = closed is not None and bool(closed[0].strip())
        for tag in calls.tags:
            ended = (yield from self._match(tag, closes=True)) is not None or ended
        if calls.form.style == "tags":
            whole = whole and (ended or not self._cut)
            self._chunk.calls += call.add("}" if call.arguments else "{}") if whole else []
        self._chunk.calls += call.end(whole)

    def _object(self, calls: CallPatterns, call: ToolCall) -> Generator[None, None, bool]:
        """Reads arguments that end by themselves; whether they have."""
        made = ObjectReader(calls.form.quote)
        while True:
            more, self._buffer = made.take(self._buffer)
            self._chunk.calls += call.add(more)
            if made.ended or self._last:
                return made.ended
            yield

    def _parameters(self, calls: CallPatterns, call: ToolCall) -> Generator[None, None, bool]:
        """Reads parameters between tags; whether the last one is whole. A string passes as it is written, another value
        once it is whole."""
        kinds = calls.parameters.get(call.name, {})
        while True:
            found = yield from self._match(*(way.before for way in calls.ways), closes=True)
            if found is None:
                if (yield from self._followed(calls)):
                    return True
                if (yield from self._search(lambda _: None, calls.next, take=False)) is None:
                    return False
                continue
            way = next(way for way in calls.ways if way.before is found.re)
            key = found["key"].strip()
            kind = kinds.get(key, Kinds()) if way.kinds is None else way.kinds
            begin, quote = ", " if call.arguments else "{", '"' * (kind == TEXT)
            self._chunk.calls += call.add(f"{begin}{json_text(key)}: {quote}")
            if not (yield from self._value(calls, call, way, key, kind)):
                return False

    def _value(
        self, calls: CallPatterns, call: ToolCall, way: _Way, key: str, kinds: Kinds
    ) -> Generator[None, None, bool]:
        """Reads a value; whether it is whole. It ends where its tag is followed by what may follow it."""
        text, string = list[str](), kinds == TEXT
        after = _written(way.after.replace(KEY, key))
        closed = [] if calls.closed is None else [f"(?={calls.closed.pattern.removeprefix(_BLANK)})"]
        ends = regex.compile("|".join("\n?" * way.breaks[1] + each for each in (after, *closed)), regex.DOTALL)
        if way.breaks[0]:
            yield from self._match(_LINE)

        def more(part: str) -> None:
            if string:
                self._chunk.calls += call.add(json_text(part)[1:-1])
            text.append(part)

        while True:
            found = yield from self._search(more, ends, take=False, closes=True)
            if found is None:
                cut = "".join(text).strip()
                self._chunk.calls += call.add(cut) if not string and _JSON_BEGINS.match(cut) else []
                return False
            self._buffer = self._buffer[found.end() :]
            if found[0].strip() and (yield from self._followed(calls)) is False:
                more(found[0])
                continue
            if not found[0].strip() and (yield from self._closes(calls)) is False:
                more(found[0] + self._buffer[:1])
                self._buffer = self._buffer[1:]
                continue
            if string:
                self._chunk.calls += call.add('"')
            else:
                written = "".join(text)
                value = nested(written, *way.around) if way.around else None
                self._chunk.calls += call.add(json_text(value_of(written, kinds) if value is None else value))
            return True

    def _followed(self, calls: CallPatterns) -> Generator[None, None, bool]:
        """Whether something comes next that may follow a parameter, or nothing does."""
        while self._buffer.strip() or not self._last:
            found = [each.match(self._buffer, partial=True) for each in calls.follows]
            if not any(found):
                return False
            if self._last or any(each is not None and not each.partial for each in found):
                return True
            yield
        return True

    def _closes(self, calls: CallPatterns) -> Generator[None, None, bool]:
        """Whether the end of a call comes next, with nothing after it or another call."""
        while calls.closed is not None and (found := calls.closed.match(self._buffer, partial=True)):
            rest = "" if found.partial else self._buffer[found.end() :]
            beyond = [each.match(rest, partial=True) for each in calls.beyond]
            if rest.strip() and not any(beyond):
                return False
            if self._last or any(each is not None and not each.partial for each in beyond):
                return True
            yield
        return False

    def _whole(self, calls: CallPatterns) -> Generator[None, None, tuple[bool, str]]:
        """Reads calls as JSON that is written otherwise than in the template; whether it was some, and the text."""
        made, begun = ObjectReader(), self._buffer
        parts = list[str]()
        while True:
            more, rest = made.take(self._buffer)
            parts.append(more)
            if made.ended or self._last:
                break
            self._buffer = ""
            yield
            begun += self._buffer
        self._buffer = rest
        text = "".join(parts)
        told = list(_calls_in(text)) if made.ended else []
        if not told and self._cut and (named := _NAMED.match(text)):
            told = [(named[1], "")]
        for name, arguments in told[: 1 if self._one else None]:
            call = ToolCall(name)
            if ID in calls.form.call:
                call.id = nine_letters()
            self._chunk.calls += [*call.begin(), *call.add(arguments), *call.end(made.ended)]
        return bool(told), begun[: len(begun) - len(rest)]

    # what the steps are made of

    def _match(self, *patterns: Pattern | None, closes: bool = False) -> Generator[None, None, Match | None]:
        """The first pattern that matches what comes next, once no earlier one can any more; the match is taken. closes:
        it ends something, or goes on with it, so that a part of it where the answer is cut off is no text."""
        while True:
            for pattern in filter(None, patterns):
                found = pattern.match(self._buffer, partial=not self._last or (closes and self._cut))
                if found is None:
                    continue
                if found.partial:
                    break
                self._buffer = self._buffer[found.end() :]
                return found
            else:
                return None
            if self._last:
                self._buffer = ""
                return None
            yield

    def _search(
        self, add: Callable[[str], None], *patterns: Pattern, take: bool = True, closes: bool = False
    ) -> Generator[None, None, Match | None]:
        """Adds what comes before the next match, the first pattern's where several begin there, and takes it; None
        where none comes. closes: as in `_match`."""
        while True:
            found = self._next(patterns, not self._last)
            if found is None and self._cut and (closes or self._forced) and (part := self._next(patterns, True)):
                self._buffer = self._buffer[: part.start()]
            at = len(self._buffer) if found is None else found.start()
            add(self._buffer[:at])
            self._buffer = self._buffer[at:]
            if found is not None and not found.partial:
                found = found.re.match(self._buffer)
                self._buffer = self._buffer[found.end() if take and found else 0 :]
                return found
            if self._last:
                return None
            yield

    def _next(self, patterns: Sequence[Pattern], partial: bool) -> Match | None:
        found = [each for pattern in patterns if (each := pattern.search(self._buffer, partial=partial))]
        return min(found, key=lambda each: each.start(), default=None)

    def _add_thought(self, text: str) -> None:
        self._chunk.thought += self._trimmed(text)

    def _add_text(self, text: str) -> None:
        text = "" if self._dropped and not text.strip() else self._trimmed(text)
        self._dropped = self._dropped and not text
        self._chunk.text += text

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        return text
