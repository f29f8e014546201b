"""Chats of all dialects: a conversation that wants an answer; the prompt, grammar and stop strings that follow from it,
by the model's chat format; and the reader of its answer. gpt-oss answers in channels (`harmony`)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tiermoe.engine.request import Piece, Request, Thinking, ThoughtBudget
from tiermoe.engine.sampling import Grammar, Sampling
from tiermoe.errors import ConfigError
from tiermoe.model.chat.parameters import parameters_of, properties
from tiermoe.model.chat.reader import AnswerReader, CallPatterns, Chunk
from tiermoe.serve import harmony
from tiermoe.serve.call_rules import Terms, call_rule, expressible, free_text, terms_with
from tiermoe.serve.dialects import Json, Refused
from tiermoe.serve.grammar import Compiling, Constraint
from tiermoe.serve.served import Served, continued

_log = logging.getLogger("tiermoe.serve")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that wants an answer."""

    messages: Sequence[Json]  # as chat templates take them
    tools: Sequence[Json] = ()  # as OpenAI has them
    choice: str = "auto"  # 'none', 'auto', 'required' or the name of the function that must be called
    constraint: Constraint | None = None  # what the answer must be; None: any text
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template, like `enable_thinking`
    parallel: bool = True  # whether an answer may have several calls
    new_turn: bool = False  # an assistant's message at the end is not continued
    thought_tokens: int | None = None  # most tokens of thought; None: any number

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice not in ("none", "auto")

    @property
    def continued(self) -> str | None:
        """Field of the last message that the answer continues, or None. Refused if it cannot be continued."""
        if self.new_turn or not self.messages:
            return None
        if self.messages[-1].get("tool_calls"):
            raise Refused(400, "the conversation ends with calls of tools; send their results", "messages")
        begun = continued(self.messages)
        if begun is None:
            return None
        if self.forced or self.constraint is not None:
            wanted = "tool_choice" if self.forced or self.constraint is None else self.constraint.field
            raise Refused(
                400,
                f"an answer that continues the assistant's message cannot follow {wanted}; leave out one",
                "messages",
            )
        return begun


# --- answers ---


class PieceReader:
    """Reads the pieces of one answer: thought, text and tool calls. reader: None where all is text."""

    def __init__(self, reader: AnswerReader | harmony.ChannelReader | None = None) -> None:
        self.thought_tokens = 0  # so far
        self._reader = reader

    def add(self, piece: Piece) -> Chunk:
        reader = self._reader
        if reader is None:
            return Chunk(text=piece.text, finish=piece.finish)
        chunk = reader.add(piece.text, piece.finish is not None, piece.finish == "length")
        if chunk.thought or reader.inside:
            self.thought_tokens += len(piece.tokens)
        chunk.finish = "tool_calls" if piece.finish == "stop" and reader.called else piece.finish
        return chunk


# --- preparing ---


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt, and how its answers are made and read."""

    ids: list[int]  # of the prompt
    reader: Callable[[], PieceReader] = PieceReader  # makes the reader of an answer
    grammar: Compiling | None = None  # compiles what answers must follow
    budget: Callable[[], ThoughtBudget] | None = None  # makes that of an answer
    special: frozenset[int] = frozenset()  # special tokens that answers are read with
    stops: tuple[str, ...] = ()  # stop strings in addition to the request's

    def request(self, sampling: Sampling, stops: Sequence[str], **more: Any) -> Request:
        """The request of one answer. stops: its own stop strings. more: further fields of `Request`."""
        budget = None if self.budget is None else self.budget()
        return Request(self.ids, sampling, (*stops, *self.stops), budget=budget, special=self.special, **more)


def prepare(served: Served, chat: Chat) -> Prepared:
    """The prompt of a chat. Refused if the model's template does not take it, or the answer cannot be made so."""
    tools = [] if chat.choice == "none" else list(chat.tools)
    if chat.thought_tokens == 0:
        chat = replace(chat, variables={"enable_thinking": False, **chat.variables})
    if harmony.speaks(served.chat.text):
        return _in_channels(served, chat, tools)
    form = served.chat.form
    if tools and form.calls is None:
        raise Refused(400, f"{served.name} has no format of tool calls that is known: {form.no_calls}", "tools")
    begun = chat.continued
    ids, prompt = served.chat_ids(chat.messages, tools, chat.variables, chat.new_turn)
    inside = form.opened(prompt) if begun is None else begun == "reasoning_content" or form.unfinished(prompt)
    calls = CallPatterns(form.calls, parameters_of(tools)) if form.calls is not None and tools else None
    one, goes_on = not chat.parallel, begun is not None and bool(chat.messages[-1][begun].strip())

    def reader() -> AnswerReader:
        return AnswerReader(form, calls, inside, goes_on, one, chat.forced)

    budget = None
    if form.thought is not None:
        budget = _budget(served, chat, form.thought[1], lambda: AnswerReader(form, None, inside, goes_on))
    stops = (calls.last,) if calls is not None and one and calls.last else ()
    grammar = _grammar(served, chat, tools, inside)
    return Prepared(ids, lambda: PieceReader(reader()), grammar, budget, served.chat.shown, stops)


def _budget(
    served: Served, chat: Chat, end: str, thinking: Callable[[], Thinking]
) -> Callable[[], ThoughtBudget] | None:
    """Makes budgets of thoughts. end: the text that ends a thought. thinking: makes readers of answers."""
    most = chat.thought_tokens
    if most is None:
        return None
    ids = served.text_ids(end, special=False)
    return lambda: ThoughtBudget(most, ids, thinking())


def _in_channels(served: Served, chat: Chat, tools: Sequence[Json]) -> Prepared:
    messages = [harmony.message_of(message) for message in chat.messages]
    begun = chat.continued
    ids, _ = served.chat_ids(messages, [harmony.tool_of(tool) for tool in tools], chat.variables, chat.new_turn)
    functions, grammar = _named(chat, tools), None
    said = None if chat.forced else chat.constraint
    if chat.forced or said is not None:
        grammar = _followed(served, harmony.rules_of(functions, said.term if said else None), said)
    after = harmony.thought_end(calls=bool(tools) and chat.constraint is None)

    def channels() -> harmony.ChannelReader:
        return harmony.ChannelReader(goes_on=begun is not None, thinks=begun == "reasoning_content")

    budget = _budget(served, chat, after, channels)
    special = frozenset(served.chat.special.values())
    return Prepared(ids, lambda: PieceReader(channels()), grammar, budget, special)


def _named(chat: Chat, tools: Sequence[Json]) -> list[Json]:
    """The functions that may be called. Refused if the one that must be called is none of the tools."""
    named = [tool["function"] for tool in tools if chat.choice in ("auto", "required", tool["function"]["name"])]
    if chat.forced and not tools:
        raise Refused(400, "tool_choice asks for a call, and there are no tools", "tool_choice")
    if chat.forced and not named:
        raise Refused(400, f"tool_choice asks for '{chat.choice}', which is not among the tools", "tool_choice")
    return named


def _grammar(served: Served, chat: Chat, tools: Sequence[Json], inside: bool) -> Compiling | None:
    """Grammar of the answer: one call, what the constraint says, or either if tools may be called as well; after a
    thought if the prompt has opened one. None: the answer is free."""
    named, form = _named(chat, tools), served.chat.form
    constraint = None if chat.forced else chat.constraint
    if not chat.forced and constraint is None:
        return None
    rules, said, terms = list[str](), list[str](), terms_with(served.chat.special)
    if form.calls is not None and named:
        for function in named:
            _, left_out = expressible(function.get("parameters") or {})
            if left_out:  # it stays free
                _log.warning(
                    "tool %s: the grammar of its calls leaves out %s", function["name"], ", ".join(left_out[:8])
                )
        rules.append(call_rule(form.calls, named, terms))
        said.append("call")
    if constraint is not None:
        rules.append(f"content: {constraint.term}")
        said.append("content")
    start = f"start: {' | '.join(said)}"
    if inside and form.thought is not None:
        free, after = free_text("thought", terms(form.thought[1]))
        start = f"start: thought {after} /\\n{{0,2}}/ ({' | '.join(said)})"
        rules.append(free)
    culprit = partial(_culprit, served, named, terms) if form.calls is not None and named else None
    return _followed(served, "\n".join([start, *rules]), constraint, culprit)


def grammar_of(served: Served, constraint: Constraint | None) -> Compiling | None:
    """Grammar of a completion."""
    return None if constraint is None else _followed(served, f"start: {constraint.term}", constraint)


async def _culprit(served: Served, functions: Sequence[Json], terms: Terms) -> str:
    """The tool, and its parameter, whose schema no grammar can follow; empty if each can be by itself."""
    form = served.chat.form.calls
    assert form is not None

    async def fails(function: Json) -> bool:
        try:
            await served.grammars.compiled(f"start: call\n{call_rule(form, [function], terms)}", 1)
        except ConfigError:
            return True
        return False

    for function in functions:
        if not await fails(function):
            continue
        schema = function.get("parameters") or {}
        for name, each in properties(schema).items():
            alone = {**schema, "properties": {name: each}, "required": [name]}
            if await fails({**function, "parameters": alone}):
                return f"parameter '{name}' of the tool '{function['name']}': "
        return f"the parameters of the tool '{function['name']}': "
    return ""


def _followed(
    served: Served, rules: str, constraint: Constraint | None, culprit: Callable[[], Awaitable[str]] | None = None
) -> Compiling:
    """Compiler of these rules, which raises Refused if they cannot be followed. constraint: what they say of the
    answer; None: a call of a tool. culprit: finds which tool is the cause, in words."""
    param, grammar = ("tools", "") if constraint is None else (constraint.field, constraint.grammar)

    async def compiled(count: int) -> list[Grammar]:
        try:
            return await served.grammars.compiled(rules, count, grammar)
        except ConfigError as error:
            where = await culprit() if culprit is not None else ""
            raise Refused(400, f"{where}{error}", "tools" if where else param) from error

    return compiled
