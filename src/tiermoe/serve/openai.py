"""OpenAI's dialect: `/v1/chat/completions` and `/v1/completions`, whole and as streams."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import FastAPI, Response
from sse_starlette import EventSourceResponse

from tiermoe.errors import ConfigError
from tiermoe.generation.sampling import Sampling
from tiermoe.serve.answers import KEEP_ALIVE_S, begun, together, with_first
from tiermoe.serve.batcher import Piece, Request, TokenLogprob
from tiermoe.serve.errors import Refused
from tiermoe.serve.grammar import Grammar, Grammars
from tiermoe.serve.openai_fields import ChatRequest, Common, CompletionRequest, check_fields
from tiermoe.serve.served import Served
from tiermoe.serve.tools import CallReader, ToolCall


def error_body(error: Refused) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": None}}


def sampling_of(asked: Common, default: Sampling, most: int) -> Sampling:
    """How the tokens of an answer are chosen: as asked, else as `default`. most: tokens that there is room for."""
    named = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias")
    values = {name: getattr(asked, name) for name in named if getattr(asked, name) is not None}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    kept = {name: getattr(default, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    wanted = getattr(asked, "max_completion_tokens", None) or asked.max_tokens
    return Sampling(max_tokens=min(wanted or most, most), **{**kept, **values})


@dataclass(slots=True)
class Shape:
    """What differs between the two endpoints' answers."""

    id: str
    model: str
    chat: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return self._object(choices, "chat.completion" if self.chat else "text_completion") | {"usage": usage}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return json.dumps(self._object(choices, "chat.completion.chunk" if self.chat else "text_completion") | more)

    def _object(self, choices: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def shape_of(model: str, chat: bool) -> Shape:
    return Shape(("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex, model, chat)


def usage_of(prompt: int, pieces: Sequence[Piece]) -> dict[str, Any]:
    """prompt: tokens of it. pieces: of all choices."""
    made = sum(len(piece.tokens) for piece in pieces)
    cached = max((piece.cached for piece in pieces), default=0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Logprobs:
    """Log probabilities in the shape of an endpoint. tokenizer: names the tokens."""

    def __init__(self, tokenizer: Any, chat: bool) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._offset = 0

    def of(self, told: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """None where none were asked for."""
        if not told:
            return None
        return {"content": [self._chat_entry(each) for each in told]} if self._chat else self._completion(told)

    def _chat_entry(self, each: TokenLogprob) -> dict[str, Any]:
        return self._named(each.token, each.logprob) | {"top_logprobs": [self._named(*pair) for pair in each.top]}

    def _completion(self, told: Sequence[TokenLogprob]) -> dict[str, Any]:
        names = [self._name(each.token) for each in told]
        offsets = []
        for name in names:
            offsets.append(self._offset)
            self._offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [each.logprob for each in told],
            "top_logprobs": [{self._name(token): value for token, value in each.top} for each in told],
            "text_offset": offsets,
        }

    def _named(self, token: int, value: float) -> dict[str, Any]:
        name = self._name(token)
        return {"token": name, "logprob": value, "bytes": list(name.encode())}

    def _name(self, token: int) -> str:
        name: str = self._tokenizer.decode([token])
        return name


@dataclass(slots=True)
class Reading:
    """One choice, as its pieces come. calls: reads calls of tools; None: none may be called."""

    logprobs: Logprobs
    calls: CallReader | None

    def add(self, piece: Piece) -> tuple[str, list[dict[str, Any]], str | None]:
        """Text, calls of tools, and the reason of the end, if it is one."""
        if self.calls is None:
            return piece.text, [], piece.finish
        text, calls = self.calls.add(piece.text, piece.finish is not None)
        first = len(self.calls.calls) - len(calls)
        told = [_call(call, first + index) for index, call in enumerate(calls)]
        return text, told, "tool_calls" if piece.finish == "stop" and self.calls.calls else piece.finish


def _call(call: ToolCall, index: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": index, "id": call.id, "type": "function", "function": function}


def choice(index: int, chat: bool, pieces: Sequence[Piece], reading: Reading) -> dict[str, Any]:
    """A whole choice."""
    read = [reading.add(piece) for piece in pieces]
    text, calls = "".join(part for part, _, _ in read), [call for _, its, _ in read for call in its]
    told = reading.logprobs.of([each for piece in pieces for each in piece.logprobs])
    said: dict[str, Any] = {"text": text}
    if chat:
        said = {"message": {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}}
        if calls:
            said["message"]["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
    return {"index": index, **said, "logprobs": told, "finish_reason": read[-1][2]}


async def stream(
    shape: Shape,
    answers: AsyncIterator[tuple[int, Piece]],
    prompt: int,
    readings: Mapping[int, Reading],
    include_usage: bool,
) -> AsyncIterator[str]:
    """The data of a stream's events: the role, text as it comes, whole calls, the reason of each end, usage,
    `[DONE]`."""
    pieces: list[Piece] = []
    more: dict[str, Any] = {"usage": None} if include_usage else {}

    def chunk(index: int, said: dict[str, Any], told: Any = None, finish: str | None = None) -> str:
        return shape.chunk([{"index": index, **said, "logprobs": told, "finish_reason": finish}], **more)

    if shape.chat:
        for index in readings:
            yield chunk(index, {"delta": {"role": "assistant", "content": ""}})
    async for index, piece in answers:
        pieces.append(piece)
        if piece.error is not None:
            yield json.dumps(error_body(Refused(500, str(piece.error), kind="server_error")))
            return
        told = readings[index].logprobs.of(piece.logprobs)
        text, calls, finish = readings[index].add(piece)
        if text or told:
            yield chunk(index, {"delta": {"content": text}} if shape.chat else {"text": text}, told)
        if calls:
            yield chunk(index, {"delta": {"tool_calls": calls}})
        if finish is not None:
            yield chunk(index, {"delta": {}} if shape.chat else {"text": ""}, finish=finish)
    if include_usage:
        yield shape.chunk([], usage=usage_of(prompt, pieces))
    yield "[DONE]"


def grammar_of(asked: Common, grammars: Grammars) -> Callable[[], Grammar] | None:
    """What the answers must follow. Refused where a schema cannot be followed."""
    form = asked.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_schema" and form.json_schema is None:
        raise Refused(400, "a response_format of type json_schema needs json_schema", "response_format")
    try:
        return grammars.of_schema(form.json_schema.schema_ if form.json_schema else None)
    except ConfigError as error:
        raise Refused(400, str(error), "response_format") from error


def requests_of(ids: list[int], asked: Common, sampling: Sampling, more: Mapping[str, Any]) -> list[Request]:
    """One for each choice; a seed gives each its own. more: fields of `Request`."""
    seeds = [None if sampling.seed is None else sampling.seed + index for index in range(asked.n or 1)]
    return [Request(ids, replace(sampling, seed=seed), asked.stops, **more) for seed in seeds]


def routes(app: FastAPI, served: Served) -> None:
    """Adds the endpoints."""

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(asked: ChatRequest) -> Response | dict[str, Any]:
        check_fields(asked)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise Refused(400, "top_logprobs needs logprobs=true", "top_logprobs")
        tools = (
            [] if asked.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in asked.tools or ()]
        )
        calls = served.call_readers(tools)
        try:
            messages = [message.plain for message in asked.messages]
        except ValueError as error:
            raise Refused(400, f"the arguments of a tool call are no JSON: {error}", "messages") from error
        ids = served.chat_ids(messages, tools)
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        return await _answer(served, asked, [ids], logprobs, calls)

    @app.post("/v1/completions", response_model=None)
    async def complete(asked: CompletionRequest) -> Response | dict[str, Any]:
        check_fields(asked)
        return await _answer(served, asked, _prompts(served, asked.prompt), asked.logprobs)


async def _answer(
    served: Served,
    asked: Common,
    prompts: Sequence[list[int]],
    logprobs: int | None,
    calls: Callable[[], CallReader | None] = lambda: None,
) -> Response | dict[str, Any]:
    chat = isinstance(asked, ChatRequest)
    served.check_model(asked.model)
    requests: list[Request] = []
    more = {"logprobs": logprobs, "grammar": grammar_of(asked, served.grammars)}
    for ids in prompts:
        served.check_ids(ids, "prompt")
        room = served.context - len(ids)
        try:
            sampling = sampling_of(asked, served.sampling, max(room, 1))
        except ConfigError as error:
            raise Refused(400, str(error)) from error
        requests += requests_of(ids, asked, sampling, more)
    if asked.logit_bias is not None:
        served.check_ids(list(asked.logit_bias), "logit_bias")
    answers = together(served.worker, requests)
    first = await begun(answers)  # what is refused is refused before a stream begins
    form, count = shape_of(served.name, chat), sum(len(ids) for ids in prompts)
    readings = {index: Reading(Logprobs(served.tokenizer, chat), calls()) for index in range(len(requests))}
    if asked.stream:
        usage = asked.stream_options is not None and asked.stream_options.include_usage
        events = stream(form, with_first(first, answers), count, readings, usage)
        return EventSourceResponse(events, ping=KEEP_ALIVE_S, sep="\n")
    pieces: list[list[Piece]] = [[] for _ in requests]
    async for index, piece in with_first(first, answers):
        if piece.error is not None:
            raise Refused(500, str(piece.error), kind="server_error")
        pieces[index].append(piece)
    choices = [choice(index, chat, its, readings[index]) for index, its in enumerate(pieces)]
    return form.whole(choices, usage_of(count, [piece for its in pieces for piece in its]))


def _prompts(served: Served, prompt: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
    if isinstance(prompt, str):
        return [served.text_ids(prompt)]
    if not prompt:
        raise Refused(400, "the prompt is empty", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return [served.text_ids(each) if isinstance(each, str) else each for each in prompt]
