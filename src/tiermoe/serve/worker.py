"""Worker: the thread that runs the request loop, and the asynchronous answers of it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tiermoe.engine.request import Piece, Request
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.errors import TiermoeError

STALLED_S = 60
"""Seconds without progress after which the loop is taken for dead; a layer of a prompt's chunk takes a few at most."""


class QueueFullError(TiermoeError):
    """More requests wait than the queue holds."""


class ClosingError(TiermoeError):
    """The server is about to end."""


@dataclass(slots=True)
class Times:
    """Latencies of one answer, in seconds."""

    first: float = 0.0  # from the request to the first piece
    between: list[float] = field(default_factory=list)  # between each two pieces after it


class Answers:
    """Pieces of the answers to requests that were submitted together, as (index of the request, piece), for the event
    loop that submitted them. The iteration stops once every answer has ended, or all are cancelled."""

    def __init__(self, count: int, cancel: Callable[[], None]) -> None:
        self._pieces: deque[tuple[int, Piece]] = deque()
        self._came = asyncio.Event()
        self._open = set(range(count))
        self._loop = asyncio.get_running_loop()
        self._cancel = cancel

    def put(self, index: int, piece: Piece) -> None:
        """Adds a piece, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended before its answers
            self._loop.call_soon_threadsafe(self._add, index, piece)

    def _add(self, index: int, piece: Piece) -> None:
        self._pieces.append((index, piece))
        self._came.set()

    def cancel(self) -> None:
        """Drops the requests that have not ended, before the next step of the loop. It waits for nothing."""
        if self._open:
            self._open.clear()
            self._came.set()
            self._cancel()

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> tuple[int, Piece]:
        while self._open and not self._pieces:
            self._came.clear()
            await self._came.wait()
        if not self._open:
            raise StopAsyncIteration
        index, piece = self._pieces.popleft()
        if piece.finish is not None:
            self._open.discard(index)
        return index, piece


class _Answer:
    """Receiver of one request's pieces, which measures their times."""

    def __init__(self, answers: Answers, index: int) -> None:
        self._answers = answers
        self._index = index
        self._asked_at = time.perf_counter()
        self._last_at: float | None = None
        self.times = Times()

    def put(self, piece: Piece) -> None:
        now = time.perf_counter()
        if piece.read is None:
            if self._last_at is None:
                self.times.first = now - self._asked_at
            else:
                self.times.between.append(now - self._last_at)
            self._last_at = now
        self._answers.put(self._index, piece)


class Worker:
    """Runs a `RequestLoop` in a thread of its own.

    most_waiting: requests that may wait for a row. on_end: called for each answer that was not cancelled."""

    def __init__(self, loop: RequestLoop, most_waiting: int, on_end: Callable[[Piece, Times], None]) -> None:
        self.loop = loop
        self.most_waiting = most_waiting
        self._on_end = on_end
        self._answers: dict[int, _Answer] = {}
        self._orders: deque[Callable[[], None]] = deque()
        self._queued = 0  # requests that were submitted and are not yet in the loop
        self._step_at: float | None = None  # when the current step began
        self._seen: tuple[object, float] = None, 0.0  # the last progress that was seen, and since when
        self._closing = False
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tiermoe-batch", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> Answers:
        """Queues all of the requests or none, and returns their answers. PromptError for a prompt that cannot be
        answered, QueueFullError, ClosingError."""
        for request in requests:
            self.loop.check(request)
        numbers: list[int] = []
        answers = Answers(len(requests), lambda: self._order(lambda: self._drop(numbers)))
        each = [_Answer(answers, index) for index in range(len(requests))]

        def begin() -> None:
            self._queued -= len(requests)
            for request, answer in zip(requests, each, strict=True):
                number = self.loop.add(request)
                numbers.append(number)
                self._answers[number] = answer

        with self._changed:
            self._check_open(len(requests))
            self._queued += len(requests)
            self._order(begin)
        return answers

    @property
    def waiting(self) -> int:
        """Requests without a row, including those that enter the loop after the current step."""
        return len(self.loop.scheduler.waiting) + self._queued

    def _check_open(self, count: int) -> None:
        waiting = self.waiting
        if not self._closing and waiting + count <= self.most_waiting:
            return
        self.loop.counts.refused += count
        if self._closing:
            raise ClosingError("the server is about to end")
        raise QueueFullError(f"{waiting} requests wait already; ask again later, or raise --max-queue")

    @property
    def busy(self) -> bool:
        with self._changed:
            return bool(self._orders) or not self.loop.scheduler.idle

    def stalled_s(self) -> float:
        """Seconds for which the loop has had work and made no progress, neither to the next step nor within the current
        one (a chunk of a long prompt may take minutes), counted from the first call that found it so."""
        began, now = self._step_at, time.monotonic()
        at = began, self.loop.progress
        if began is None or at != self._seen[0]:
            self._seen = at, now
        return now - self._seen[1]

    def close(self, grace_s: float) -> None:
        """Takes no more requests, gives those that run `grace_s` seconds, ends the rest with ClosingError, and ends the
        thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._orders and self.loop.scheduler.idle, grace_s)
            self._ended = True
            self._changed.notify_all()
        self._thread.join()
        while self._orders:
            self._orders.popleft()()
        for number in list(self._answers):
            self._hand_on(Piece(number, finish="error", error=ClosingError("the server has ended")))

    def _order(self, order: Callable[[], None]) -> None:
        with self._changed:
            self._orders.append(order)
            self._changed.notify_all()

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            self.loop.cancel(number)
            self._answers.pop(number, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._orders or not self.loop.scheduler.idle)
                if self._ended:
                    return
                while self._orders:
                    self._orders.popleft()()
            self._step_at = time.monotonic()
            for piece in self.loop.step():
                self._hand_on(piece)
            self._step_at = None
            with self._changed:
                self._changed.notify_all()

    def _hand_on(self, piece: Piece) -> None:
        answer = self._answers.get(piece.number)
        if answer is None:
            return
        answer.put(piece)
        if piece.finish is not None:
            del self._answers[piece.number]
            self._on_end(piece, answer.times)
