"""Anthropic's dialect: `/v1/messages`, whole and as a stream, and `/v1/messages/count_tokens`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tiermoe.engine.request import Piece, Request
from tiermoe.model.chat.reader import CallPiece
from tiermoe.serve.answers import ANSWERS, Stream, events_of, failure, submitted, whole
from tiermoe.serve.chats import Chat, PieceReader, Prepared, prepare
from tiermoe.serve.dialects import MESSAGES, Json, Refused, anthropic_error
from tiermoe.serve.fields import (
    CallArguments,
    Several,
    StopStrings,
    Tools,
    check_fields,
    readable_object,
    text_alone,
    text_of,
)
from tiermoe.serve.grammar import json_constraint
from tiermoe.serve.intake import aside
from tiermoe.serve.served import Served

_EMPTY: dict[str, Json] = {
    "text": {"text": "", "citations": []},  # not null: the AI SDK refuses that
    "thinking": {"thinking": "", "signature": ""},
}
"""Kind of block → its fields before any text."""
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class TextBlock(BaseModel):
    model_config = ConfigDict(extra="ignore")  # cache_control and the like change nothing here

    type: Literal["text"]
    text: str


class ThinkingBlock(BaseModel):
    type: Literal["thinking"]
    thinking: str


class RedactedBlock(BaseModel):
    """A thought that only Anthropic can read; the model does not get it."""

    type: Literal["redacted_thinking"]


class CallBlock(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: CallArguments = {}


class ResultBlock(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Several[Annotated[TextBlock, BeforeValidator(text_alone)]] | None = None


_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
Block = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | CallBlock | ResultBlock,
    Field(discriminator="type"),
    BeforeValidator(lambda block: text_alone(block, _BLOCKS)),
]


class Message(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | Several[Block]

    @property
    def plain(self) -> list[Json]:
        """The message as chat templates take it: results of tools are messages of their own, before the text."""
        blocks = [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        results = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)}
            for block in blocks
            if isinstance(block, ResultBlock)
        ]
        said: Json = {
            "role": self.role,
            "content": "".join(block.text for block in blocks if isinstance(block, TextBlock)),
        }
        thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            for block in blocks
            if isinstance(block, CallBlock)
        ]
        if thought:
            said["reasoning_content"] = thought
        if calls:
            said["tool_calls"] = calls
        return [*results, *([said] if said["content"] or calls or thought or not results else [])]


class Tool(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: Json


class ToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(BaseModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1024)  # at least as many as Anthropic asks for


class OutputFormat(BaseModel):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(BaseModel):
    format: OutputFormat | None = None


class CountRequest(BaseModel):
    """Fields of both endpoints. Unknown fields are kept for `check_fields`."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    messages: Several[Message] = Field(min_length=1)
    system: str | Several[TextBlock] | None = None
    tools: Tools[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    @property
    def plain(self) -> list[Json]:
        """The conversation as chat templates take it."""
        system = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        return [*system, *(each for message in self.messages for each in message.plain)]

    @property
    def functions(self) -> list[Json]:
        """The tools as chat templates take them."""
        return [
            {"type": "function", "function": {**_described(tool), "parameters": tool.input_schema}}
            for tool in self.tools or ()
        ]

    @property
    def choice(self) -> str:
        """`Chat.choice`. Refused if a tool is to be called and none is named."""
        choice = self.tool_choice
        if choice is None or choice.type in ("auto", "none"):
            return "auto" if choice is None else choice.type
        if choice.type == "any":
            return "required"
        if choice.name is None:
            raise Refused(400, "a tool_choice of type tool needs name", "tool_choice")
        return choice.name

    @property
    def parallel(self) -> bool:
        """`Chat.parallel`."""
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """Schema of JSON that the answer must be; None: any text."""
        form = (self.output_config.format if self.output_config else None) or self.output_format
        return form.schema_ if form else None

    @property
    def variables(self) -> Json:
        """Variables of the template; none where the request does not say whether to think."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}

    @property
    def thought_tokens(self) -> int | None:
        """`Chat.thought_tokens`."""
        thinking = self.thinking
        return thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop_sequences: StopStrings | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)


def _described(tool: Tool) -> Json:
    return {"name": tool.name} | ({"description": tool.description} if tool.description else {})


class GrowingMessage:
    """A message while it grows: its blocks, and the events of each change.

    model: the model's name. prompt: tokens of the prompt."""

    def __init__(self, model: str, reader: PieceReader, prompt: int) -> None:
        self._reader = reader
        self._prompt = prompt
        self._made = self._cached = 0
        self.message: Json = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "container": None,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": self._usage(),
        }
        self._open: str | None = None  # the kind of the block under way

    def begin(self) -> Iterator[Json]:
        yield {"type": "message_start", "message": self.message}

    def add(self, piece: Piece) -> Iterator[Json]:
        """Events of a piece; after the last piece the message is whole."""
        if piece.error is not None:
            yield anthropic_error(failure(piece.error))
            return
        self._made += len(piece.tokens)
        self._cached = piece.cached
        parsed = self._reader.add(piece)
        if parsed.thought:
            yield from self._text("thinking", parsed.thought)
        if parsed.text:
            yield from self._text("text", parsed.text)
        for each in parsed.calls:
            yield from self._call(each)
        if parsed.finish is None:
            return
        if not self.message["content"]:
            yield from self._begin("text", _EMPTY["text"])
        yield from self._close()
        stopped_by = None if parsed.finish == "tool_calls" else piece.stopped_by
        reason = "stop_sequence" if stopped_by else _REASONS.get(parsed.finish, "end_turn")
        end = {"stop_reason": reason, "stop_sequence": stopped_by}
        self.message |= end | {"usage": self._usage()}
        yield {"type": "message_delta", "delta": end, "usage": self._usage()}
        yield {"type": "message_stop"}

    def _text(self, kind: str, text: str) -> Iterator[Json]:
        if self._open != kind:
            yield from self._begin(kind, _EMPTY[kind])
        self.message["content"][-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, piece: CallPiece) -> Iterator[Json]:
        call = piece.call
        if piece.kind == "begin":
            named = {"id": f"toolu_{call.id.removeprefix('call_')}", "name": call.name}
            yield from self._begin("tool_use", {**named, "input": {}, "caller": {"type": "direct"}})
        elif piece.kind == "arguments":
            yield self._delta({"type": "input_json_delta", "partial_json": piece.arguments})
        else:
            self.message["content"][-1]["input"] = readable_object(call.arguments)
            yield from self._close()

    def _begin(self, kind: str, empty: Json) -> Iterator[Json]:
        """Begins a block; the open one ends."""
        yield from self._close()
        self._open = kind
        block = {"type": kind, **empty}
        self.message["content"].append(block)
        yield self._at("content_block_start", content_block=dict(block))

    def _close(self) -> Iterator[Json]:
        if self._open is not None:
            yield self._at("content_block_stop")
        self._open = None

    def _delta(self, delta: Json) -> Json:
        return self._at("content_block_delta", delta=delta)

    def _at(self, kind: str, **more: Any) -> Json:
        return {"type": kind, "index": len(self.message["content"]) - 1, **more}

    def _usage(self) -> Json:
        return {
            "input_tokens": self._prompt - self._cached,
            "cache_read_input_tokens": self._cached,
            "cache_creation_input_tokens": 0,
            "cache_creation": None,
            "output_tokens": self._made,
            "output_tokens_details": {"thinking_tokens": self._reader.thought_tokens},
            "server_tool_use": None,
            "service_tier": "standard",
            "inference_geo": None,
        }


def routes(app: FastAPI, served: Served) -> None:
    """Adds the endpoints."""

    @app.post(MESSAGES, response_model=None, responses=ANSWERS)
    async def messages(asked: MessagesRequest, http: HttpRequest) -> Response | Json:
        prepared = await _prepared(served, asked)
        answers = await submitted(served.worker, [_request(served, asked, prepared)], prepared.grammar)
        growing = GrowingMessage(served.name, prepared.reader(), len(prepared.ids))
        if asked.stream:
            return Stream(answers, events_of(growing, answers))
        await whole(http, answers, lambda _, piece: list(growing.add(piece)))
        return growing.message

    @app.post(f"{MESSAGES}/count_tokens")
    async def count_tokens(asked: CountRequest) -> dict[str, int]:
        return {"input_tokens": len((await _prepared(served, asked)).ids)}


async def _prepared(served: Served, asked: CountRequest) -> Prepared:
    check_fields(asked)
    served.check_model(asked.model)
    constraint = json_constraint(asked.answer_schema)
    chat = Chat(
        asked.plain, asked.functions, asked.choice, constraint, asked.variables, asked.parallel,
        thought_tokens=asked.thought_tokens,
    )  # fmt: skip
    return await aside(prepare, served, chat)


def _request(served: Served, asked: MessagesRequest, prepared: Prepared) -> Request:
    named = asked.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True)
    sampling = replace(served.sampling, max_tokens=asked.max_tokens, **named)
    return prepared.request(sampling, asked.stop_sequences or ())
