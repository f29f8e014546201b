"""What every process of a server knows of Ollama's API: no torch is imported for it."""

from __future__ import annotations

from typing import Any

from tiermoe.serve.errors import Refused

PATHS = "/api/"
"""Beginning of the paths of the dialect."""
VERSION = "0.12.11"
"""The Ollama whose API this is: the first with log probabilities. Clients ask for a least version (VS Code 0.6.4)."""
LATEST = ":latest"
"""The tag that clients add to a name without one."""


def error_body(error: Refused) -> dict[str, Any]:
    """An error in Ollama's shape."""
    return {"error": str(error)}
