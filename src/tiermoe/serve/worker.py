"""The thread that runs the batch, and the asynchronous side of it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tiermoe.errors import TiermoeError
from tiermoe.serve.batcher import Batcher
from tiermoe.serve.request import Piece, Request


class QueueFullError(TiermoeError):
    """More requests wait than the queue holds."""


class ClosingError(TiermoeError):
    """The server is about to end."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one answer: until its first token, and between each two after that."""

    first: float
    between: list[float]


class Answer:
    """The pieces of an answer as they come, for the event loop that asked. Who closes it drops the request: `drop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, drop: Callable[[], None]) -> None:
        self.asked_at = self.last_at = time.perf_counter()
        self.first: float | None = None
        self.between: list[float] = []
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()
        self._ended = False
        self._loop = loop
        self._drop = drop

    def put(self, piece: Piece) -> None:
        """From any thread."""
        now = time.perf_counter()
        if self.first is None:
            self.first = now - self.asked_at
        else:
            self.between.append(now - self.last_at)
        self.last_at = now
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Piece:
        if self._ended:
            raise StopAsyncIteration
        piece = await self._pieces.get()
        self._ended = piece.finish is not None
        return piece

    async def aclose(self) -> None:
        """Drops the request; nothing where it has ended."""
        if not self._ended:
            self._ended = True
            self._drop()


class Worker:
    """Runs a `Batcher` in a thread of its own. most_waiting: requests that may wait for a row. on_end: told of each
    answer that ended by itself."""

    def __init__(self, batcher: Batcher, most_waiting: int, on_end: Callable[[Piece, Times], None]) -> None:
        self.batcher = batcher
        self.most_waiting = most_waiting
        self._on_end = on_end
        self._answers: dict[int, Answer] = {}
        self._orders: deque[Callable[[], None]] = deque()
        self._queued = 0  # asked for, and not yet handed to the batcher
        self._closing = False
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tiermoe-batch", daemon=True)
        self._thread.start()

    def answer(self, request: Request) -> Answer:
        """The answer to a request, which waits for its turn from now on. PromptError for a prompt that cannot be
        answered, QueueFullError, ClosingError."""
        self.batcher.check(request)
        numbers: list[int] = []

        def drop() -> None:
            with self._changed:
                self._order(lambda: self._drop(numbers))

        answer = Answer(asyncio.get_running_loop(), drop)

        def begin() -> None:
            self._queued -= 1
            number = self.batcher.add(request)
            numbers.append(number)
            self._answers[number] = answer

        with self._changed:
            self._check_open()
            self._queued += 1
            self._order(begin)
        return answer

    def _check_open(self) -> None:
        waiting = self.batcher.waiting + self._queued
        if not self._closing and waiting < self.most_waiting:
            return
        self.batcher.counts.refused += 1
        if self._closing:
            raise ClosingError("the server is about to end")
        raise QueueFullError(f"{waiting} requests wait already; ask again later, or raise --max-queue")

    @property
    def busy(self) -> bool:
        with self._changed:
            return bool(self._orders) or not self.batcher.idle

    def close(self, grace_s: float) -> None:
        """Takes no more requests, gives those that run so many seconds, tells the rest that the server ends, and ends
        the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._orders and self.batcher.idle, grace_s)
            self._ended = True
            self._changed.notify_all()
        self._thread.join()
        while self._orders:
            self._orders.popleft()()
        for number in list(self._answers):
            with contextlib.suppress(RuntimeError):  # the loop that asked has ended before us
                self._hand_on(Piece(number, finish="error", error=ClosingError("the server has ended")))

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._changed.notify_all()

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            self.batcher.cancel(number)
            self._answers.pop(number, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._orders or not self.batcher.idle)
                if self._ended:
                    return
                while self._orders:
                    self._orders.popleft()()
            for piece in self.batcher.step():
                self._hand_on(piece)
            with self._changed:
                self._changed.notify_all()

    def _hand_on(self, piece: Piece) -> None:
        answer = self._answers.get(piece.number)
        if answer is None:
            return
        answer.put(piece)
        if piece.finish is not None:
            del self._answers[piece.number]
            self._on_end(piece, Times(answer.first or 0.0, answer.between))
