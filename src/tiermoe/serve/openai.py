"""OpenAI's dialect: `/v1/chat/completions` and `/v1/completions`, whole and as streams."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from tiermoe.engine.request import Piece, Request
from tiermoe.engine.sampling import Sampling
from tiermoe.errors import ConfigError
from tiermoe.model.chat.reader import CallPiece, ToolCall
from tiermoe.serve.answers import ANSWERS, Logprobs, Stream, failure, submitted, whole
from tiermoe.serve.chats import Chat, PieceReader, Prepared, grammar_of, prepare
from tiermoe.serve.dialects import Json, Refused, openai_error
from tiermoe.serve.fields import (
    CallArguments,
    Options,
    SamplerFields,
    Several,
    StopFields,
    TextPart,
    TokenIds,
    Tools,
    check_fields,
    text_of,
    thinking_variables,
)
from tiermoe.serve.grammar import ConstraintFields
from tiermoe.serve.intake import aside
from tiermoe.serve.llama_server import timings_of
from tiermoe.serve.served import Served

# --- requests ---


_BUDGETS = AliasChoices("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget")
"""Names of a budget of thoughts: llama-server's, its older one, vLLM's."""
_MESSAGE_FIELDS = ("tool_call_id", "name", "reasoning_content")
"""Optional fields of a message that chat templates get."""


class StreamOptions(BaseModel):
    include_usage: bool = False


class Common(SamplerFields, ConstraintFields, StopFields):
    """Fields of both endpoints. Unknown fields are kept for `check_fields`."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    timings_per_token: bool = False
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=-1)  # -1: as many as there is room for
    cache_prompt: bool = True
    cache_salt: str | None = Field(None, max_length=1024)


class CalledFunction(BaseModel):
    name: str
    arguments: CallArguments = {}


class CalledTool(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Function(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    parameters: Json | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    name: str


class NamedTool(BaseModel):
    type: Literal["function"]
    function: FunctionName


class AllowedFunctions(BaseModel):
    mode: Literal["auto", "required"]
    tools: Tools[NamedTool]


class AllowedTools(BaseModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Several[TextPart] | None = None
    tool_calls: Several[CalledTool] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None

    @property
    def plain(self) -> Json:
        """The message as chat templates take it."""
        plain: Json = {"role": "system" if self.role == "developer" else self.role, "content": text_of(self.content)}
        if self.tool_calls:
            plain["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return plain | {name: value for name in _MESSAGE_FIELDS if (value := getattr(self, name))}


class ChatRequest(Common):
    messages: Several[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=-1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Tools[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Options[Any] | None = None
    reasoning_effort: str | None = None
    reasoning_budget_tokens: int | None = Field(None, ge=-1, validation_alias=_BUDGETS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_progress: bool | None = None

    @property
    def new_turn(self) -> bool:
        """`Chat.new_turn`. Refused if its fields contradict each other or the messages."""
        begins, goes_on = self.add_generation_prompt, self.continue_final_message
        last = self.messages[-1].role == "assistant"
        if goes_on and begins:
            raise Refused(400, "continue_final_message excludes add_generation_prompt", "continue_final_message")
        if goes_on and not last:
            needed = "continue_final_message needs an assistant's message at the end"
            raise Refused(400, needed, "continue_final_message")
        if begins is False and not (last and goes_on is not False):
            raise Refused(400, "add_generation_prompt of false needs a message to continue", "add_generation_prompt")
        return bool(begins) or goes_on is False

    @property
    def choice(self) -> str:
        """`Chat.choice`."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return choice.function.name
        return choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice or "auto"

    @property
    def functions(self) -> list[Json]:
        """The tools that may be called."""
        tools = self.tools or []
        if isinstance(self.tool_choice, AllowedTools):
            allowed = {each.function.name for each in self.tool_choice.allowed_tools.tools}
            tools = [tool for tool in tools if tool.function.name in allowed]
        return [tool.model_dump(exclude_none=True) for tool in tools]

    @property
    def variables(self) -> Json:
        """Variables of the template."""
        return thinking_variables(self.reasoning_effort) | (self.chat_template_kwargs or {})

    @property
    def thought_tokens(self) -> int | None:
        """`Chat.thought_tokens`."""
        return None if self.reasoning_budget_tokens == -1 else self.reasoning_budget_tokens


class CompletionRequest(Common):
    prompt: str | Several[str] | TokenIds | Several[TokenIds]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False


# --- answers ---


COMPLETION_TOKENS = 16
"""Tokens of a completion that names no `max_tokens`, as OpenAI has it; a chat's answer may take the whole context."""


@dataclass(slots=True)
class Shape:
    """Shape of the two endpoints' answers."""

    id: str
    model: str
    chat: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[Json], **more: Any) -> Json:
        return self._object(choices, "chat.completion" if self.chat else "text_completion") | more

    def chunk(self, choices: list[Json], **more: Any) -> str:
        return json.dumps(self._object(choices, "chat.completion.chunk" if self.chat else "text_completion") | more)

    def _object(self, choices: list[Json], kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def usage_of(prompt: int, pieces: Sequence[Piece], readings: Iterable[ChoiceReader]) -> Json:
    """Usage of all choices. prompt: tokens of the prompts."""
    made = sum(len(piece.tokens) for piece in pieces)
    cached = max((piece.cached for piece in pieces), default=0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": sum(each.reader.thought_tokens for each in readings)},
    }


@dataclass(slots=True)
class ChoiceReader:
    """Reader of one choice, as its pieces come."""

    logprobs: Logprobs
    reader: PieceReader
    echo: str = ""  # text of the prompt, if it comes before the answer's
    calls: list[ToolCall] = field(default_factory=list)  # so far

    def add(self, piece: Piece) -> tuple[Json, str | None]:
        """reasoning_content, content and tool_calls of a piece, if it has any, and the reason of the end."""
        parsed = self.reader.add(piece)
        calls = [self._delta(each) for each in parsed.calls if each.kind != "end"]
        text, self.echo = self.echo + parsed.text, ""
        parts = {"reasoning_content": parsed.thought, "content": text, "tool_calls": calls}
        return {name: part for name, part in parts.items() if part}, parsed.finish

    def _delta(self, piece: CallPiece) -> Json:
        if piece.kind == "arguments":
            return {"index": len(self.calls) - 1, "function": {"arguments": piece.arguments}}
        self.calls.append(piece.call)
        return {"index": len(self.calls) - 1, **_call(piece.call.id, piece.call.name)}


def _call(number: str, name: str, arguments: str = "") -> Json:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def choice(index: int, chat: bool, pieces: Sequence[Piece], reading: ChoiceReader) -> Json:
    """A whole choice."""
    read = [reading.add(piece) for piece in pieces]
    text, thought = ("".join(said.get(name, "") for said, _ in read) for name in ("content", "reasoning_content"))
    logprobs = reading.logprobs.of([each for piece in pieces for each in (*piece.prompt, *piece.logprobs)])
    end = {"logprobs": logprobs, "finish_reason": read[-1][1]}
    if not chat:
        return {"index": index, "text": text} | end
    calls = [_call(call.id, call.name, call.arguments) for call in reading.calls]
    message: Json = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return {"index": index, "message": message} | end


async def stream(
    shape: Shape,
    answers: AsyncIterator[tuple[int, Piece]],
    prompt: int,
    readings: Mapping[int, ChoiceReader],
    asked: Common,
) -> AsyncIterator[str]:
    """Data of a stream's events: the role; how far the prompt is read, where that is asked for; thoughts, text and
    calls as they come; the reason of each end with its timings; usage; `[DONE]`."""
    began, pieces = time.perf_counter(), list[Piece]()
    include_usage = asked.stream_options is not None and asked.stream_options.include_usage
    usage: Json = {"usage": None} if include_usage else {}

    def chunk(index: int, said: Json, logprobs: Json | None = None, finish: str | None = None, **more: Any) -> str:
        choices = [{"index": index, **said, "logprobs": logprobs, "finish_reason": finish}]
        return shape.chunk(choices, **usage, **more)

    if shape.chat:
        for index in readings:
            yield chunk(index, {"delta": {"role": "assistant", "content": ""}})
    async for index, piece in answers:
        if piece.read is not None:
            took = round(1000 * (time.perf_counter() - began))
            progress = {"total": prompt, "cache": piece.cached, "processed": piece.read, "time_ms": took}
            yield chunk(index, {"delta": {}}, prompt_progress=progress)
            continue
        pieces.append(piece)
        if piece.error is not None:
            yield json.dumps(openai_error(failure(piece.error)))
            return
        logprobs = readings[index].logprobs.of((*piece.prompt, *piece.logprobs))
        said, finish = readings[index].add(piece)
        timings: Json = {"timings": timings_of(piece)}
        if said or logprobs:
            part = {"delta": said} if shape.chat else {"text": said.get("content", "")}
            yield chunk(index, part, logprobs, **(timings if asked.timings_per_token else {}))
        if finish is not None:
            yield chunk(index, {"delta": {}} if shape.chat else {"text": ""}, finish=finish, **timings)
    if include_usage:
        yield shape.chunk([], usage=usage_of(prompt, pieces, readings.values()), **_timings(pieces, len(readings)))
    yield "[DONE]"


def _timings(pieces: Sequence[Piece], answers: int) -> Json:
    """`timings` after all pieces, if there is one answer: those of several are of each by itself."""
    return {"timings": timings_of(pieces[-1])} if answers == 1 else {}


def sampling_of(asked: Common, default: Sampling, most: int) -> Sampling:
    """Sampling of an answer, with `default` for absent fields. most: largest number of tokens."""
    wanted = getattr(asked, "max_completion_tokens", None)
    wanted = asked.max_tokens if wanted is None else wanted
    if wanted is None:
        wanted = COMPLETION_TOKENS if isinstance(asked, CompletionRequest) else most
    if wanted == 0 and not isinstance(asked, CompletionRequest):
        raise Refused(400, "an answer of 0 tokens says nothing; -1 is as many as there is room for", "max_tokens")
    wanted = most if wanted == -1 else wanted
    return replace(default, **asked.named(max(wanted, 1)), max_tokens=min(max(wanted, 1), most))


def routes(app: FastAPI, served: Served) -> None:
    """Adds the endpoints."""

    @app.post("/v1/chat/completions", response_model=None, responses=ANSWERS)
    async def chat(asked: ChatRequest, http: HttpRequest) -> Response | Json:
        check_fields(asked)
        served.check_model(asked.model)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise Refused(400, "top_logprobs needs logprobs=true", "top_logprobs")
        parallel = asked.parallel_tool_calls is not False
        messages = [message.plain for message in asked.messages]
        conversation = Chat(
            messages, asked.functions, asked.choice, asked.constraint, asked.variables, parallel, asked.new_turn,
            asked.thought_tokens,
        )  # fmt: skip
        _check_count(served, asked.n or 1)
        prepared = await aside(prepare, served, conversation)
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        return await _answer(http, served, asked, [prepared], logprobs)

    @app.post("/v1/completions", response_model=None, responses=ANSWERS)
    async def complete(asked: CompletionRequest, http: HttpRequest) -> Response | Json:
        check_fields(asked)
        served.check_model(asked.model)
        if asked.max_tokens == 0 and not asked.echo:
            raise Refused(400, "max_tokens of 0 needs echo=true: there would be nothing to tell", "max_tokens")
        several = isinstance(asked.prompt, list) and asked.prompt and not isinstance(asked.prompt[0], int)
        _check_count(served, (len(asked.prompt) if several else 1) * (asked.n or 1))
        prompts = await aside(_prepared, served, asked)
        return await _answer(http, served, asked, prompts, asked.logprobs)


async def _answer(
    http: HttpRequest, served: Served, asked: Common, prompts: Sequence[Prepared], logprobs: int | None
) -> Response | Json:
    chat = isinstance(asked, ChatRequest)
    requests, readings = await aside(_requests, served, asked, prompts, logprobs)
    if asked.logit_bias is not None:
        served.check_ids(list(asked.logit_bias), "logit_bias")
    answers = await submitted(served.worker, requests, prompts[0].grammar)
    shape = Shape(f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", served.name, chat)
    count = sum(len(each.ids) for each in prompts)
    if asked.stream:
        shown = ((index, _shown(asked, piece)) async for index, piece in answers)
        return Stream(answers, stream(shape, shown, count, readings, asked))
    pieces: list[list[Piece]] = [[] for _ in requests]
    await whole(http, answers, lambda index, piece: pieces[index].append(_shown(asked, piece)))
    choices = [choice(index, chat, each, readings[index]) for index, each in enumerate(pieces)]
    every = [piece for each in pieces for piece in each]
    return shape.whole(choices, usage=usage_of(count, every, readings.values()), **_timings(every, len(requests)))


def _requests(
    served: Served, asked: Common, prompts: Sequence[Prepared], logprobs: int | None
) -> tuple[list[Request], dict[int, ChoiceReader]]:
    """Requests of all answers, and their readers by index."""
    chat = isinstance(asked, ChatRequest)
    echo = isinstance(asked, CompletionRequest) and asked.echo
    requests: list[Request] = []
    readings: dict[int, ChoiceReader] = {}
    for each in prompts:
        served.check_ids(each.ids, "prompt")
        room = served.context - len(each.ids)
        try:
            sampling = sampling_of(asked, served.sampling, max(room, 1))
        except ConfigError as error:
            raise Refused(400, str(error)) from error
        scored = echo and logprobs is not None
        progress = asked.stream and isinstance(asked, ChatRequest) and asked.return_progress is True
        more = {
            "logprobs": logprobs, "prompt_logprobs": scored, "progress": progress, "fresh": not asked.cache_prompt,
            "salt": asked.cache_salt or "",
        }  # fmt: skip
        text = served.tokenizer.decode(each.ids, skip_special_tokens=True) if echo else ""
        for index in range(asked.n or 1):
            seed = None if sampling.seed is None else sampling.seed + index  # each choice has its own
            readings[len(requests)] = ChoiceReader(Logprobs(served.tokenizer, chat), each.reader(), text)
            requests.append(each.request(replace(sampling, seed=seed), asked.stops, **more))
    return requests, readings


def _check_count(served: Served, count: int) -> None:
    """Refused if the answers exceed the queue."""
    most = served.worker.most_waiting
    if count > max(1, most):
        raise Refused(400, f"{count:,} answers are asked for, {most} at most may wait; lower n", "n")


def _shown(asked: Common, piece: Piece) -> Piece:
    """A piece without its token where max_tokens is 0: the loop chooses at least one, from the logits of the prompt's
    last token."""
    if asked.max_tokens != 0:
        return piece
    return replace(piece, text="", tokens=(), logprobs=(), timings=replace(piece.timings, tokens=0))


def _prepared(served: Served, asked: CompletionRequest) -> list[Prepared]:
    grammar = grammar_of(served, asked.constraint)
    return [Prepared(ids, grammar=grammar) for ids in prompts_of(served, asked.prompt)]


def prompts_of(served: Served, prompt: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
    """Token ids of each prompt. Refused if there is none."""
    if isinstance(prompt, str):
        return [served.text_ids(prompt)]
    if not prompt:
        raise Refused(400, "the prompt is empty", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return [served.text_ids(each) if isinstance(each, str) else each for each in prompt]
