"""OpenAI's newer dialect, `/v1/responses`: items out, whole and as a stream. Nothing is kept."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from tiermoe.engine.request import Piece, Request
from tiermoe.engine.sampling import Sampling
from tiermoe.serve.answers import ANSWERS, Stream, events_of, submitted, whole
from tiermoe.serve.chats import AnswerReader, Chat, Prepared, prepare
from tiermoe.serve.constraints import json_constraint
from tiermoe.serve.fields import check_fields
from tiermoe.serve.intake import aside
from tiermoe.serve.logprobs import Logprobs
from tiermoe.serve.responses_requests import ResponsesRequest
from tiermoe.serve.served import Served
from tiermoe.serve.tool_calls import CallPiece

Event = dict[str, Any]
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

    def __init__(self, response: dict[str, Any], reader: AnswerReader, logprobs: Logprobs, prompt: int) -> None:
        self.response = response
        self._reader = reader
        self._logprobs = logprobs
        self._prompt = prompt
        self._made = self._cached = 0
        self._numbers = count()
        self._open: dict[str, Any] | None = None  # the item that text goes to

    def begin(self) -> Iterator[Event]:
        yield self._whole("created")
        yield self._whole("in_progress")

    def add(self, piece: Piece) -> Iterator[Event]:
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
            yield from self._end(parsed.finish)

    def _end(self, finish: str) -> Iterator[Event]:
        whole = finish != "length"
        yield from self._close("completed" if whole else "incomplete")
        if whole:
            self.response |= {"status": "completed", "completed_at": int(time.time())}
        else:
            self.response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        self.response["usage"] = self._usage()
        yield self._whole("completed" if whole else "incomplete")

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._prompt,
            "input_tokens_details": {"cached_tokens": self._cached, "cache_write_tokens": 0},
            "output_tokens": self._made,
            "output_tokens_details": {"reasoning_tokens": self._reader.thought_tokens},
            "total_tokens": self._prompt + self._made,
        }

    def _text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Adds text to the open item, or to a new one where that is of another kind."""
        if self._open is None or self._open["type"] != kind:
            yield from self._close("completed")
            part: dict[str, Any] = {"type": _TEXT_KINDS[kind], "text": ""}
            item: dict[str, Any] = {"id": _id("rs" if kind == "reasoning" else "msg"), "type": kind}
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
        more: dict[str, Any] = {}
        if kind == "message":
            part["logprobs"] += logprobs
            more["logprobs"] = logprobs
        yield self._of_item(f"{_TEXT_KINDS[kind]}.delta", content_index=0, delta=text, **more)

    def _call(self, piece: CallPiece) -> Iterator[Event]:
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

    def _close(self, status: str) -> Iterator[Event]:
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

    def _begun(self, item: dict[str, Any]) -> Event:
        self.response["output"].append(item)
        at = len(self.response["output"]) - 1
        return self._event(
            "output_item.added", output_index=at, item={**item, "content": []} if "content" in item else item
        )

    def _done(self) -> Event:
        output = self.response["output"]
        return self._event("output_item.done", output_index=len(output) - 1, item=output[-1])

    def _of_item(self, kind: str, **more: Any) -> Event:
        output = self.response["output"]
        return self._event(kind, item_id=output[-1]["id"], output_index=len(output) - 1, **more)

    def _whole(self, kind: str) -> Event:
        return self._event(kind, response=self.response)

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **more}


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def routes(app: FastAPI, served: Served) -> None:
    """Adds the endpoint."""

    @app.post("/v1/responses", response_model=None, responses=ANSWERS)
    async def responses(asked: ResponsesRequest, http: HttpRequest) -> Response | dict[str, Any]:
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
    sampling = replace(
        served.sampling,
        max_tokens=min(asked.max_output_tokens or room, room),
        temperature=served.sampling.temperature if asked.temperature is None else asked.temperature,
        top_p=served.sampling.top_p if asked.top_p is None else asked.top_p,
    )
    return prepared.request(sampling, (), logprobs=asked.logprobs)


def _response(served: Served, asked: ResponsesRequest, sampling: Sampling) -> dict[str, Any]:
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
