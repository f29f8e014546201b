"""Chat template of a model: its text, the format that was learned from it, and prompts of conversations."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import xxhash

from tiermoe.formats.outline import Origin, read_kept, write_kept
from tiermoe.model.chat.format import FUNCTIONS, INDEX, NAME, PLAIN, ChatFormat
from tiermoe.model.chat.jinja import render

Message = dict[str, Any]

KEPT = "chat-format.json"
VERSION = 1
"""Of what is learned: another one is learned again."""
MOST_SECONDS = 10
"""Of processor time for learning a format; a usual template takes a tenth of a second."""
MOST_MEMORY = 1 << 30
"""Bytes that learning may take."""
_STARVED_S = 120  # on a machine that gives the process no time
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of a template that no request sets."""


class LeftOutError(ValueError):
    """A template leaves out what an answer is to continue."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The rendered conversation, in pieces that are encoded apart: no special token reaches from one to the next."""

    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class ChatTemplate:
    """text: Jinja; empty if the model has none. with_tools: another one, for conversations with tools; empty: the same.
    special_tokens: template variable → token. added: token beyond the vocabulary's → (its id, whether it is special).
    guards: texts of messages never become special tokens."""

    text: str
    form: ChatFormat = PLAIN
    with_tools: str = ""
    special_tokens: Mapping[str, Any] | None = None
    added: Mapping[str, tuple[int, bool]] | None = None
    guards: bool = True

    @cached_property
    def special(self) -> dict[str, int]:
        """Special token → its id."""
        return {text: token for text, (token, special) in (self.added or {}).items() if special}

    @cached_property
    def shown(self) -> frozenset[int]:
        """Special tokens that are part of an answer's text, since its format is written with them."""
        form, calls = self.form, self.form.calls
        texts = [*(form.thought or ()), *form.text, form.turn_end]
        if calls is not None:
            written = [text for several in calls.parameter.values() for text in several]
            texts += [calls.begin, calls.call, calls.between, calls.end, calls.quote, *written]
        whole = "\0".join(texts)
        return frozenset(token for text, token in self.special.items() if text in whole)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end a turn: the tokenizer's and the template's."""
        if not self.text:
            return frozenset()
        named = {*self.form.ends, (self.special_tokens or {}).get("eos_token")}
        return frozenset(token for text, (token, _) in (self.added or {}).items() if text in named)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        continued: str | None = None,
    ) -> ChatPrompt:
        """The prompt of a conversation.

        messages, tools: as OpenAI has them, with texts as contents, arguments as objects and thoughts as
        `reasoning_content`. variables: of the template; those that it does not know are left out. continued: the field
        of the last message that the answer goes on with; None: the answer is a new turn. LeftOutError if the template
        leaves that out. Raises the template's own errors."""
        text = (self.with_tools if tools else "") or self.text
        nonce = f"qz{secrets.token_hex(8)}"
        given, mark = self._ordered(messages), f"{nonce}end"
        if continued is not None:
            given[-1][continued] = f"{given[-1].get(continued) or ''}{mark}"
        if self.guards and self.special:
            given, tools = (self._guarded(each, nonce) for each in (given, list(tools)))
        given = [self._shaped(each) for each in given]
        switches = dict(variables or {})
        if self.form.switch and "enable_thinking" in switches:
            switches.setdefault(self.form.switch, switches["enable_thinking"])
        known = {name: value for name, value in switches.items() if name in text and name not in _GIVEN}
        said = render(text, given, self.special_tokens or {}, continued is None, tools, **known)
        if continued is not None:
            said, found, _ = said.rpartition(mark)
            if not found:
                raise LeftOutError(continued)
        return ChatPrompt(tuple(said.split(nonce)))

    def _guarded(self, value: Any, nonce: str) -> Any:
        """A value in whose texts a special token is cut in two."""
        if isinstance(value, str):
            return self._special.sub(lambda found: f"{found[0][0]}{nonce}{found[0][1:]}", value)
        if isinstance(value, list):
            return [self._guarded(each, nonce) for each in value]
        if isinstance(value, dict):
            return {self._guarded(key, nonce): self._guarded(each, nonce) for key, each in value.items()}
        return value

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Special tokens but those around thoughts, which some clients send back within a text."""
        tags = self.form.thought or ()
        names = sorted((each for each in self.special if len(each) > 1 and each not in tags), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or r"(?!)")

    # what a template takes

    def given(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Messages as the template takes them."""
        return [self._shaped(each) for each in self._ordered(messages)]

    def _ordered(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Messages in roles and in an order that the template takes."""
        form = self.form
        turns = [dict(each) for each in messages]
        for turn in turns:
            if turn["role"] == "developer" and "developer" not in form.roles:
                turn["role"] = "system"
        turns = system_first(turns) if form.first_system else turns
        if "system" not in form.roles:
            turns = [{**each, "role": "user"} if each["role"] == "system" else each for each in turns]
        if "tool" not in form.roles:
            turns = [{"role": "user", "content": each["content"]} if each["role"] == "tool" else each for each in turns]
        if form.alternates:
            turns = list(_alternating(turns))
        return _with_ids(turns, form.id_form)

    def _shaped(self, turn: Message) -> Message:
        """A message with its parts in the form that the template takes."""
        form, turn = self.form, dict(turn)
        thought = turn.get("reasoning_content")
        if calls := turn.get("tool_calls"):
            if form.arguments == "text":
                turn["tool_calls"] = [_as_text(call) for call in calls]
            if not form.blank and not turn.get("content"):
                turn["content"] = None
        if thought and form.thought_field == "parts":
            del turn["reasoning_content"]
            parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": turn["content"]}]
            turn["content"] = parts if turn["content"] else parts[:1]
        elif thought:
            turn[form.thought_field] = thought
        if form.parts and isinstance(turn.get("content"), str):
            turn["content"] = [{"type": "text", "text": turn["content"]}]
        return turn


def _as_text(call: Mapping[str, Any]) -> Message:
    function = call["function"]
    said = function["arguments"]
    return {
        **call,
        "function": {**function, "arguments": said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)},
    }


def _alternating(turns: Sequence[Message]) -> Iterator[Message]:
    """Turns of which no two of the user, and no two texts of the assistant, follow each other."""
    last: Message | None = None
    for turn in turns:
        plain = turn["role"] in ("user", "assistant") and not turn.get("tool_calls")
        if last is not None and plain and last["role"] == turn["role"] and not last.get("tool_calls"):
            last["content"] = "\n\n".join(filter(None, (last["content"], turn["content"])))
            continue
        if last is not None:
            yield last
        last = turn
    if last is not None:
        yield last


def _with_ids(turns: list[Message], form: str) -> list[Message]:
    """Calls with ids as a template asks for, the same in every turn; results with theirs."""
    ids = dict[str, str]()
    for turn in turns:
        if calls := turn.get("tool_calls"):
            turn["tool_calls"] = [{**call} for call in calls]
            for call in turn["tool_calls"]:
                said, name = str(call.get("id") or ""), call["function"]["name"]
                ids[said] = call["id"] = _id_in(form, said, name, len(ids))
        elif turn["role"] == "tool":
            said = str(turn.get("tool_call_id") or "")
            turn |= {"tool_call_id": ids.get(said, said)} if said else {}
    return turns


def _id_in(form: str, said: str, name: str, number: int) -> str:
    if form == "functions":
        return FUNCTIONS.replace(NAME, name).replace(INDEX, str(number))
    if form == "nine" and not re.fullmatch(r"[a-zA-Z0-9]{9}", said):
        return hashlib.sha256(said.encode()).hexdigest()[:9]
    return said


def system_first(messages: Sequence[Message]) -> list[Message]:
    """A conversation with at most one system message, at its beginning: the first ones become one, later ones the
    user's. Agents send several, and some in the middle."""
    first = list(takewhile(_is_system, messages))
    later = [{**each, "role": "user"} if _is_system(each) else each for each in messages[len(first) :]]
    text = "\n\n".join(each["content"] for each in first)
    return [{"role": "system", "content": text}, *later] if first else later


def _is_system(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "system")


# --- learning ---


def chat_template(tokenizer: Any, root: Path | None = None) -> ChatTemplate:
    """The chat template of a tokenizer, with its format: as the store at `root` keeps it, or learned now and kept
    there."""
    text, with_tools = _texts(getattr(tokenizer, "chat_template", None))
    added = {each.content: (token, bool(each.special)) for token, each in tokenizer.added_tokens_decoder.items()}
    found = ChatTemplate(text, PLAIN, with_tools, tokenizer.special_tokens_map, added)
    if not text:
        return replace(found, form=replace(PLAIN, no_calls="the model has no chat template"))
    asked = json.dumps([with_tools or text, found.special_tokens, sorted(found.special)], default=str)
    origin = Origin(xxhash.xxh3_64(asked.encode()).hexdigest(), f"learned {VERSION}")
    kept = None if root is None else read_kept(root / KEPT, origin)
    try:
        return replace(found, form=ChatFormat.of(kept or {}))
    except (KeyError, TypeError, ValueError):
        form = _learned(asked)
    if root is not None and root.is_dir():
        write_kept(root / KEPT, origin, form.as_dict())
    return replace(found, form=form)


def _texts(template: Any) -> tuple[str, str]:
    """The template, and the one for tools if that is another."""
    if not isinstance(template, dict):
        return template or "", ""
    return template.get("default") or next(iter(template.values()), ""), template.get("tool_use") or ""


@lru_cache(maxsize=16)
def _learned(asked: str) -> ChatFormat:
    """The format of a template, learned in a process of its own: a template may loop, or grow without end."""
    command = [sys.executable, "-P", "-m", "tiermoe.model.chat.learn", str(MOST_SECONDS), str(MOST_MEMORY)]
    try:
        ended = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=_STARVED_S)
    except subprocess.TimeoutExpired:
        return replace(PLAIN, refused=f"rendering it takes more than {_STARVED_S} s")
    if ended.returncode == 0:
        return ChatFormat.of(json.loads(ended.stdout))
    if ended.returncode == -signal.SIGXCPU:
        return replace(PLAIN, refused=f"rendering it takes more than {MOST_SECONDS} s of processor time")
    why = ended.stderr.strip().rpartition("\n")[2] or f"its process ended with {ended.returncode}"
    return replace(PLAIN, refused=f"rendering it fails: {why}")
