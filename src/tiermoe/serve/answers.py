"""Answers to an HTTP request, whole or as a stream; cancelled where the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from fastapi import Request as HttpRequest
from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from tiermoe.engine.request import Piece, Request
from tiermoe.engine.request_loop import TooLongError
from tiermoe.errors import PromptError, TiermoeError
from tiermoe.serve.errors import TOO_LONG, Refused
from tiermoe.serve.grammar import Compiling
from tiermoe.serve.streams import KEEP_ALIVE_S, StreamKind
from tiermoe.serve.worker import Answers, ClosingError, QueueFullError, Worker

ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, whole or as a stream", "content": {"text/event-stream": {}}}
}
"""Documentation of an endpoint that can stream."""


async def submitted(worker: Worker, requests: Sequence[Request], grammar: Compiling | None) -> Answers:
    """Submits requests and returns their answers. grammar: compiles the grammar of the answers. Refused where one
    cannot be answered."""
    if grammar is not None:
        each = await grammar(len(requests))
        requests = [replace(request, grammar=compiled) for request, compiled in zip(requests, each, strict=True)]
    try:
        return worker.submit(requests)
    except TiermoeError as error:
        raise failure(error) from error


def failure(error: BaseException) -> Refused:
    """The refusal for an error."""
    if isinstance(error, PromptError):
        code = TOO_LONG if isinstance(error, TooLongError) else None
        return Refused(400, str(error), "prompt", code=code)
    status = 503 if isinstance(error, QueueFullError | ClosingError) else 500
    return Refused(status, str(error), kind="server_error")


async def whole(http: HttpRequest, answers: Answers, add: Callable[[int, Piece], object]) -> None:
    """Passes all pieces to `add`. Refused where computing fails, or the client leaves."""
    leaving = asyncio.ensure_future(_cancelled_where_gone(http, answers))
    try:
        async for index, piece in answers:
            if piece.error is not None:
                raise failure(piece.error) from piece.error
            add(index, piece)
    finally:
        answers.cancel()
        leaving.cancel()
    if leaving.done():
        raise Refused(499, "the client has left")  # nobody reads it


async def _cancelled_where_gone(http: HttpRequest, answers: Answers) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    answers.cancel()


class Growing(Protocol):
    """An answer while it grows, in a dialect whose events have types."""

    def begin(self) -> Iterable[dict[str, Any]]: ...

    def add(self, piece: Piece) -> Iterable[dict[str, Any]]:
        """Events of a piece; that of an error is the last."""


async def events_of(growing: Growing, pieces: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[dict[str, str]]:
    for event in growing.begin():
        yield _sent(event)
    async for _, piece in pieces:
        for event in growing.add(piece):
            yield _sent(event)


def _sent(event: dict[str, Any]) -> dict[str, str]:
    return {"event": event["type"], "data": json.dumps(event)}


class Stream(EventSourceResponse):
    """Stream of events made of answers. However the response ends, even before its first event, the answers are
    cancelled then: by a call that does not wait, since a waiting task may itself be cancelled."""

    def __init__(self, answers: Answers, events: AsyncIterator[Any], **more: Any) -> None:
        super().__init__(events, ping=KEEP_ALIVE_S, sep="\n", **more)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()


class LineStream(Stream):
    """Stream of JSON lines made of answers."""

    def __init__(self, answers: Answers, lines: AsyncIterator[bytes], kind: StreamKind) -> None:
        super().__init__(answers, lines, media_type=kind.media_type, ping_message_factory=lambda: kind.waiting(""))
