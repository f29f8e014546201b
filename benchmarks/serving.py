"""A server in a process of its own: where it may listen, whether it answers, what it said, its end."""

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from tiermoe.lab.bench.child import CaseFailed, joining, memory_group

_LOOK_S = 0.2
_ENDING_S = 60
Group = tuple[int, Path] | None
"""(version, folder) of a memory cgroup; None where there is none."""


class Server:
    """A command that serves at `address`. log: the file that takes what it says. group: the memory cgroup that it runs
    in."""

    def __init__(self, words: Sequence[str], address: str, log: Path, group: Group = None) -> None:
        self.address = address
        self._log = log
        with open(log, "wb") as file:
            self.process = subprocess.Popen(joining(group[1], words) if group else words, stdout=file, stderr=file)

    def wait_until_loaded(self, seconds: float) -> None:
        """CaseFailed with what the server says where it ends instead, or does not answer by then."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit and self.process.poll() is None:
            if answers(self.address):
                return
            time.sleep(_LOOK_S)
        self.process.kill()
        raise CaseFailed(f"the server did not start: {self.log()}")

    def log(self) -> str:
        """What it has said."""
        return self._log.read_text(errors="replace").strip()

    def end(self) -> None:
        """Asks it to end, and ends it where it does not."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_ENDING_S)
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def serving(words: Sequence[object], seconds: float) -> Iterator[Server]:
    """`tiermoe serve WORDS` once it has loaded its model, which may take so long, until the end of a `with`. CaseFailed
    as `Server.wait_until_loaded`."""
    port = free_port()
    command = [sys.executable, "-m", "tiermoe", "serve", *map(str, words), "--port", str(port)]
    with tempfile.TemporaryDirectory(prefix="serving-") as folder:
        server = Server(command, f"http://127.0.0.1:{port}", Path(folder) / "log")
        try:
            server.wait_until_loaded(seconds)
            yield server
        finally:
            server.end()


@contextlib.contextmanager
def limited(memory: int | None) -> Iterator[Group]:
    """A memory cgroup of so many bytes, where they are named. Raises CannotLimit."""
    if memory is None:
        yield None
        return
    with memory_group(memory) as group:
        yield group


def free_port() -> int:
    """A port of this machine that nobody listens on. A connection that has ended on it keeps the system from giving it
    to anybody else for a minute; who names it may listen on it (SO_REUSEADDR)."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
        with socket.create_connection(address), free.accept()[0]:  # the accepted one is closed first, and lingers
            pass
    port: int = address[1]
    return port


def answers(address: str) -> bool:
    """Whether the server at an address like http://127.0.0.1:8000 has loaded its model."""
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False
