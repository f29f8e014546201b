"""A message of Anthropic's while it grows: its blocks, and the events that tell of each change."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from tiermoe.serve.reading import Reader
from tiermoe.serve.request import Piece
from tiermoe.serve.tools import ToolCall

Event = dict[str, Any]
_EMPTY = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class Growing:
    """`message` is what is answered. model: its name; prompt: tokens of the prompt."""

    def __init__(self, model: str, reader: Reader, prompt: int) -> None:
        self._reader = reader
        self._prompt = prompt
        self._made = self._cached = 0
        self.message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }
        self._open: str | None = None  # the kind of block that text goes to

    def begin(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self.message}

    def add(self, piece: Piece) -> Iterator[Event]:
        """What a piece adds; after the last one the message is whole."""
        self._made += len(piece.tokens)
        self._cached = piece.cached
        said = self._reader.add(piece)
        if said.thought:
            yield from self._text("thinking", said.thought)
        if said.text:
            yield from self._text("text", said.text)
        for call in said.calls:
            yield from self._call(call)
        if said.finish is None:
            return
        if not self.message["content"]:
            yield from self._begin("text", _EMPTY["text"])
        yield from self._close()
        stopped_by = None if said.finish == "tool_calls" else piece.stopped_by
        reason = "stop_sequence" if stopped_by else _REASONS.get(said.finish, "end_turn")
        end = {"stop_reason": reason, "stop_sequence": stopped_by}
        self.message |= end | {"usage": self._usage()}
        yield {"type": "message_delta", "delta": end, "usage": self._usage()}
        yield {"type": "message_stop"}

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open != kind:
            yield from self._begin(kind, _EMPTY[kind])
        self.message["content"][-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: ToolCall) -> Iterator[Event]:
        named = {"id": f"toolu_{call.id.removeprefix('call_')}", "name": call.name}
        yield from self._begin("tool_use", {**named, "input": {}})
        self.message["content"][-1]["input"] = call.values
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _begin(self, kind: str, empty: dict[str, Any]) -> Iterator[Event]:
        """A new block; the one that was open ends."""
        yield from self._close()
        self._open = kind
        block = {"type": kind, **empty}
        self.message["content"].append(block)
        yield self._at("content_block_start", content_block=dict(block))

    def _close(self) -> Iterator[Event]:
        if self._open is not None:
            yield self._at("content_block_stop")
        self._open = None

    def _delta(self, delta: dict[str, Any]) -> Event:
        return self._at("content_block_delta", delta=delta)

    def _at(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "index": len(self.message["content"]) - 1, **more}

    def _usage(self) -> dict[str, int]:
        return {
            "input_tokens": self._prompt - self._cached,
            "cache_read_input_tokens": self._cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._made,
        }
