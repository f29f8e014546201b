"""Several requests' answers as one stream of pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from tiermoe.errors import PromptError
from tiermoe.serve.batcher import Piece, Request
from tiermoe.serve.errors import Refused
from tiermoe.serve.worker import ClosingError, QueueFullError, Worker

KEEP_ALIVE_S = 15
"""Between comments in a stream that has nothing to tell."""


async def begun(answers: AsyncIterator[tuple[int, Piece]]) -> tuple[int, Piece]:
    """The first piece: what is refused is refused before a stream begins."""
    try:
        return await anext(answers)
    except PromptError as error:
        raise Refused(400, str(error), "prompt", "invalid_request_error") from error
    except (QueueFullError, ClosingError) as error:
        raise Refused(503, str(error), kind="server_error") from error


async def with_first(
    first: tuple[int, Piece], rest: AsyncIterator[tuple[int, Piece]]
) -> AsyncIterator[tuple[int, Piece]]:
    yield first
    async for each in rest:
        yield each


async def together(worker: Worker, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Piece]]:
    """The pieces of several answers as they come, each with its request's index."""
    answers = [worker.answer(request) for request in requests]
    tasks = {asyncio.ensure_future(anext(answer)): index for index, answer in enumerate(answers)}
    try:
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
