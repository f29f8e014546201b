"""OpenAI's newer dialect, `/v1/responses`: items in, items out, whole and as a stream. Nothing is kept."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag

from tiermoe.engine.request import Piece, Request
from tiermoe.engine.sampling import Sampling
from tiermoe.model.chat.reader import CallPiece
from tiermoe.serve.answers import ANSWERS, Logprobs, Stream, events_of, submitted, whole
from tiermoe.serve.chats import Chat, PieceReader, Prepared, prepare
from tiermoe.serve.dialects import Json, Refused
from tiermoe.serve.fields import (
    CallArguments,
    Options,
    Several,
    TextPart,
    Tools,
    check_fields,
    text_of,
    thinking_variables,
)
from tiermoe.serve.grammar import json_constraint
from tiermoe.serve.intake import aside
from tiermoe.serve.served import Served

# --- requests ---


class MessageItem(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Several[TextPart]


class CallItem(BaseModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: CallArguments


class OutputItem(BaseModel):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Several[TextPart]


class ReasoningText(BaseModel):
    text: str


class ReasoningItem(BaseModel):
    type: Literal["reasoning"]
    content: Several[ReasoningText] | None = None


class Format(BaseModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: Json | None = Field(None, alias="schema")


class TextOptions(BaseModel):
    format: Format | None = None


class Reasoning(BaseModel):
    effort: str | None = None


class NamedFunction(BaseModel):
    type: Literal["function"]
    name: str


class AllowedTools(BaseModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Tools[NamedFunction]


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None


class OtherTool(BaseModel):
    """A tool of a kind that only its maker can run; the model does not get it."""

    model_config = ConfigDict(extra="allow")

    type: str


def _kind(value: Any, default: str | None = None) -> str | None:
    """The type of an item or a tool, before it is checked and after."""
    kind: str | None = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
    return kind


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        lambda value: _kind(value, "message"),
        custom_error_type="item_kind",
        custom_error_message="this server reads items of type message, function_call, function_call_output and "
        "reasoning; it keeps none, so that a client that sends an item_reference must be set to store: false",
    ),
]
Tool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")],
    Discriminator(lambda value: "function" if _kind(value) == "function" else "other"),
]


class ResponsesRequest(BaseModel):
    """Fields of the endpoint. Unknown fields are kept for `check_fields`."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    input: str | Several[Item] = Field(min_length=1)
    instructions: str | None = None
    stream: bool = False
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: Several[str] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Tools[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools = "auto"
    parallel_tool_calls: bool | None = None
    metadata: Options[JsonValue] | None = None

    @property
    def functions(self) -> list[Json]:
        """The tools that can be called, as chat templates take them."""
        tools = [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]
        if isinstance(self.tool_choice, AllowedTools):
            allowed = {each.name for each in self.tool_choice.tools}
            tools = [tool for tool in tools if tool.name in allowed]
        return [
            {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})} for tool in tools
        ]

    @property
    def choice(self) -> str:
        """`Chat.choice`."""
        choice = self.tool_choice
        if isinstance(choice, str):
            return choice
        return choice.name if isinstance(choice, NamedFunction) else choice.mode

    @property
    def parallel(self) -> bool:
        """`Chat.parallel`."""
        return self.parallel_tool_calls is not False

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """Schema of JSON that the answer must be; None: any text. Refused where none is named and one is needed."""
        form = self.text.format if self.text else None
        if form is None or form.type == "text":
            return None
        if form.type == "json_schema" and form.schema_ is None:
            raise Refused(400, "a text.format of type json_schema needs schema", "text")
        return form.schema_ or {"type": "object"}

    @property
    def logprobs(self) -> int | None:
        """`Request.logprobs`."""
        wanted = self.top_logprobs or "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if wanted else None

    @property
    def variables(self) -> Json:
        """Variables of the template."""
        return thinking_variables(self.reasoning.effort if self.reasoning else None)

    @property
    def messages(self) -> list[Json]:
        """As chat templates take them."""
        said = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*said, {"role": "user", "content": self.input}]
        return [*said, *_messages(self.input)]


def _messages(items: Sequence[Item]) -> list[Json]:
    """A turn of the assistant is several items: thoughts, text and calls."""
    messages: list[Json] = []
    turn: Json | None = None
    for item in items:
        if isinstance(item, OutputItem):
            turn = None
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            turn = None
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": text_of(item.content)})
        else:
            if turn is None or (isinstance(item, ReasoningItem) and turn.keys() - {"role", "reasoning_content"}):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add(turn, item)
    return messages


def _add(turn: Json, item: MessageItem | CallItem | ReasoningItem) -> None:
    if isinstance(item, ReasoningItem):
        turn["reasoning_content"] = text_of(item.content)
    elif isinstance(item, MessageItem):
        turn["content"] += text_of(item.content)
    else:
        function = {"name": item.name, "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


# --- answers ---


_TEXT_KINDS = {"reasoning": "reasoning_text", "message": "output_text"}
"""Kind of item → kind of its text."""
_UNUSED = {
    "background": False, "frequency_penalty": 0.0, "max_tool_calls": None, "presence_penalty": 0.0,
    "previous_response_id": None, "prompt_cache_key": None, "safety_identifier": None, "service_tier": "default",
    "store": False, "truncation": "disabled",
}  # fmt: skip
"""Fields of every response that say nothing here."""


class GrowingResponse:
    """A response while it grows: its items, and the events of each change.

    response: without output yet. prompt: tokens of the prompt."""

    def __init__(self, response: Json, reader: PieceReader, logprobs: Logprobs, prompt: int) -> None:
        self.response = response
        self._reader = reader
        self._logprobs = logprobs
        self._prompt = prompt
        self._made = self._cached = 0
        self._numbers = count()
        self._open: Json | None = None  # the item that text goes to

    def begin(self) -> Iterator[Json]:
        yield self._whole("created")
        yield self._whole("in_progress")

    def add(self, piece: Piece) -> Iterator[Json]:
        """Events of a piece; after the last piece the response is whole."""
        self._made += len(piece.tokens)
        self._cached = piece.cached
        if piece.error is not None:
            yield from self._close("incomplete")
            self.response |= {"status": "failed", "error": {"code": "server_error", "message": str(piece.error)}}
            yield self._whole("failed")
            return
        parsed = self._reader.add(piece)
        if parsed.thought:
            yield from self._text("reasoning", parsed.thought, [])
        if parsed.text or piece.logprobs:
            logprobs = self._logprobs.of(piece.logprobs)
            yield from self._text("message", parsed.text, logprobs["content"] if logprobs else [])
        for each in parsed.calls:
            yield from self._call(each)
        if parsed.finish is not None:
            yield from self._end("incomplete" if parsed.finish == "length" else "completed")

    def _end(self, status: str) -> Iterator[Json]:
        yield from self._close(status)
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        else:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response |= {
            "status": status,
            "usage": {
                "input_tokens": self._prompt,
                "input_tokens_details": {"cached_tokens": self._cached, "cache_write_tokens": 0},
                "output_tokens": self._made,
                "output_tokens_details": {"reasoning_tokens": self._reader.thought_tokens},
                "total_tokens": self._prompt + self._made,
            },
        }
        yield self._whole(status)

    def _text(self, kind: str, text: str, logprobs: list[Json]) -> Iterator[Json]:
        """Adds text to the open item, or to a new one where that is of another kind."""
        if self._open is None or self._open["type"] != kind:
            yield from self._close("completed")
            part: Json = {"type": _TEXT_KINDS[kind], "text": ""}
            item: Json = {"id": _id("rs" if kind == "reasoning" else "msg"), "type": kind}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
                item["role"] = "assistant"
            else:
                item["summary"] = []
            yield self._begun(item | {"status": "in_progress", "content": []})
            self._open = item = self.response["output"][-1]
            yield self._of_item("content_part.added", content_index=0, part=dict(part))
            item["content"].append(part)
        part = self._open["content"][0]
        part["text"] += text
        more: Json = {}
        if kind == "message":
            part["logprobs"] += logprobs
            more["logprobs"] = logprobs
        yield self._of_item(f"{_TEXT_KINDS[kind]}.delta", content_index=0, delta=text, **more)

    def _call(self, piece: CallPiece) -> Iterator[Json]:
        call = piece.call
        if piece.kind == "begin":
            yield from self._close("completed")
            item = {"id": _id("fc"), "type": "function_call", "call_id": call.id, "name": call.name}
            yield self._begun(item | {"arguments": "", "status": "in_progress"})
        elif piece.kind == "arguments":
            yield self._of_item("function_call_arguments.delta", delta=piece.arguments)
        else:
            status = "completed" if call.whole else "incomplete"
            self.response["output"][-1] |= {"arguments": call.arguments, "status": status}
            yield self._of_item("function_call_arguments.done", name=call.name, arguments=call.arguments)
            yield self._done()

    def _close(self, status: str) -> Iterator[Json]:
        """Ends the open item."""
        if self._open is None:
            return
        item, self._open = self._open, None
        part = item["content"][0]
        more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
        yield self._of_item(f"{part['type']}.done", content_index=0, text=part["text"], **more)
        yield self._of_item("content_part.done", content_index=0, part=part)
        item["status"] = status
        yield self._done()

    def _begun(self, item: Json) -> Json:
        self.response["output"].append(item)
        at = len(self.response["output"]) - 1
        return self._event(
            "output_item.added", output_index=at, item={**item, "content": []} if "content" in item else item
        )

    def _done(self) -> Json:
        output = self.response["output"]
        return self._event("output_item.done", output_index=len(output) - 1, item=output[-1])

    def _of_item(self, kind: str, **more: Any) -> Json:
        output = self.response["output"]
        return self._event(kind, item_id=output[-1]["id"], output_index=len(output) - 1, **more)

    def _whole(self, kind: str) -> Json:
        return self._event(kind, response=self.response)

    def _event(self, kind: str, **more: Any) -> Json:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **more}


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def routes(app: FastAPI, served: Served) -> None:
    """Adds the endpoint."""

    @app.post("/v1/responses", response_model=None, responses=ANSWERS)
    async def responses(asked: ResponsesRequest, http: HttpRequest) -> Response | Json:
        check_fields(asked)
        served.check_model(asked.model)
        constraint = json_constraint(asked.answer_schema)
        chat = Chat(asked.messages, asked.functions, asked.choice, constraint, asked.variables, asked.parallel)
        prepared = await aside(prepare, served, chat)
        request = _request(served, asked, prepared)
        answers = await submitted(served.worker, [request], prepared.grammar)
        logprobs = Logprobs(served.tokenizer, chat=True)
        growing = GrowingResponse(
            _response(served, asked, request.sampling), prepared.reader(), logprobs, len(prepared.ids)
        )
        if asked.stream:
            return Stream(answers, events_of(growing, answers))
        await whole(http, answers, lambda _, piece: list(growing.add(piece)))
        return growing.response


def _request(served: Served, asked: ResponsesRequest, prepared: Prepared) -> Request:
    room = max(served.context - len(prepared.ids), 1)
    named = asked.model_dump(include={"temperature", "top_p"}, exclude_none=True)
    sampling = replace(served.sampling, max_tokens=min(asked.max_output_tokens or room, room), **named)
    return prepared.request(sampling, (), logprobs=asked.logprobs)


def _response(served: Served, asked: ResponsesRequest, sampling: Sampling) -> Json:
    """A response without items yet. It repeats the fields of the request, as OpenAI's does, and has all that Open
    Responses requires (openresponses.org)."""
    fields = asked.model_dump(
        include={"instructions", "max_output_tokens", "metadata", "tool_choice", "text"}, by_alias=True
    )
    return {
        **_UNUSED,
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": served.name,
        "output": [],
        "parallel_tool_calls": asked.parallel,
        "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_logprobs": asked.top_logprobs or 0,
        "tools": [{"type": "function", "strict": False, **each["function"]} for each in asked.functions],
        "usage": None,
        **fields,
        "text": fields["text"] or {"format": {"type": "text"}},
    }
