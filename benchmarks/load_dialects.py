"""Dialects of the clients under load: the bodies of requests, and what the events of their streams mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "greet", "parameters": _SCHEMA}
_BEGINNINGS = frozenset({"message_start", "response.created", "response.in_progress"})
_ENDS = frozenset({"message_stop", "response.completed", "response.incomplete"})


@dataclass(frozen=True, slots=True)
class Dialect:
    """A way to ask: an endpoint, and what a body says beside `stream`."""

    path: str
    body: Callable[[str, int], dict[str, Any]]  # of a prompt's text and the most tokens of its answer
    tools: bool = False  # for a model with tools alone


def _chat(**more: Any) -> Callable[[str, int], dict[str, Any]]:
    def body(text: str, most: int) -> dict[str, Any]:
        return {"messages": _turn(text), "max_tokens": most, "seed": 1, **more}

    return body


def _turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


_CHATS = "/v1/chat/completions"
_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
DIALECTS = (
    Dialect("/v1/completions", lambda text, most: {"prompt": text, "max_tokens": most, "seed": 1}),
    Dialect(_CHATS, _chat()),
    Dialect(_CHATS, _chat(response_format=_FORMAT)),
    Dialect(_CHATS, _chat(tools=[{"type": "function", "function": _FUNCTION}], tool_choice="required"), tools=True),
    Dialect("/v1/responses", lambda text, most: {"input": text, "max_output_tokens": most}),
    Dialect("/v1/messages", lambda text, most: {"model": "", "messages": _turn(text), "max_tokens": most}),
    Dialect("/api/chat", lambda text, most: {"messages": _turn(text), "options": {"num_predict": most, "seed": 1}}),
    Dialect("/api/generate", lambda text, most: {"prompt": text, "options": {"num_predict": most, "seed": 1}}),
)


def request_of(dialect: Dialect, text: str, most: int, stream: bool) -> dict[str, Any]:
    """The body of a request. most: tokens of the answer."""
    usage = {"stream_options": {"include_usage": True}} if stream and "completions" in dialect.path else {}
    return {**dialect.body(text, most), "stream": stream, **usage}


def event_of(line: str) -> dict[str, Any] | None:
    """What a line of a stream says: an event's data, or an object of Ollama's. None where it says nothing; `[DONE]` of
    OpenAI's streams is {"done": true}, as Ollama has it."""
    if not line.startswith("{"):
        if not line.startswith("data:"):
            return None
        line = line.removeprefix("data:").strip()
    if line == "[DONE]":
        return {"done": True}
    event: dict[str, Any] = json.loads(line)
    said = event.get("message") or {}
    text = event.get("response") or said.get("content") or said.get("thinking") or said.get("tool_calls")
    silent = event.get("done") is False and not text
    return None if silent else event


def is_beginning(event: Mapping[str, Any]) -> bool:
    """Whether an event comes before the first token: of a chat it tells the role."""
    choices = event.get("choices")
    return event.get("type") in _BEGINNINGS or bool(choices and choices[0].get("delta", {}).get("role"))


def is_end(event: Mapping[str, Any]) -> bool:
    """Whether an event says that the answer is whole."""
    return event.get("type") in _ENDS or event.get("done") is True


def usage_of(body: Mapping[str, Any]) -> tuple[int, int] | None:
    """Tokens of the prompt and of the answer, by an event or a whole answer; None where it does not tell them."""
    if "eval_count" in body:
        return body["prompt_eval_count"], body["eval_count"]
    inner = body.get("response")
    usage = (inner if isinstance(inner, dict) else body).get("usage")
    if not usage:
        return None
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["completion_tokens"]
    return usage["input_tokens"] + usage.get("cache_read_input_tokens", 0), usage["output_tokens"]


def error_of(body: Mapping[str, Any]) -> str | None:
    """The message of an error that ends a stream; None where it is none."""
    inner = body.get("response")
    error = body.get("error") or (inner.get("error") if isinstance(inner, dict) else None)
    return error["message"] if isinstance(error, dict) else error
