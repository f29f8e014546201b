"""Several requests' answers as one stream of pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from fastapi import Request as HttpRequest

from tiermoe.errors import PromptError
from tiermoe.serve.batcher import TooLongError
from tiermoe.serve.errors import TOO_LONG, Refused
from tiermoe.serve.request import Piece, Request
from tiermoe.serve.worker import Answer, ClosingError, QueueFullError, Worker

ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, whole or as a stream", "content": {"text/event-stream": {}}}
}
"""What the documentation tells of an endpoint that streams where it is asked to."""
KEEP_ALIVE_S = 5
"""Between comments in a stream that has nothing to tell."""


_PATIENCE_S = 2  # for what may be refused, before a stream begins and keeps the connection alive


async def begun(http: HttpRequest, answers: AsyncGenerator[tuple[int, Piece]]) -> AsyncGenerator[tuple[int, Piece]]:
    """The pieces, once there is one or it takes long: what is refused is refused before a stream begins. Refused where
    the client leaves meanwhile; then the answers are dropped."""
    first = asyncio.ensure_future(anext(answers))
    gone = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait({first, gone}, timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        first.cancel()
        raise
    finally:
        gone.cancel()
    if gone.done() and not first.done():
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        raise _left()
    if first.done() and (error := first.exception()) is not None:
        raise failure(error) from error
    return _with_first(first, answers)


async def _with_first(
    first: asyncio.Future[tuple[int, Piece]], rest: AsyncGenerator[tuple[int, Piece]]
) -> AsyncGenerator[tuple[int, Piece]]:
    try:
        yield await first
        async for each in rest:
            yield each
    finally:
        await rest.aclose()


def failure(error: BaseException) -> Refused:
    """What a client is told of an error."""
    if isinstance(error, PromptError):
        code = TOO_LONG if isinstance(error, TooLongError) else None
        return Refused(400, str(error), "prompt", code=code)
    status = 503 if isinstance(error, QueueFullError | ClosingError) else 500
    return Refused(status, str(error), kind="server_error")


async def whole(
    http: HttpRequest, pieces: AsyncGenerator[tuple[int, Piece]], add: Callable[[int, Piece], object]
) -> None:
    """Gives all pieces to `add`. Refused where computing fails, or the client leaves: then the answers are dropped."""

    async def read() -> None:
        async for index, piece in pieces:
            if piece.error is not None:
                raise failure(piece.error) from piece.error
            add(index, piece)

    reading, gone = asyncio.ensure_future(read()), asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise _left()
        reading.result()
    finally:
        gone.cancel()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await pieces.aclose()


async def _gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _left() -> Refused:
    return Refused(499, "the client has left")  # nobody reads it


async def together(worker: Worker, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Piece]]:
    """The pieces of several answers as they come, each with its request's index. What is refused is so at once, however
    long the loop takes for the rest."""
    answers: list[Answer] = []
    tasks: dict[asyncio.Future[Piece], int] = {}
    try:
        for request in requests:
            answers.append(worker.answer(request))
        tasks = {asyncio.ensure_future(anext(answer)): index for index, answer in enumerate(answers)}
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: tasks[task]):
                index = tasks.pop(task)
                piece = task.result()
                if piece.finish is None:
                    tasks[asyncio.ensure_future(anext(answers[index]))] = index
                yield index, piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for answer in answers:
            await answer.aclose()
