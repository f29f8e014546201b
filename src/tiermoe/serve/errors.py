"""What a client is told where it cannot be answered; each dialect has its own shape for it."""

from __future__ import annotations

RETRY_S = 5  # after which a client may ask again
TOO_LONG = "context_length_exceeded"  # by which agents know that they must shorten


class Refused(Exception):
    """status: HTTP's. param: the field that is the cause. kind, code: as OpenAI names it."""

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
