"""The address that a server listens on, its HTTP side in a thread, and the signal that ends it."""

from __future__ import annotations

import atexit
import errno
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiermoe.errors import ConfigError

LAST_WORDS_S = 5  # seconds for connections when a server ends, after its answers
SOCKET = ".sock"
"""How the path of a Unix socket ends."""


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address, before minutes of loading. ConfigError where the address cannot be bound.

    host: where it ends in `SOCKET`, the path of a Unix socket, for whose owner alone it is."""
    if host.endswith(SOCKET):
        return _unix_socket(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # the protocol tells asyncio to send small writes (a token's event) at once
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        wrong = "--host" if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL else "--port"
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another {wrong}"
        ) from error
    return listener


def _unix_socket(path: str) -> socket.socket:
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigError(f"this system has no Unix sockets; choose an address instead of --host {path}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        there = "; where no server uses it, remove it" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(
            f"cannot listen on {path}: {error.strerror or error}{there}, or choose another --host"
        ) from error
    atexit.register(Path(path).unlink, missing_ok=True)
    return listener


def address_of(listener: socket.socket, tls: bool) -> str:
    """For people and clients."""
    name = listener.getsockname()
    return str(name) if isinstance(name, str) else "http{}://{}:{}/v1".format("s" if tls else "", *name[:2])


@contextmanager
def http_server(listener: socket.socket, app: Any, tls: dict[str, Any]) -> Iterator[None]:
    """An ASGI app behind HTTP in a thread of its own, while this thread loads models and waits for signals. tls:
    uvicorn's options."""
    import uvicorn

    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=LAST_WORDS_S, **tls)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="tiermoe-http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def wait_for_a_signal() -> None:
    """Blocks until SIGTERM or Ctrl-C. A later signal ends the process without waiting for answers: by the system, since
    a thread that hangs would keep Python from it. Several at once count as one."""
    ended, signals = threading.Event(), (signal.SIGTERM, signal.SIGINT)
    for each in signals:
        signal.signal(each, lambda *_: ended.set())
    while not ended.wait(1):  # a signal that another thread gets does not end the sleep of this one
        pass
    for each in signals:  # not in the handler: CPython prints a traceback where the next one's has gone by its turn
        signal.signal(each, signal.SIG_DFL)
