"""OpenAI's newer dialect, `/v1/responses`: items in, items out, whole and as a stream. Nothing is kept."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from tiermoe.serve.answers import ANSWERS, Stream, submitted, whole
from tiermoe.serve.chats import Chat, Prepared, prepare
from tiermoe.serve.errors import Refused
from tiermoe.serve.fields import check_fields
from tiermoe.serve.intake import aside
from tiermoe.serve.openai_answers import Logprobs
from tiermoe.serve.request import Piece, Request
from tiermoe.serve.responses_events import Growing
from tiermoe.serve.responses_fields import ResponsesRequest
from tiermoe.serve.served import Served


def routes(app: FastAPI, served: Served) -> None:
    """Adds the endpoint."""

    @app.post("/v1/responses", response_model=None, responses=ANSWERS)
    async def responses(asked: ResponsesRequest, http: HttpRequest) -> Response | dict[str, Any]:
        check_fields(asked)
        served.check_model(asked.model)
        try:
            messages = asked.messages
        except ValueError as error:
            raise Refused(400, f"the arguments of a function call are no JSON: {error}", "input") from error
        chat = Chat(messages, asked.functions, asked.choice, asked.answer_schema, asked.told, asked.parallel)
        prepared = await aside(prepare, served, chat)
        answers = await submitted(served.worker, [_request(served, asked, prepared)], prepared.grammar)
        logprobs = Logprobs(served.tokenizer, chat=True)
        growing = Growing(_response(served, asked), prepared.reader(), logprobs, len(prepared.ids))
        if asked.stream:
            return Stream(answers, _stream(growing, answers))
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
    return Request(
        prepared.ids,
        sampling,
        prepared.stops,
        logprobs=asked.logprobs,
        special=prepared.special,
    )


def _response(served: Served, asked: ResponsesRequest) -> dict[str, Any]:
    """A response without items yet. What was asked for is told back, as OpenAI does."""
    said = asked.model_dump(
        include={"instructions", "max_output_tokens", "metadata", "temperature", "tool_choice", "top_p", "text"},
        by_alias=True,
    )
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": served.name,
        "output": [],
        "parallel_tool_calls": asked.parallel,
        "previous_response_id": None,
        "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
        "store": False,
        "tools": [{"type": "function", "strict": False, **each["function"]} for each in asked.functions],
        "truncation": "disabled",
        "usage": None,
        **said,
        "text": said["text"] or {"format": {"type": "text"}},
    }


async def _stream(growing: Growing, pieces: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[dict[str, str]]:
    for event in growing.begin():
        yield _sent(event)
    async for _, piece in pieces:
        for event in growing.add(piece):
            yield _sent(event)


def _sent(event: dict[str, Any]) -> dict[str, str]:
    return {"event": event["type"], "data": json.dumps(event)}
