"""What OpenAI's endpoints answer: completions and chat completions, whole and as streams of events."""

from __future__ import annotations

import json
import time
import uuid
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiermoe.serve.answers import failure
from tiermoe.serve.detokenize import token_bytes, token_text
from tiermoe.serve.errors import Refused
from tiermoe.serve.reading import Reader
from tiermoe.serve.request import Piece, TokenLogprob
from tiermoe.serve.tools import ToolCall


def error_body(error: Refused) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


@dataclass(slots=True)
class Shape:
    """What differs between the two endpoints' answers."""

    id: str
    model: str
    chat: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return self._object(choices, "chat.completion" if self.chat else "text_completion") | {"usage": usage}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return json.dumps(self._object(choices, "chat.completion.chunk" if self.chat else "text_completion") | more)

    def _object(self, choices: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def shape_of(model: str, chat: bool) -> Shape:
    return Shape(("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex, model, chat)


def usage_of(prompt: int, pieces: Sequence[Piece], readings: Iterable[Reading]) -> dict[str, Any]:
    """prompt: tokens of it. pieces, readings: of all choices."""
    made = sum(len(piece.tokens) for piece in pieces)
    cached = max((piece.cached for piece in pieces), default=0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": sum(each.reader.thought_tokens for each in readings)},
    }


class Logprobs:
    """Log probabilities in the shape of an endpoint. tokenizer: names the tokens."""

    def __init__(self, tokenizer: Any, chat: bool) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._bytes: dict[int, bytes] = {}
        self._text = getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters of the text so far

    def of(self, told: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """None where none were asked for."""
        if not told:
            return None
        return {"content": [self._chat_entry(each) for each in told]} if self._chat else self._completion(told)

    def _chat_entry(self, each: TokenLogprob) -> dict[str, Any]:
        return self._named(each.token, each.logprob) | {"top_logprobs": [self._named(*pair) for pair in each.top]}

    def _completion(self, told: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for each in told:
            offsets.append(self._offset)
            self._offset += len(self._text.decode(self._bytes_of(each.token)))
        return {
            "tokens": [token_text(self._bytes_of(each.token)) for each in told],
            "token_logprobs": [each.logprob for each in told],
            "top_logprobs": [self._top(each) for each in told],
            "text_offset": offsets,
        }

    def _top(self, each: TokenLogprob) -> dict[str, float] | None:
        if each.logprob is None:
            return None
        found: dict[str, float] = {}
        for token, value in each.top:
            found.setdefault(token_text(self._bytes_of(token)), value)  # of tokens that read alike, the likeliest
        return found

    def _named(self, token: int, value: float | None) -> dict[str, Any]:
        its = self._bytes_of(token)
        return {"token": token_text(its), "logprob": value, "bytes": list(its)}

    def _bytes_of(self, token: int) -> bytes:
        if token not in self._bytes:
            self._bytes[token] = token_bytes(self._tokenizer, token)
        return self._bytes[token]


@dataclass(slots=True)
class Reading:
    """One choice, as its pieces come. echo: the prompt's text, where it is told before the answer's."""

    logprobs: Logprobs
    reader: Reader
    echo: str = ""
    _calls: int = 0

    def add(self, piece: Piece) -> tuple[dict[str, Any], str | None]:
        """What a piece says (reasoning_content, content, tool_calls, where there is any), and the reason of the end."""
        said = self.reader.add(piece)
        calls = [_call(call, self._calls + index) for index, call in enumerate(said.calls)]
        self._calls += len(calls)
        text, self.echo = self.echo + said.text, ""
        parts = {"reasoning_content": said.thought, "content": text, "tool_calls": calls}
        return {name: part for name, part in parts.items() if part}, said.finish


def _call(call: ToolCall, index: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": index, "id": call.id, "type": "function", "function": function}


def choice(index: int, chat: bool, pieces: Sequence[Piece], reading: Reading) -> dict[str, Any]:
    """A whole choice."""
    read = [reading.add(piece) for piece in pieces]
    text, thought = ("".join(said.get(name, "") for said, _ in read) for name in ("content", "reasoning_content"))
    told = reading.logprobs.of([each for piece in pieces for each in (*piece.prompt, *piece.logprobs)])
    end = {"logprobs": told, "finish_reason": read[-1][1]}
    if not chat:
        return {"index": index, "text": text} | end
    calls = [call for said, _ in read for call in said.get("tool_calls", ())]
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
    return {"index": index, "message": message} | end


async def stream(
    shape: Shape,
    answers: AsyncIterator[tuple[int, Piece]],
    prompt: int,
    readings: Mapping[int, Reading],
    include_usage: bool,
) -> AsyncIterator[str]:
    """The data of a stream's events: the role, thoughts and text as they come, whole calls, the reason of each end,
    usage, `[DONE]`."""
    pieces: list[Piece] = []
    more: dict[str, Any] = {"usage": None} if include_usage else {}

    def chunk(index: int, said: dict[str, Any], told: Any = None, finish: str | None = None) -> str:
        return shape.chunk([{"index": index, **said, "logprobs": told, "finish_reason": finish}], **more)

    if shape.chat:
        for index in readings:
            yield chunk(index, {"delta": {"role": "assistant", "content": ""}})
    async for index, piece in answers:
        pieces.append(piece)
        if piece.error is not None:
            yield json.dumps(error_body(failure(piece.error)))
            return
        told = readings[index].logprobs.of((*piece.prompt, *piece.logprobs))
        said, finish = readings[index].add(piece)
        if said or told:
            yield chunk(index, {"delta": said} if shape.chat else {"text": said.get("content", "")}, told)
        if finish is not None:
            yield chunk(index, {"delta": {}} if shape.chat else {"text": ""}, finish=finish)
    if include_usage:
        yield shape.chunk([], usage=usage_of(prompt, pieces, readings.values()))
    yield "[DONE]"
