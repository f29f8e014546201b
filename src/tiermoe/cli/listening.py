"""The address that a server listens on, who may ask there, its HTTP side in a thread, and the signal that ends it."""

from __future__ import annotations

import atexit
import errno
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiermoe.cli.output import note
from tiermoe.errors import ConfigError

LAST_WORDS_S = 5  # seconds for connections when a server ends, after its answers
SOCKET = ".sock"
"""How the path of a Unix socket ends. Its owner alone may use it."""


@dataclass(frozen=True, slots=True)
class Listener:
    """The address that a server listens on, and who may ask there."""

    bound: socket.socket
    tls: dict[str, Path]  # uvicorn's options for HTTPS; empty: HTTP
    access: dict[str, Any]  # named arguments of `create_app` and `create_router`

    def __str__(self) -> str:
        """For people and clients."""
        name = self.bound.getsockname()
        return str(name) if isinstance(name, str) else "http{}://{}:{}/v1".format("s" if self.tls else "", *name[:2])

    @contextmanager
    def serving(self, app: Any) -> Iterator[None]:
        """An ASGI app behind HTTP in a thread of its own, while this thread loads models and waits for signals."""
        import uvicorn

        options: dict[str, Any] = {"log_level": "warning", "lifespan": "off", **self.tls}
        server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=LAST_WORDS_S, **options))
        words = {"sockets": [self.bound]}
        thread = threading.Thread(target=server.run, kwargs=words, name="tiermoe-http", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.should_exit = True
            thread.join()


def listen(
    host: str,
    port: int,
    api_key: str | None = None,
    key_file: Path | None = None,
    certfile: Path | None = None,
    keyfile: Path | None = None,
    hosts: str | None = None,
    origins: str | None = None,
) -> Listener:
    """Listens before minutes of loading, by the options of `tiermoe serve`. ConfigError where the address cannot be
    bound, or a file has no keys, or no certificate with its key."""
    from tiermoe.serve.guards import LOOPBACK, Hosts, check_certificate, read_keys

    if api_key is not None and not api_key.strip():
        raise ConfigError("the API key is empty; name one, or leave --api-key out")
    keys = [*([api_key] if api_key is not None else []), *(read_keys(key_file) if key_file is not None else [])]
    tls: dict[str, Path] = {}
    if certfile is not None:
        check_certificate(certfile, keyfile)
        tls = {"ssl_certfile": certfile, "ssl_keyfile": keyfile or certfile}
    elif keyfile is not None:
        raise ConfigError(f"--ssl-keyfile {keyfile} does nothing without --ssl-certfile; name the certificate")
    bound = _unix_socket(host) if host.endswith(SOCKET) else _tcp_socket(host, port)
    if not keys and host not in LOOPBACK and not host.endswith(SOCKET):
        note(f"note: anybody who reaches {host}:{port} can use this model; --api-key asks for a key")
    # with a key any host name is allowed: a foreign web page does not have the key
    known = Hosts(host, _split(hosts)) if not keys or hosts is not None else None
    return Listener(bound, tls, {"keys": keys, "hosts": known, "origins": _split(origins)})


def _split(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def _tcp_socket(host: str, port: int) -> socket.socket:
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
