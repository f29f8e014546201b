"""Dialects, as every process of a server knows them, the router too, which has no torch: JSON, refusals in
their shapes, how a stream is kept alive, and the names of Ollama's API."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pydantic_core

Json = dict[str, Any]
"""A JSON object."""
RETRY_S = 5
"""Seconds after which a client may ask again."""
TOO_LONG = "context_length_exceeded"
"""Code of a prompt that is too long, by which agents know that they must shorten it."""
KEEP_ALIVE_S = 5
"""Seconds between signs of life in a stream that has nothing to send."""
MESSAGES = "/v1/messages"
"""Anthropic's path, and the beginning of the others of the dialect."""
OLLAMA = "/api/"
"""Beginning of Ollama's paths."""
OLLAMA_CHAT, OLLAMA_GENERATE = f"{OLLAMA}chat", f"{OLLAMA}generate"
"""Paths of answers, which are streams unless `stream` is false."""
OLLAMA_VERSION = "0.12.11"
"""The Ollama whose API this is: the first with log probabilities. Clients ask for a least version (VS Code 0.6.4)."""
OLLAMA_LINES = "application/x-ndjson"
"""Type of a stream of Ollama's."""
LATEST = ":latest"
"""The tag that Ollama's clients add to a name without one."""


def from_json(text: bytes | str) -> Any:
    """Value of a JSON text, without NaN and half surrogate pairs. ValueError if it is no such text, or nested deeper
    than 200 levels."""
    return pydantic_core.from_json(text, allow_inf_nan=False, cache_strings="keys")


# --- refusals ---


class Refused(Exception):
    """A request that cannot be answered. status: HTTP's. param: the field that is the cause. kind, code: OpenAI's; the
    kind follows from the status where none is given."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        kind: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")


_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    405: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def openai_error(error: Refused) -> Json:
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


def anthropic_error(error: Refused) -> Json:
    message = f"{error.param}: {error}" if error.param and error.param not in str(error) else str(error)
    return {"type": "error", "error": {"type": _ANTHROPIC_KINDS.get(error.status, "api_error"), "message": message}}


def ollama_error(error: Refused) -> Json:
    return {"error": str(error)}


def error_body(path: str, error: Refused) -> Json:
    """An error in the shape of the dialect that the path speaks."""
    if path.startswith(MESSAGES):
        return anthropic_error(error)
    return ollama_error(error) if path.startswith(OLLAMA) else openai_error(error)


def retry_after(error: Refused) -> dict[str, str]:
    """Headers of a refusal."""
    return {"Retry-After": str(RETRY_S)} if error.status == 503 else {}


# --- models ---


def listed(name: str, created: int, context: int, **more: Any) -> Json:
    """A model in OpenAI's list and in Anthropic's. created: seconds since the epoch. context: most tokens."""
    openai = {"id": name, "object": "model", "created": created, "owned_by": "tiermoe", "max_model_len": context}
    since = datetime.fromtimestamp(created, UTC).isoformat()
    return {**openai, **more, "type": "model", "display_name": name, "created_at": since}


def model_list(models: Sequence[Json]) -> Json:
    """The list of `listed` models."""
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}
    return {"object": "list", "data": models, **ends}


# --- streams ---


@dataclass(frozen=True, slots=True)
class StreamKind:
    """A kind of stream."""

    media_type: str
    waiting: Callable[[str], bytes]  # a sign of life, with what is waited for, in words, if the kind can say it
    error: Callable[[bytes], bytes]  # the end, of an error's JSON


EVENTS = StreamKind(
    "text/event-stream",
    lambda doing: f": {doing}\n\n".encode(),
    lambda error: b"event: error\ndata: " + error + b"\n\n",
)
"""Server-sent events, with comments."""


def ollama_lines(model: str, chat: bool) -> StreamKind:
    """Ollama's JSON lines, of `/api/chat` or `/api/generate`: there are no comments, but objects without a text."""
    return StreamKind(
        OLLAMA_LINES, lambda _: json.dumps(ollama_reply(model, chat)).encode() + b"\n", lambda error: error + b"\n"
    )


def ollama_reply(model: str, chat: bool, text: str = "", thought: str = "") -> Json:
    """An object of a stream that goes on. model: its name. chat: of `/api/chat`, else of `/api/generate`."""
    found: Json = {"model": model, "created_at": datetime.now(UTC).isoformat(), "done": False}
    thinking = {"thinking": thought} if thought else {}
    if chat:
        return found | {"message": {"role": "assistant", "content": text, **thinking}}
    return found | {"response": text, **thinking}
