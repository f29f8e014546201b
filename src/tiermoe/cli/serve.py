"""`tiermoe serve`: a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import errno
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tiermoe.cli import options as opt
from tiermoe.cli.output import note
from tiermoe.cli.replicas import prepared, run_replicas
from tiermoe.cli.session import choose_sampling, make_sampling, open_session
from tiermoe.config import parse_size, settings
from tiermoe.errors import ConfigError

PREFIX_DISK_SIZE = "4GiB"
GRACE_S = 30  # for answers under way when the server ends
LAST_WORDS_S = 5  # for connections after that
LAST_WRITES_S = 10  # for conversations that are still to be written to disk
_LOCAL = ("127.0.0.1", "localhost", "::1")


@opt.engine_options()
def serve(
    model: opt.Model,
    options: dict[str, Any],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(help="What clients must name. Default: nothing.", envvar="TIERMOE_API_KEY", show_default=False),
    ] = None,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(
            help="Names, with commas between them, that the server may be asked for by, as clients' Host header says; "
            "* is any. Default: those of this machine alone and --host, and any where there is an --api-key.",
            show_default=False,
        ),
    ] = None,
    allowed_origins: Annotated[
        str | None,
        typer.Option(
            help="Web pages, with commas between them, that browsers let ask, like http://localhost:3000; * is any. "
            "Default: the server's own page alone.",
            show_default=False,
        ),
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(
            help="Requests that run at once. Default: 16, as far as there is memory for their keys and values.",
            min=1,
            max=64,
            show_default=False,
        ),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for the keys and values of all requests, like 1GiB; each takes what its prompt needs and its "
            "answer as it grows. Default: for --max-batch requests of --context tokens where that is named, else as "
            "much as experts can do without.",
            show_default=False,
        ),
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait.", min=1)] = 64,
    prefix_disk: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps the keys and values of conversations, so that they survive a restart. "
            "Default: they are kept in memory alone.",
            show_default=False,
        ),
    ] = None,
    prefix_disk_size: Annotated[
        str | None,
        typer.Option(
            help=f"Most bytes of that folder; what was used least recently goes first. Default: {PREFIX_DISK_SIZE}.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What the model is called. Default: as named here.", show_default=False)
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(
            help="Processes that answer, on Ray Serve; each has its part of --memory and of the threads.", min=1, max=64
        ),
    ] = 1,
) -> None:
    """Serve a model to OpenAI's clients, several requests at once.

    Memory for the keys and values of all requests is part of --memory; --context is each one's most tokens."""
    if api_key is not None and not api_key.strip():
        raise ConfigError("the API key is empty; name one, or leave --api-key out")
    _need_libraries()
    if replicas > 1 and prefix_disk is not None:
        raise ConfigError("--prefix-disk belongs to one process; leave it out, or --replicas")
    most = _prefix_bytes(prefix_disk, prefix_disk_size)
    shared = None if kv_memory is None else parse_size(kv_memory, "--kv-memory")
    listener = _listen(host, port)
    if api_key is None and host not in _LOCAL:
        note(f"note: anybody who reaches {host}:{port} can use this model; --api-key asks for a key")
    chosen: dict[str, Any] = {"folder": None}

    def context_for(_: Any, blueprint: Any) -> None:
        if blueprint.family.encoder_decoder:
            raise ConfigError(f"{model} is an encoder–decoder model, which serve does not answer with; use tiermoe run")
        if prefix_disk is not None:
            from tiermoe.serve.prefix_disk import folder_for

            chosen["folder"] = folder_for(prefix_disk, most, blueprint, settings(**options))
        chosen["sampling"] = choose_sampling(blueprint, {}, make_sampling(temperature=1.0))

    access = _access(api_key, host, allowed_hosts, allowed_origins)
    options = options if max_batch is None else {**options, "batch": max_batch}
    shown = name or (Path(model).name if Path(model).exists() else model)
    if replicas > 1:
        address = listener.getsockname()[:2]
        listener.close()
        whole, share, shared = prepared(model, options, replicas, context_for, shared)
        from tiermoe.serve.replicas import Deployed

        deployed = Deployed(whole, share, shown, chosen["sampling"], access, max_queue, shared)
        run_replicas(deployed, replicas, address, GRACE_S, _wait_for_a_signal)
        return
    with _answering(listener) as gate:
        session = open_session(model, options, context_for, gate.report, served=True, kv_memory=shared)
        _run(session, gate, listener, shown, access, max_queue, **chosen)


@contextmanager
def _answering(listener: socket.socket) -> Iterator[Any]:
    """Answers from a thread of its own while the model is loaded and runs: this thread waits for signals. Yields what
    answers until there is a model."""
    import uvicorn

    from tiermoe.serve.gate import Gate

    gate = Gate()
    config = uvicorn.Config(gate, log_level="warning", lifespan="off", timeout_graceful_shutdown=LAST_WORDS_S)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="tiermoe-http", daemon=True)
    thread.start()
    try:
        yield gate
    finally:
        server.should_exit = True
        thread.join()


def _run(
    session: Any, gate: Any, listener: socket.socket, name: str, access: dict[str, Any], max_queue: int, *,
    sampling: Any, folder: Any,
) -> None:  # fmt: skip
    from tiermoe.serve.app import create_app
    from tiermoe.serve.assembly import served_of
    from tiermoe.serve.prefix_disk import disk_of

    engine = session.engine
    disk = disk_of(engine, folder, note) if folder else None
    served = served_of(engine, session.tokenizer, name, sampling, max_queue, disk)
    worker = served.worker
    gate.app = create_app(served, **access)
    host, port = listener.getsockname()[:2]
    note(f"{name} at http://{host}:{port}/v1; Ctrl-C ends the server")
    try:
        _wait_for_a_signal()
        worker.close(GRACE_S)
    finally:
        worker.close(0)
        if worker.batcher.disk is not None:
            worker.batcher.disk.close(LAST_WRITES_S)
        engine.close()


def _access(key: str | None, host: str, hosts: str | None, origins: str | None) -> dict[str, Any]:
    """Who is answered, as `create_app` takes it. A page that is not ours cannot name the key: with one, the server may
    be called anything."""
    from tiermoe.serve.guards import Hosts

    known = Hosts(host, _split(hosts)) if key is None or hosts is not None else None
    return {"key": key, "hosts": known, "origins": _split(origins)}


def _split(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def _prefix_bytes(root: Path | None, size: str | None) -> int:
    """Most bytes of `--prefix-disk`. ConfigError for a size alone."""
    if root is None and size is not None:
        raise ConfigError(f"--prefix-disk-size {size} does nothing without --prefix-disk; name a folder")
    return parse_size(size or PREFIX_DISK_SIZE, "--prefix-disk-size")


def _wait_for_a_signal() -> None:
    """Until SIGTERM or Ctrl-C. Another one ends the process without waiting for answers: by the system, since a thread
    that hangs would keep Python from it."""
    ended, signals = threading.Event(), (signal.SIGTERM, signal.SIGINT)

    def end(*_: Any) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_DFL)
        ended.set()

    for each in signals:
        signal.signal(each, end)
    ended.wait()


def _need_libraries() -> None:
    try:
        import fastapi  # noqa: F401
        import llguidance  # noqa: F401
        import prometheus_client  # noqa: F401
        import sse_starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"serving needs {error.name}: pip install 'tiermoe[serve]'") from error


def _listen(host: str, port: int) -> socket.socket:
    """ConfigError where the address cannot be had: before minutes of loading."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # by its protocol asyncio knows that small writes, a token's event, are to be sent at once
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
