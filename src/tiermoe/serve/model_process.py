"""Process of one model behind a router: a server of its own, on a Unix socket that the router alone uses."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from tiermoe.config import format_size

_LOOK_S = 0.2  # between two looks whether the model is loaded
_ENDING_S = 60  # for a process to end by itself: answers under way, prefixes to be written, connections
_LINE = 16 << 10  # bytes of a line on standard error; a longer one is cut
_ERROR = "tiermoe: "  # begins the last line of a command that fails


class LoadError(Exception):
    """A model's process has ended before its model was loaded. The message says why."""


class ModelProcess:
    """A process that loads a model and answers requests for it.

    words: the command; its server listens on `socket`, and it ends when its standard input does. nbytes: its memory
    budget. said: called with each line of its standard error. A crash ends this process alone, and its end gives back
    all that it held."""

    def __init__(self, words: Sequence[str], socket: Path, nbytes: int, said: Callable[[str], None]) -> None:
        self.nbytes = nbytes
        self.client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=httpx.Limits(max_keepalive_connections=0)),
            base_url="http://localhost",
            timeout=httpx.Timeout(None, connect=30),
        )
        self.progress = ""  # of loading, in words
        self._words, self._socket, self._said = words, socket, said
        self._process: asyncio.subprocess.Process | None = None
        self._error = ""  # in which the command has ended
        self._reading: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Starts the process and waits until its model is loaded. LoadError where it ends instead."""
        environment = {name: value for name, value in os.environ.items() if name != "TIERMOE_API_KEY"}
        self._process = await asyncio.create_subprocess_exec(
            *self._words, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=_LINE, env=environment,
            start_new_session=True,  # Ctrl-C is for the router, which then asks the process to end
        )  # fmt: skip
        self._reading = asyncio.create_task(self._read(self._process))
        while self._process.returncode is None:
            with contextlib.suppress(httpx.TransportError):  # it does not listen yet, or has just ended
                answer = await self.client.get("/health")
                if answer.status_code == 200:
                    return
                self.progress = _in_words(answer.json().get("progress"))
            await asyncio.sleep(_LOOK_S)
        await self._reading
        raise LoadError(self.cause())

    async def ended(self) -> None:
        """Waits for the end of the process."""
        assert self._process is not None
        await self._process.wait()

    async def end(self) -> None:
        """Asks the process to end once it has answered, and waits for it; kills it where it takes longer than
        `_ENDING_S`."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(_ENDING_S):
                    await self._process.wait()
            except TimeoutError:
                await self.kill()
        await self.client.aclose()

    async def kill(self) -> None:
        """Ends the process now."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def cause(self) -> str:
        """Why the process has ended, in words."""
        code = None if self._process is None else self._process.returncode
        if code is not None and code < 0:
            return f"its process was ended by signal {-code}; its budget was {format_size(self.nbytes)}"
        return self._error or f"its process has ended with exit code {code}"

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hands on what the process says, to its end."""
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readuntil(b"\n")
            except asyncio.IncompleteReadError as rest:
                line = rest.partial
            except asyncio.LimitOverrunError as longer:
                line = await process.stderr.read(longer.consumed)
            if not line:
                return
            if text := line.decode(errors="replace").strip():
                self._error = text.removeprefix(_ERROR) if text.startswith(_ERROR) else ""
                self._said(text)


def _in_words(progress: dict[str, Any] | None) -> str:
    """Progress of loading, as `/health` of a server gives it."""
    return f"{progress['what']}, {progress['done']} of {progress['total']}" if progress else ""
