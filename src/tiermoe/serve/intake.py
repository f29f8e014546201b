"""Intake: memory of requests in flight (bodies, parsed values, token ids), bounded and part of the memory plan.

A body is bounded before it is parsed, by the memory that it may become: Python's parser holds the interpreter, and
every request waits for it. Templates and the tokenizer run in threads of their own.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from tiermoe.serve.dialects import Refused

_P = ParamSpec("_P")
_T = TypeVar("_T")

_LEAST = 16 << 20  # bytes for requests in flight, in addition to those for each token of the context
_TOKEN_OF_CONTEXT = 1 << 10  # bytes for each token of the context
_SHARES = 8  # how many of the largest requests fit
_TEXT = 8  # bytes for each byte of a body: it, its texts and what a template makes of them, some at 4 a character
_VALUE = 96  # bytes for each value of a body: half a dict with one entry
_BEGIN_VALUES = (b",", b":", b"[", b"{")
_TOKEN = 44  # bytes of a token id in a list
_SMALL = 8 << 10  # bytes of a body that waits for no larger one
_SMALL_AT_ONCE = 2
_TEXT_BEGUN = 16 << 10  # bytes of text that are always tokenized, however small the context
_TEXT_OF_TOKEN = 12  # bytes; a token has 4 in most texts
_TOKENIZING = 240  # bytes for each byte of text while the tokenizer is at it: 75 to 230 measured


def longest_text(context: int) -> int:
    """Most bytes of a text that is tokenized; a longer one has more than `context` tokens in all likelihood."""
    return _TEXT_BEGUN + _TEXT_OF_TOKEN * context


def intake_bytes(context: int) -> int:
    """Most bytes of all requests in flight, where each has up to `context` tokens."""
    return _LEAST + _TOKEN_OF_CONTEXT * context


def requests_bytes(context: int) -> int:
    """`intake_bytes` and the memory of tokenizing: one large text and small ones."""
    small = _SMALL_AT_ONCE * 2 * _SMALL  # a template may make twice as much of them
    return intake_bytes(context) + _TOKENIZING * (longest_text(context) + small)


def values_of(body: bytes, most: int) -> int:
    """Number of values in a JSON text without the outermost: characters outside of strings that may begin one. If
    there are more than `most` strings, the number of strings."""
    body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if (quotes := body.count(b'"')) > 2 * most:
        return quotes // 2
    outside = b"".join(body.split(b'"')[::2])
    return sum(map(outside.count, _BEGIN_VALUES))


class Intake:
    """Memory of all requests in flight, and the threads that prepare them.

    context: most tokens of a request. on_refusal: called for each request that finds too little memory."""

    def __init__(self, context: int, on_refusal: Callable[[], None]) -> None:
        self.most = intake_bytes(context)  # bytes of all requests
        self.largest = self.most // _SHARES  # bytes of one request
        self.largest_body = self.largest // _TEXT  # bytes of one body
        self.nbytes = 0  # bytes of all requests now
        self.turn = asyncio.Lock()  # of large bodies, to be parsed one after the other
        self._on_refusal = on_refusal
        self._lock = threading.Lock()
        # threads of their own, so that the memory kept by each one's allocator is bounded
        self.small = ThreadPoolExecutor(_SMALL_AT_ONCE, "tiermoe-small")
        self.large = ThreadPoolExecutor(1, "tiermoe-large")

    def add(self, nbytes: int) -> None:
        """Takes bytes for a request. Refused with 503 if there is no room for them."""
        with self._lock:
            if self.nbytes + nbytes <= self.most:
                self.nbytes += nbytes
                return
        self._on_refusal()
        raise Refused(503, f"requests in flight hold {self.nbytes:,} of {self.most:,} bytes; ask again later")

    def remove(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes -= nbytes


class Share:
    """Share of one request in the intake, until it is answered (`with`)."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._body = 0  # bytes of the body that have come
        self._nbytes = 0  # bytes of the intake

    @property
    def threads(self) -> ThreadPoolExecutor:
        return self._intake.small if self._small else self._intake.large

    @property
    def _small(self) -> bool:
        return self._body <= _SMALL

    def __enter__(self) -> Share:
        self._before = _CURRENT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._before)
        self._intake.remove(self._nbytes)

    def hold_part(self, part: bytes) -> None:
        """Adds a part of the body. Refused with 413 or 503 if it is too much."""
        self._body += len(part)
        if self._body > self._intake.largest_body:
            raise too_large(self._intake.largest_body)
        self.take(len(part))

    async def hold_values(self, body: bytes) -> None:
        """Adds the values of the whole body, which is parsed next; a large one in its own round of the event loop, so
        that other requests come between two of them. Refused with 413 or 503 if they would be too much."""
        values = values_of(body, self._intake.largest // _VALUE)
        self.take((_TEXT - 1) * len(body) + _VALUE * values)
        if not self._small:
            async with self._intake.turn:
                await asyncio.sleep(0)

    def take(self, nbytes: int) -> None:
        """Adds bytes of the request. Refused with 413 or 503 if they are too many."""
        most = self._intake.largest
        if self._nbytes + nbytes > most:
            raise Refused(413, f"the request would take {self._nbytes + nbytes:,} bytes of memory, {most:,} at most")
        self._intake.add(nbytes)
        self._nbytes += nbytes


_CURRENT: contextvars.ContextVar[Share] = contextvars.ContextVar("share")


async def aside(work: Callable[_P, _T], *args: _P.args, **named: _P.kwargs) -> _T:
    """Result of `work`, which runs in a thread for the current request: templates and tokenizers take long. Large
    requests run one after the other, and small ones wait for none of them."""
    run = partial(contextvars.copy_context().run, work, *args, **named)
    return await asyncio.get_running_loop().run_in_executor(_CURRENT.get().threads, run)


def hold_tokens(count: int) -> None:
    """Adds token ids to the current request's share, if there is one. Refused with 413 or 503 if they are too
    many."""
    if (share := _CURRENT.get(None)) is not None:
        share.take(_TOKEN * count)


def too_large(most: int) -> Refused:
    return Refused(413, f"the body has more than {most:,} bytes")
