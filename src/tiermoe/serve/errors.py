"""Refusal of a request; each dialect has its own shape for it."""

from __future__ import annotations

RETRY_S = 5
"""Seconds after which a client may ask again."""
TOO_LONG = "context_length_exceeded"
"""Code of a prompt that is too long, by which agents know that they must shorten it."""


class Refused(Exception):
    """A request that cannot be answered. status: HTTP's. param: the field that is the cause. kind, code: OpenAI's."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        kind: str = "invalid_request_error",
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.kind, self.code = status, param, kind, code
