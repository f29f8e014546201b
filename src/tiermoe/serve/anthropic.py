"""Anthropic's dialect: `/v1/messages`, whole and as a stream, and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import FastAPI, Response
from pydantic import BaseModel, ConfigDict, Field
from sse_starlette import EventSourceResponse

from tiermoe.errors import ConfigError
from tiermoe.generation.sampling import Sampling
from tiermoe.serve.answers import KEEP_ALIVE_S, begun, together, with_first
from tiermoe.serve.batcher import Piece, Request
from tiermoe.serve.errors import Refused
from tiermoe.serve.served import Served

PATH = "/v1/messages"
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class TextBlock(BaseModel):
    model_config = ConfigDict(extra="ignore")  # cache_control and the like change nothing here

    type: Literal["text"]
    text: str


class Message(BaseModel):
    role: Literal["user", "assistant"]
    content: str | list[TextBlock]


class CountRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str = ""
    messages: list[Message] = Field(min_length=1)
    system: str | list[TextBlock] | None = None


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)


def error_body(error: Refused) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    message = f"{error.param}: {error}" if error.param and error.param not in str(error) else str(error)
    return {"type": "error", "error": {"type": _KINDS.get(error.status, "api_error"), "message": message}}


def routes(app: FastAPI, served: Served) -> None:
    """Adds the endpoints."""

    @app.post(PATH, response_model=None)
    async def messages(asked: MessagesRequest) -> Response | dict[str, Any]:
        ids = _ids(served, asked)
        answers = together(served.worker, [Request(ids, _sampling(asked, served.sampling), _stops(asked))])
        first = await begun(answers)
        pieces = with_first(first, answers)
        said = _message(served.name, len(ids))
        if asked.stream:
            return EventSourceResponse(_stream(said, pieces), ping=KEEP_ALIVE_S, sep="\n")
        its = [piece async for _, piece in pieces]
        if its[-1].error is not None:
            raise Refused(500, str(its[-1].error), kind="server_error")
        text = "".join(piece.text for piece in its)
        return said | {"content": [{"type": "text", "text": text}]} | _end(its) | {"usage": _usage(len(ids), its)}

    @app.post(f"{PATH}/count_tokens")
    async def count_tokens(asked: CountRequest) -> dict[str, int]:
        return {"input_tokens": len(_ids(served, asked))}


def _ids(served: Served, asked: CountRequest) -> list[int]:
    served.check_model(asked.model)
    extra = asked.model_extra or {}
    if extra.get("tools"):
        raise Refused(400, "tools are not supported by this server; leave them out", "tools")
    if (extra.get("thinking") or {}).get("type") == "enabled":
        raise Refused(400, "thinking is not supported by this server; leave it out", "thinking")
    messages = [{"role": message.role, "content": _text(message.content)} for message in asked.messages]
    if asked.system:
        messages.insert(0, {"role": "system", "content": _text(asked.system)})
    return served.chat_ids(messages)


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _sampling(asked: MessagesRequest, default: Sampling) -> Sampling:
    values = {name: getattr(asked, name) for name in ("temperature", "top_p", "top_k")}
    kept = {name: getattr(default, name) if value is None else value for name, value in values.items()}
    try:
        return Sampling(max_tokens=asked.max_tokens, min_p=default.min_p, **kept)
    except ConfigError as error:
        raise Refused(400, str(error)) from error


def _stops(asked: MessagesRequest) -> tuple[str, ...]:
    return tuple(asked.stop_sequences or ())


def _message(model: str, prompt: int) -> dict[str, Any]:
    """A message without content yet."""
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(prompt, []),
    }


def _end(pieces: list[Piece]) -> dict[str, Any]:
    last = pieces[-1]
    reason = "stop_sequence" if last.stopped_by else "max_tokens" if last.finish == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": last.stopped_by}


def _usage(prompt: int, pieces: list[Piece]) -> dict[str, int]:
    cached = max((piece.cached for piece in pieces), default=0)
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": sum(len(piece.tokens) for piece in pieces),
    }


async def _stream(said: dict[str, Any], answers: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[dict[str, str]]:
    def event(kind: str, **more: Any) -> dict[str, str]:
        return {"event": kind, "data": json.dumps({"type": kind, **more})}

    prompt, pieces = said["usage"]["input_tokens"], []
    yield event("message_start", message=said)
    yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    async for _, piece in answers:
        pieces.append(piece)
        if piece.error is not None:
            yield {"event": "error", "data": json.dumps(error_body(Refused(500, str(piece.error))))}
            return
        if piece.text:
            yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece.text})
    yield event("content_block_stop", index=0)
    yield event("message_delta", delta=_end(pieces), usage=_usage(prompt, pieces))
    yield event("message_stop")
