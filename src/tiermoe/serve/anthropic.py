"""Anthropic's dialect: `/v1/messages`, whole and as a stream, and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from tiermoe.serve.answers import ANSWERS, Stream, failure, submitted, whole
from tiermoe.serve.anthropic_events import Growing
from tiermoe.serve.anthropic_fields import CountRequest, MessagesRequest
from tiermoe.serve.chats import Chat, Prepared, prepare
from tiermoe.serve.errors import Refused
from tiermoe.serve.fields import check_fields
from tiermoe.serve.intake import aside
from tiermoe.serve.request import Piece, Request
from tiermoe.serve.served import Served

PATH = "/v1/messages"
_KINDS = {
    400: "invalid_request_error",
    405: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def error_body(error: Refused) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    message = f"{error.param}: {error}" if error.param and error.param not in str(error) else str(error)
    return {"type": "error", "error": {"type": _KINDS.get(error.status, "api_error"), "message": message}}


def routes(app: FastAPI, served: Served) -> None:
    """Adds the endpoints."""

    @app.post(PATH, response_model=None, responses=ANSWERS)
    async def messages(asked: MessagesRequest, http: HttpRequest) -> Response | dict[str, Any]:
        prepared = await _prepared(served, asked)
        answers = await submitted(served.worker, [_request(served, asked, prepared)], prepared.grammar)
        growing = Growing(served.name, prepared.reader(), len(prepared.ids))
        if asked.stream:
            return Stream(answers, _stream(growing, answers))
        await whole(http, answers, lambda _, piece: list(growing.add(piece)))
        return growing.message

    @app.post(f"{PATH}/count_tokens")
    async def count_tokens(asked: CountRequest) -> dict[str, int]:
        return {"input_tokens": len((await _prepared(served, asked)).ids)}


async def _prepared(served: Served, asked: CountRequest) -> Prepared:
    check_fields(asked)
    served.check_model(asked.model)
    chat = Chat(asked.plain, asked.functions, asked.choice, asked.answer_schema, asked.told, asked.parallel)
    return await aside(prepare, served, chat)


def _request(served: Served, asked: MessagesRequest, prepared: Prepared) -> Request:
    values = {name: getattr(asked, name) for name in ("temperature", "top_p", "top_k")}
    named = {name: value for name, value in values.items() if value is not None}
    sampling = replace(served.sampling, max_tokens=asked.max_tokens, **named)
    stops = (*(asked.stop_sequences or ()), *prepared.stops)
    return Request(prepared.ids, sampling, stops, special=prepared.special)


async def _stream(growing: Growing, pieces: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[dict[str, str]]:
    for event in growing.begin():
        yield _sent(event)
    async for _, piece in pieces:
        if piece.error is not None:
            yield _sent(error_body(failure(piece.error)))
            return
        for event in growing.add(piece):
            yield _sent(event)


def _sent(event: dict[str, Any]) -> dict[str, str]:
    return {"event": event["type"], "data": json.dumps(event)}
