"""The thread that runs the batch, and the asynchronous side of it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
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


class _Stream:
    """Where a request's pieces go: a queue of the event loop that asked."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.pieces: asyncio.Queue[Piece] = asyncio.Queue()
        self.asked_at = self.last_at = time.perf_counter()
        self.first: float | None = None
        self.between: list[float] = []
        self._loop = loop

    def put(self, piece: Piece) -> None:
        now = time.perf_counter()
        if self.first is None:
            self.first = now - self.asked_at
        else:
            self.between.append(now - self.last_at)
        self.last_at = now
        self._loop.call_soon_threadsafe(self.pieces.put_nowait, piece)


class Worker:
    """Runs a `Batcher` in a thread of its own. most_waiting: requests that may wait for a row. on_end: told of each
    answer that ended by itself."""

    def __init__(self, batcher: Batcher, most_waiting: int, on_end: Callable[[Piece, Times], None]) -> None:
        self.batcher = batcher
        self.most_waiting = most_waiting
        self._on_end = on_end
        self._streams: dict[int, _Stream] = {}
        self._orders: deque[Callable[[], None]] = deque()
        self._queued = 0  # asked for, and not yet handed to the batcher
        self._closing = False
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tiermoe-batch", daemon=True)
        self._thread.start()

    async def answer(self, request: Request) -> AsyncGenerator[Piece]:
        """The pieces of an answer. PromptError for a prompt that cannot be answered, QueueFullError, ClosingError. Who
        stops iterating drops the request."""
        self.batcher.check(request)
        stream = _Stream(asyncio.get_running_loop())
        numbers: list[int] = []
        with self._changed:
            self._check_open()
            self._queued += 1

            def begin() -> None:
                self._queued -= 1
                number = self.batcher.add(request)
                numbers.append(number)
                self._streams[number] = stream

            self._order(begin)
        try:
            while True:
                piece = await stream.pieces.get()
                yield piece
                if piece.finish is not None:
                    return
        finally:
            with self._changed:
                self._order(lambda: self._drop(numbers))

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
        for number in list(self._streams):
            with contextlib.suppress(RuntimeError):  # the loop that asked has ended before us
                self._hand_on(Piece(number, finish="error", error=ClosingError("the server has ended")))

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._changed.notify_all()

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            self.batcher.cancel(number)
            self._streams.pop(number, None)

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
        stream = self._streams.get(piece.number)
        if stream is None:
            return
        stream.put(piece)
        if piece.finish is not None:
            del self._streams[piece.number]
            self._on_end(piece, Times(stream.first or 0.0, stream.between))
