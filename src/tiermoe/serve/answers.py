"""Answers to an HTTP request, whole or as a stream, cancelled if the client leaves; log probabilities of tokens."""

from __future__ import annotations

import asyncio
import json
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from fastapi import Request as HttpRequest
from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from tiermoe.engine.detokenize import token_bytes, token_text
from tiermoe.engine.request import Piece, Request, TokenLogprob
from tiermoe.engine.request_loop import TooLongError
from tiermoe.errors import PromptError, TiermoeError
from tiermoe.serve.dialects import KEEP_ALIVE_S, TOO_LONG, Json, Refused, StreamKind
from tiermoe.serve.grammar import Compiling
from tiermoe.serve.guards import until_left
from tiermoe.serve.worker import Answers, ClosingError, QueueFullError, Worker

ANSWERS: dict[int | str, Json] = {
    200: {"description": "The answer, whole or as a stream", "content": {"text/event-stream": {}}}
}
"""Documentation of an endpoint that can stream."""


async def submitted(worker: Worker, requests: Sequence[Request], grammar: Compiling | None) -> Answers:
    """Submits requests and returns their answers. grammar: compiles the grammar of the answers. Refused if one
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
    return Refused(status, str(error))


async def whole(http: HttpRequest, answers: Answers, add: Callable[[int, Piece], object]) -> None:
    """Passes all pieces to `add`. Refused if computing fails, or the client leaves."""
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
    await until_left(http.receive)
    answers.cancel()


class Growing(Protocol):
    """An answer while it grows, in a dialect whose events have types."""

    def begin(self) -> Iterable[Json]: ...

    def add(self, piece: Piece) -> Iterable[Json]:
        """Events of a piece; that of an error is the last."""


async def events_of(growing: Growing, pieces: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[dict[str, str]]:
    for event in growing.begin():
        yield _sent(event)
    async for _, piece in pieces:
        for event in growing.add(piece):
            yield _sent(event)


def _sent(event: Json) -> dict[str, str]:
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


# --- log probabilities ---


class Logprobs:
    """Log probabilities in the shape of an endpoint, with tokens as text."""

    def __init__(self, tokenizer: Any, chat: bool) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._bytes: dict[int, bytes] = {}
        self._text = getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters of the text so far

    def of(self, tokens: Sequence[TokenLogprob]) -> Json | None:
        """None if the request has none."""
        if not tokens:
            return None
        return {"content": [self._chat_entry(each) for each in tokens]} if self._chat else self._completion(tokens)

    def _chat_entry(self, each: TokenLogprob) -> Json:
        return self._named(each.token, each.logprob) | {"top_logprobs": [self._named(*pair) for pair in each.top]}

    def _completion(self, tokens: Sequence[TokenLogprob]) -> Json:
        offsets = []
        for each in tokens:
            offsets.append(self._offset)
            self._offset += len(self._text.decode(self._bytes_of(each.token)))
        return {
            "tokens": [token_text(self._bytes_of(each.token)) for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [self._top(each) for each in tokens],
            "text_offset": offsets,
        }

    def _top(self, each: TokenLogprob) -> dict[str, float] | None:
        if each.logprob is None:
            return None
        found: dict[str, float] = {}
        for token, value in each.top:
            found.setdefault(token_text(self._bytes_of(token)), value)  # of tokens that read alike, the likeliest
        return found

    def _named(self, token: int, value: float | None) -> Json:
        data = self._bytes_of(token)
        return {"token": token_text(data), "logprob": value, "bytes": list(data)}

    def _bytes_of(self, token: int) -> bytes:
        if token not in self._bytes:
            self._bytes[token] = token_bytes(self._tokenizer, token)
        return self._bytes[token]
