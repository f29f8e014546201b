"""A conversation that wants an answer, as every dialect asks for one, and what the batch needs to know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiermoe.errors import ConfigError
from tiermoe.serve import harmony
from tiermoe.serve.call_reader import CallReader
from tiermoe.serve.errors import Refused
from tiermoe.serve.grammar import Compiling, Grammar, json_rule
from tiermoe.serve.reading import Reader
from tiermoe.serve.served import Served, continued
from tiermoe.serve.thoughts import END, ThoughtReader, opened, thinks, unfinished
from tiermoe.serve.tools import Format, format_of, types_of


@dataclass(frozen=True, slots=True)
class Chat:
    """messages: as chat templates take them. tools: as OpenAI has them. choice: 'none', 'auto', 'required' or the name
    of the function that must be called. schema: of JSON that the answer must be; None: it is free. told: what else the
    template is told (`enable_thinking`, …). parallel: an answer may call several times. new_turn: an assistant's
    message at the end is not continued."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    choice: str = "auto"
    schema: Mapping[str, Any] | None = None
    told: Mapping[str, Any] = field(default_factory=dict)
    parallel: bool = True
    new_turn: bool = False

    @property
    def forced(self) -> bool:
        """Whether the answer is a call."""
        return self.choice not in ("none", "auto")

    @property
    def continued(self) -> str | None:
        """What the answer continues. Refused where it cannot."""
        if self.new_turn or not self.messages:
            return None
        if self.messages[-1].get("tool_calls"):
            raise Refused(400, "the conversation ends with calls of tools; send their results", "messages")
        if not continued(self.messages):
            return None
        if self.forced or self.schema is not None:
            wanted = "tool_choice" if self.forced else "response_format"
            raise Refused(
                400,
                f"an answer that continues the assistant's message cannot follow {wanted}; leave out one",
                "messages",
            )
        text: str = self.messages[-1]["content"]
        return text


@dataclass(frozen=True, slots=True)
class Prepared:
    """ids: of the prompt. reader: makes what reads an answer. grammar: compiles what answers must follow. special: an
    answer is read with its special tokens. stops: where it ends beside where it is asked to."""

    ids: list[int]
    reader: Callable[[], Reader] = Reader
    grammar: Compiling | None = None
    special: bool = False
    stops: tuple[str, ...] = ()


def prepare(served: Served, chat: Chat) -> Prepared:
    """Refused where the model's template does not take it, or what is asked for cannot be followed."""
    tools = [] if chat.choice == "none" else list(chat.tools)
    if harmony.speaks(served.template):
        return _in_channels(served, chat, tools)
    form = _format(served, tools) if tools else None
    begun = chat.continued
    ids = served.chat_ids(chat.messages, tools, chat.told, chat.new_turn)
    thinking = thinks(served.template)
    inside = thinking and (opened(served.tokenizer.decode(ids[-8:])) if begun is None else unfinished(begun))
    types, one = types_of(tools), not chat.parallel

    def reader() -> Reader:
        calls = CallReader(form, types, one, chat.forced) if form else None
        return Reader(ThoughtReader(inside) if thinking else None, calls)

    stops = (form.end,) if form and one else ()
    return Prepared(ids, reader, _grammar(served, chat, form, tools, inside), stops=stops)


def _format(served: Served, tools: Sequence[dict[str, Any]]) -> Format:
    form = format_of(served.template)
    if form is None:
        raise Refused(400, f"{served.name} has no chat template with tools in a format that this server reads", "tools")
    return form


def _in_channels(served: Served, chat: Chat, tools: Sequence[dict[str, Any]]) -> Prepared:
    messages = [harmony.message_of(message) for message in chat.messages]
    goes_on = chat.continued is not None
    ids = served.chat_ids(messages, [harmony.tool_of(tool) for tool in tools], chat.told, chat.new_turn)
    functions, grammar = _named(chat, tools), None
    if chat.forced or chat.schema is not None:
        rules = harmony.rules_of(functions, None if chat.forced else chat.schema)
        grammar = _followed(served, rules, "tools" if chat.forced else "response_format")
    return Prepared(ids, lambda: Reader(channels=harmony.ChannelReader(goes_on)), grammar, special=True)


def _named(chat: Chat, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The functions that may be called. Refused where the one that must be is none."""
    named = [tool["function"] for tool in tools if chat.choice in ("auto", "required", tool["function"]["name"])]
    if chat.forced and not tools:
        raise Refused(400, "tool_choice asks for a call, and there are no tools", "tool_choice")
    if chat.forced and not named:
        raise Refused(400, f"tool_choice asks for '{chat.choice}', which is not among the tools", "tool_choice")
    return named


def _grammar(
    served: Served, chat: Chat, form: Format | None, tools: Sequence[dict[str, Any]], inside: bool
) -> Compiling | None:
    """What the answer must be: one call, JSON, or either where tools may be called as well. A thought comes first where
    the prompt has opened one."""
    named = _named(chat, tools)
    if not chat.forced and chat.schema is None:
        return None
    rules, said = [], []
    if form is not None and named:
        rules.append(form.rule(named))
        said.append("call")
    if not chat.forced and chat.schema is not None:
        rules.append(f"json: {json_rule(chat.schema)}")
        said.append("json")
    start = f"start: {' | '.join(said)}"
    if inside:
        start = f"start: thought /\\n{{0,2}}/ ({' | '.join(said)})"
        rules.append(f'thought[suffix="{END}"]: /(.|\\n)*/')
    return _followed(served, "\n".join([start, *rules]), "tools" if chat.forced else "response_format")


def grammar_of(served: Served, schema: Mapping[str, Any] | None) -> Compiling | None:
    """Of a text that is continued."""
    return None if schema is None else _followed(served, f"start: {json_rule(schema)}", "response_format")


def _followed(served: Served, rules: str, param: str) -> Compiling:
    """Refused by what is returned where the rules cannot be followed."""

    async def compiled(count: int) -> list[Grammar]:
        try:
            return await served.grammars.compiled(rules, count)
        except ConfigError as error:
            raise Refused(400, str(error), param) from error

    return compiled
