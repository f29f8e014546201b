"""Chats of all dialects: a conversation that wants an answer; the prompt, grammar and stop strings that follow from it;
and the reader of its answer. A thought before it is text between <think> and </think> (Qwen3, GLM-4.5, MiniMax-M2,
DeepSeek), which some chat templates open at the end of the prompt, or in channels (`harmony`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tiermoe.engine.detokenize import overlap
from tiermoe.engine.request import Piece, Request, Thinking, ThoughtBudget
from tiermoe.engine.sampling import Grammar, Sampling
from tiermoe.errors import ConfigError
from tiermoe.serve import harmony
from tiermoe.serve.dialects import Json, Refused
from tiermoe.serve.grammar import Compiling, Constraint
from tiermoe.serve.parameters import parameters_of
from tiermoe.serve.served import Served, continued
from tiermoe.serve.tool_calls import CallPiece, CallReader, Format, format_of


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


BEGIN, END = "<think>", "</think>"


def thinks(template: str | None) -> bool:
    """Whether a chat template has thoughts."""
    return END in (template or "")


def opened(prompt: str) -> bool:
    """Whether a prompt ends within a thought."""
    return prompt.rstrip().endswith(BEGIN)


def unfinished(text: str) -> str | None:
    """The thought within which a text ends, or None."""
    _, begun, thought = text.rpartition(BEGIN)
    return thought if begun and END not in thought else None


class ThoughtReader:
    """Reads one answer as it comes: text in, (thought, answer) out. Line breaks around the thought belong to neither.
    Tags that are written once more, at the beginning of a thought or after its end, are no text.

    inside: whether the answer begins within a thought. begun: whether it continues that thought's text."""

    def __init__(self, inside: bool, begun: bool = False) -> None:
        self.inside = inside
        self._before = not begun  # whether a tag that begins a thought may still come
        self._again = False  # whether one that ends it may
        self._first = not begun  # whether nothing of the current part has come
        self._withheld = ""

    def add(self, text: str, last: bool = False) -> tuple[str, str]:
        """Thought and answer that are certain with more text. last: no more text comes."""
        self._withheld += text
        if self._before and not self._begun(last):
            return "", ""
        thought = self._thought(last) if self.inside else ""
        return thought, "" if self.inside else self._trimmed(self._answer(last))

    def _begun(self, last: bool) -> bool:
        """Whether it is certain if the answer begins with a thought."""
        start = self._withheld.lstrip()
        if not last and BEGIN.startswith(start[: len(BEGIN)]) and len(start) < len(BEGIN):
            return False
        self._before = False
        if start.startswith(BEGIN):
            self.inside = True
            self._withheld = start[len(BEGIN) :]
        elif not self.inside:
            self._first = False  # an answer without a thought stays as it is
        return True

    def _thought(self, last: bool) -> str:
        at = self._withheld.find(END)
        if at >= 0:
            thought = self._trimmed(self._take(at).rstrip("\n"))
            self._take(len(END))
            self.inside, self._first, self._again = False, True, True
            return thought
        certain = (
            self._withheld
            if last
            else self._withheld[: len(self._withheld) - overlap(self._withheld, END)].rstrip("\n")
        )
        return self._trimmed(self._take(len(certain)))

    def _answer(self, last: bool) -> str:
        if self._again and (at := self._withheld.find(END)) >= 0:
            self._again, self._withheld = False, self._withheld[:at] + self._withheld[at + len(END) :]
        kept = overlap(self._withheld, END) if self._again and not last else 0
        return self._take(len(self._withheld) - kept)

    def _trimmed(self, text: str) -> str:
        """Text without the line breaks at the beginning of its part."""
        if self._first:
            text = text.lstrip("\n")
            self._first = not text
        return text

    def _take(self, count: int) -> str:
        taken, self._withheld = self._withheld[:count], self._withheld[count:]
        return taken


@dataclass(frozen=True, slots=True)
class ParsedChunk:
    """A piece of an answer after parsing: thought, text, and what is new of calls."""

    thought: str = ""
    text: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    finish: str | None = None  # 'stop', 'length', 'tool_calls'; None while more comes


class AnswerReader:
    """Reads the pieces of one answer: thought, text and tool calls. thoughts, calls: None if there can be none.
    channels: reads both."""

    def __init__(
        self,
        thoughts: ThoughtReader | None = None,
        calls: CallReader | None = None,
        channels: harmony.ChannelReader | None = None,
    ) -> None:
        self.thought_tokens = 0  # so far
        self._thoughts = thoughts
        self._calls = calls
        self._channels = channels

    def add(self, piece: Piece) -> ParsedChunk:
        last, cut = piece.finish is not None, piece.finish == "length"
        thought, text, calls = "", piece.text, list[CallPiece]()
        if self._channels is not None:
            thought, text, calls = self._channels.add(text, last, cut)
        elif self._thoughts is not None:
            thought, text = self._thoughts.add(text, last)
        thinking = self._channels or self._thoughts
        if thinking is not None and (thought or thinking.inside):
            self.thought_tokens += len(piece.tokens)
        if self._calls is not None:
            text, calls = self._calls.add(text, last, cut)
        calling, finish = self._channels or self._calls, piece.finish
        if finish == "stop" and calling is not None and calling.called:
            finish = "tool_calls"
        return ParsedChunk(thought, text, calls, finish)


# --- preparing ---


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt, and how its answers are made and read."""

    ids: list[int]  # of the prompt
    reader: Callable[[], AnswerReader] = AnswerReader  # makes the reader of an answer
    grammar: Compiling | None = None  # compiles what answers must follow
    budget: Callable[[], ThoughtBudget] | None = None  # makes that of an answer
    special: bool = False  # whether answers are read with their special tokens
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
    if harmony.speaks(served.template):
        return _in_channels(served, chat, tools)
    form = _format(served, tools) if tools else None
    begun = chat.continued
    ids = served.chat_ids(chat.messages, tools, chat.variables, chat.new_turn)
    thinking = thinks(served.template)
    if begun is None:
        thought = "" if opened(served.tokenizer.decode(ids[-8:])) else None
    else:
        text = chat.messages[-1][begun]
        thought = text if begun == "reasoning_content" else unfinished(text)
    inside = thinking and thought is not None

    def thoughts() -> ThoughtReader:
        return ThoughtReader(inside, begun=bool(thought and thought.strip()))

    parameters, one = parameters_of(tools), not chat.parallel

    def reader() -> AnswerReader:
        calls = CallReader(form, parameters, one, chat.forced) if form else None
        return AnswerReader(thoughts() if thinking else None, calls)

    budget = _budget(served, chat, END, thoughts) if thinking else None
    stops = (form.end,) if form and one else ()
    return Prepared(ids, reader, _grammar(served, chat, form, tools, inside), budget, stops=stops)


def _budget(
    served: Served, chat: Chat, end: str, thinking: Callable[[], Thinking]
) -> Callable[[], ThoughtBudget] | None:
    """Makes budgets of thoughts. end: the text that ends a thought. thinking: makes readers of answers."""
    most = chat.thought_tokens
    if most is None:
        return None
    ids = served.text_ids(end, special=False)
    return lambda: ThoughtBudget(most, ids, thinking())


def _format(served: Served, tools: Sequence[Json]) -> Format:
    form = format_of(served.template)
    if form is None:
        raise Refused(400, f"{served.name} has no chat template with tools in a format that this server reads", "tools")
    return form


def _in_channels(served: Served, chat: Chat, tools: Sequence[Json]) -> Prepared:
    messages = [harmony.message_of(message) for message in chat.messages]
    begun = chat.continued
    ids = served.chat_ids(messages, [harmony.tool_of(tool) for tool in tools], chat.variables, chat.new_turn)
    functions, grammar = _named(chat, tools), None
    said = None if chat.forced else chat.constraint
    if chat.forced or said is not None:
        grammar = _followed(served, harmony.rules_of(functions, said.term if said else None), said)
    after = harmony.thought_end(calls=bool(tools) and chat.constraint is None)

    def channels() -> harmony.ChannelReader:
        return harmony.ChannelReader(goes_on=begun is not None, thinks=begun == "reasoning_content")

    budget = _budget(served, chat, after, channels)
    return Prepared(ids, lambda: AnswerReader(channels=channels()), grammar, budget, special=True)


def _named(chat: Chat, tools: Sequence[Json]) -> list[Json]:
    """The functions that may be called. Refused if the one that must be called is none of the tools."""
    named = [tool["function"] for tool in tools if chat.choice in ("auto", "required", tool["function"]["name"])]
    if chat.forced and not tools:
        raise Refused(400, "tool_choice asks for a call, and there are no tools", "tool_choice")
    if chat.forced and not named:
        raise Refused(400, f"tool_choice asks for '{chat.choice}', which is not among the tools", "tool_choice")
    return named


def _grammar(served: Served, chat: Chat, form: Format | None, tools: Sequence[Json], inside: bool) -> Compiling | None:
    """Grammar of the answer: one call, what the constraint says, or either if tools may be called as well; after a
    thought if the prompt has opened one. None: the answer is free."""
    named = _named(chat, tools)
    constraint = None if chat.forced else chat.constraint
    if not chat.forced and constraint is None:
        return None
    rules, said = [], []
    if form is not None and named:
        rules.append(form.rule(named))
        said.append("call")
    if constraint is not None:
        rules.append(f"content: {constraint.term}")
        said.append("content")
    start = f"start: {' | '.join(said)}"
    if inside:
        start = f"start: thought /\\n{{0,2}}/ ({' | '.join(said)})"
        rules.append(f'thought[suffix="{END}"]: /(.|\\n)*/')
    return _followed(served, "\n".join([start, *rules]), constraint)


def grammar_of(served: Served, constraint: Constraint | None) -> Compiling | None:
    """Grammar of a completion."""
    return None if constraint is None else _followed(served, f"start: {constraint.term}", constraint)


def _followed(served: Served, rules: str, constraint: Constraint | None) -> Compiling:
    """Compiler of these rules, which raises Refused if they cannot be followed. constraint: what they say of the
    answer; None: a call of a tool."""
    param, grammar = ("tools", "") if constraint is None else (constraint.field, constraint.grammar)

    async def compiled(count: int) -> list[Grammar]:
        try:
            return await served.grammars.compiled(rules, count, grammar)
        except ConfigError as error:
            raise Refused(400, str(error), param) from error

    return compiled
