"""A response while it grows: its items, and the events that tell of each change."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from itertools import count
from typing import Any

from tiermoe.serve.openai_answers import Logprobs
from tiermoe.serve.reading import Reader
from tiermoe.serve.request import Piece
from tiermoe.serve.tools import ToolCall

Event = dict[str, Any]
_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}
"""Kind of item → kind of its text."""


class Growing:
    """response: as it is answered, without output yet. prompt: its tokens."""

    def __init__(self, response: dict[str, Any], reader: Reader, logprobs: Logprobs, prompt: int) -> None:
        self.response = response
        self._reader = reader
        self._logprobs = logprobs
        self._prompt = prompt
        self._made = self._cached = 0
        self._numbers = count()
        self._open: dict[str, Any] | None = None  # the item that text goes to

    def begin(self) -> Iterator[Event]:
        yield self._whole("created")
        yield self._whole("in_progress")

    def add(self, piece: Piece) -> Iterator[Event]:
        """What a piece adds; after the last one the response is whole."""
        self._made += len(piece.tokens)
        self._cached = piece.cached
        if piece.error is not None:
            yield from self._close("incomplete")
            self.response |= {"status": "failed", "error": {"code": "server_error", "message": str(piece.error)}}
            yield self._whole("failed")
            return
        said = self._reader.add(piece)
        if said.thought:
            yield from self._text("reasoning", said.thought, [])
        if said.text or piece.logprobs:
            told = self._logprobs.of(piece.logprobs)
            yield from self._text("message", said.text, told["content"] if told else [])
        for call in said.calls:
            yield from self._call(call)
        if said.finish is not None:
            yield from self._end(said.finish)

    def _end(self, finish: str) -> Iterator[Event]:
        whole = finish != "length"
        yield from self._close("completed" if whole else "incomplete")
        if whole:
            self.response |= {"status": "completed", "completed_at": int(time.time())}
        else:
            self.response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        self.response["usage"] = self._usage()
        yield self._whole("completed" if whole else "incomplete")

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._prompt,
            "input_tokens_details": {"cached_tokens": self._cached, "cache_write_tokens": 0},
            "output_tokens": self._made,
            "output_tokens_details": {"reasoning_tokens": self._reader.thought_tokens},
            "total_tokens": self._prompt + self._made,
        }

    def _text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Text of an item of this kind, which is begun where another one is open."""
        if self._open is None or self._open["type"] != kind:
            yield from self._close("completed")
            part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
            item: dict[str, Any] = {"id": _id("rs" if kind == "reasoning" else "msg"), "type": kind}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
                item["role"] = "assistant"
            else:
                item["summary"] = []
            yield self._begun(item | {"status": "in_progress", "content": []})
            self._open = item = self.response["output"][-1]
            yield self._of_item("content_part.added", content_index=0, part=dict(part))
            item["content"].append(part)
        part = self._open["content"][0]
        part["text"] += text
        more: dict[str, Any] = {}
        if kind == "message":
            part["logprobs"] += logprobs
            more["logprobs"] = logprobs
        yield self._of_item(f"{_PARTS[kind]}.delta", content_index=0, delta=text, **more)

    def _call(self, call: ToolCall) -> Iterator[Event]:
        yield from self._close("completed")
        item = {"id": _id("fc"), "type": "function_call", "call_id": call.id, "name": call.name}
        yield self._begun(item | {"arguments": "", "status": "in_progress"})
        yield self._of_item("function_call_arguments.delta", delta=call.arguments)
        status = "completed" if call.whole else "incomplete"
        self.response["output"][-1] |= {"arguments": call.arguments, "status": status}
        yield self._of_item("function_call_arguments.done", name=call.name, arguments=call.arguments)
        yield self._done()

    def _close(self, status: str) -> Iterator[Event]:
        """Ends the item that text goes to."""
        if self._open is None:
            return
        item, self._open = self._open, None
        part = item["content"][0]
        more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
        yield self._of_item(f"{part['type']}.done", content_index=0, text=part["text"], **more)
        yield self._of_item("content_part.done", content_index=0, part=part)
        item["status"] = status
        yield self._done()

    def _begun(self, item: dict[str, Any]) -> Event:
        self.response["output"].append(item)
        at = len(self.response["output"]) - 1
        return self._event(
            "output_item.added", output_index=at, item={**item, "content": []} if "content" in item else item
        )

    def _done(self) -> Event:
        output = self.response["output"]
        return self._event("output_item.done", output_index=len(output) - 1, item=output[-1])

    def _of_item(self, kind: str, **more: Any) -> Event:
        output = self.response["output"]
        return self._event(kind, item_id=output[-1]["id"], output_index=len(output) - 1, **more)

    def _whole(self, kind: str) -> Event:
        return self._event(kind, response=self.response)

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **more}


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
