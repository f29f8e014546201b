"""What every process of a server knows of Ollama's API: no torch is imported for it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tiermoe.serve.errors import Refused

PATHS = "/api/"
"""Beginning of the paths of the dialect."""
CHAT, GENERATE = f"{PATHS}chat", f"{PATHS}generate"
"""Paths of answers, which are streams unless `stream` is false."""
VERSION = "0.12.11"
"""The Ollama whose API this is: the first with log probabilities. Clients ask for a least version (VS Code 0.6.4)."""
LINES = "application/x-ndjson"
"""Type of a stream."""
LATEST = ":latest"
"""The tag that clients add to a name without one."""


def reply(model: str, chat: bool, text: str = "", thought: str = "") -> dict[str, Any]:
    """An object of a stream that goes on. model: its name. chat: of `/api/chat`, else of `/api/generate`."""
    found: dict[str, Any] = {"model": model, "created_at": datetime.now(UTC).isoformat(), "done": False}
    thinking = {"thinking": thought} if thought else {}
    if chat:
        return found | {"message": {"role": "assistant", "content": text, **thinking}}
    return found | {"response": text, **thinking}


def error_body(error: Refused) -> dict[str, Any]:
    """An error in Ollama's shape."""
    return {"error": str(error)}
