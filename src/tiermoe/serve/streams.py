"""Streams as bytes: what one sends while it has nothing to say, and where its answer fails. No torch is imported for
it: the router has none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from tiermoe.serve import ollama_api

KEEP_ALIVE_S = 5
"""Seconds between signs of life in a stream that has nothing to send."""


@dataclass(frozen=True, slots=True)
class StreamKind:
    """A kind of stream."""

    media_type: str
    waiting: Callable[[str], bytes]  # a sign of life, with what is waited for, in words, where the kind can say it
    error: Callable[[bytes], bytes]  # the end, of an error's JSON


EVENTS = StreamKind(
    "text/event-stream",
    lambda doing: f": {doing}\n\n".encode(),
    lambda error: b"event: error\ndata: " + error + b"\n\n",
)
"""Server-sent events, with comments."""


def lines(model: str, chat: bool) -> StreamKind:
    """Ollama's JSON lines, of `/api/chat` or `/api/generate`: there are no comments, but objects without a text."""
    return StreamKind(
        ollama_api.LINES,
        lambda _: json.dumps(ollama_api.reply(model, chat)).encode() + b"\n",
        lambda error: error + b"\n",
    )
