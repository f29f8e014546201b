"""`tiermoe serve`: a model behind an HTTP server for OpenAI's, Anthropic's and Ollama's clients, in one process or on
Ray Serve."""

from __future__ import annotations

import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiermoe.cli import options as opt
from tiermoe.cli.output import note, starting
from tiermoe.cli.session import Session, choose_sampling, make_sampling, open_session
from tiermoe.config import format_size, parse_size, settings
from tiermoe.errors import ConfigError
from tiermoe.platform.machine import processors

if TYPE_CHECKING:
    from tiermoe.serve.replicas import Deployed

PREFIX_DISK_SIZE = "4GiB"
GRACE_S = 30  # seconds for answers under way when the server ends
LAST_WORDS_S = 5  # seconds for connections after that
LAST_WRITES_S = 10  # seconds for prefixes that are still to be written to disk
_LOCAL = ("127.0.0.1", "localhost", "::1")


@opt.engine_options()
def serve(
    model: opt.Model,
    options: dict[str, Any],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that clients must send. Default: none.", envvar="TIERMOE_API_KEY", show_default=False),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File of keys, one a line (# begins a comment), which its owner alone may read. Clients must send one "
            "of them, or that of --api-key.",
            show_default=False,
        ),
    ] = None,
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(help="Certificate chain in PEM, for HTTPS. Default: HTTP.", show_default=False),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(
            help="Private key of that certificate, in PEM. Default: in the certificate's file.", show_default=False
        ),
    ] = None,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(
            help="Allowed hosts of requests (Host header), separated by commas; * is any. Default: this machine's own "
            "names and --host; any with --api-key.",
            show_default=False,
        ),
    ] = None,
    allowed_origins: Annotated[
        str | None,
        typer.Option(
            help="Allowed origins (CORS), separated by commas, like http://localhost:3000; * is any. Default: the "
            "server's own page.",
            show_default=False,
        ),
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(
            help="Requests in a batch. Default: 16, or as many as there is KV cache for.",
            min=1,
            max=64,
            show_default=False,
        ),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="KV cache of all requests together, like 1GiB; a request takes it for its prompt, and more as its "
            "answer grows. Default: for --max-batch requests of --context tokens where that is named, else what the "
            "expert cache can spare.",
            show_default=False,
        ),
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait in the queue.", min=1)] = 64,
    prefix_disk: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a prefix cache on disk, with which conversations survive a restart. Default: prefixes are "
            "kept in memory only.",
            show_default=False,
        ),
    ] = None,
    prefix_disk_size: Annotated[
        str | None,
        typer.Option(
            help=f"Most bytes of that folder; least recently used prefixes go first. Default: {PREFIX_DISK_SIZE}.",
            show_default=False,
        ),
    ] = None,
    draft: opt.Draft = "lookup",
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    chat_template_file: opt.ChatTemplateFile = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model in the API. Default: as named here.", show_default=False)
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(help="Processes on Ray Serve; --memory and the threads are divided among them.", min=1, max=64),
    ] = 1,
) -> None:
    """Serve a model to OpenAI's, Anthropic's and Ollama's clients, with several requests in a batch.

    The KV cache of all requests is part of --memory; --context is the most tokens of one request. --temperature and the
    other values of sampling are those of requests that name none."""
    if api_key is not None and not api_key.strip():
        raise ConfigError("the API key is empty; name one, or leave --api-key out")
    _need_libraries()
    if replicas > 1 and ssl_certfile is not None:
        raise ConfigError("--ssl-certfile belongs to one process; leave it out, or --replicas")
    keys = _keys(api_key, api_key_file)
    tls = _tls(ssl_certfile, ssl_keyfile)
    if replicas > 1 and draft not in ("lookup", "none"):
        raise ConfigError("a draft model belongs to one process; leave --draft or --replicas out")
    if replicas > 1 and prefix_disk is not None:
        raise ConfigError("--prefix-disk belongs to one process; leave it out, or --replicas")
    disk_bytes = _prefix_disk_bytes(prefix_disk, prefix_disk_size)
    kv_bytes = None if kv_memory is None else parse_size(kv_memory, "--kv-memory")
    template = opt.read_template(chat_template_file)
    named = opt.given(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty
    )
    if named:
        make_sampling(**named)
    listener = _listen(host, port)
    if not keys and host not in _LOCAL:
        note(f"note: anybody who reaches {host}:{port} can use this model; --api-key asks for a key")
    chosen: dict[str, Any] = {"folder": None}

    def context_for(_: Any, blueprint: Any) -> None:
        if blueprint.family.encoder_decoder:
            raise ConfigError(f"{model} is an encoder–decoder model, which serve does not answer with; use tiermoe run")
        if prefix_disk is not None:
            from tiermoe.serve.batch_limits import prefix_folder

            chosen["folder"] = prefix_folder(prefix_disk, disk_bytes, blueprint, settings(**options))
        chosen["sampling"] = choose_sampling(blueprint, named, make_sampling(temperature=1.0))

    access = _access(keys, host, allowed_hosts, allowed_origins)
    options = options if max_batch is None else {**options, "batch": max_batch}
    served_name = name or (Path(model).name if Path(model).exists() else model)
    if replicas > 1:
        address = listener.getsockname()[:2]
        listener.close()
        path, share, kv_share = _prepare_replicas(model, options, replicas, context_for, kv_bytes)
        from tiermoe.serve.replicas import Deployed

        deployed = Deployed(
            path, share, served_name, chosen["sampling"], access, max_queue, draft != "none", kv_share, template
        )
        _serve_replicas(deployed, replicas, address)
        return
    with _http_server(listener, tls) as gate:
        session = open_session(
            model, options, context_for, on_progress=gate.report, served=True, kv_memory=kv_bytes, draft=draft,
            template=template,
        )  # fmt: skip
        scheme = "https" if tls else "http"
        _serve_session(session, gate, listener, scheme, served_name, access, max_queue, **chosen)


# --- one process ---


@contextmanager
def _http_server(listener: socket.socket, tls: dict[str, Any]) -> Iterator[Any]:
    """The HTTP server in a thread of its own, while this thread loads the model and waits for signals. Yields the gate,
    which answers until there is a model. tls: uvicorn's options."""
    import uvicorn

    from tiermoe.serve.startup import StartupApp

    gate = StartupApp()
    config = uvicorn.Config(gate, log_level="warning", lifespan="off", timeout_graceful_shutdown=LAST_WORDS_S, **tls)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="tiermoe-http", daemon=True)
    thread.start()
    try:
        yield gate
    finally:
        server.should_exit = True
        thread.join()


def _serve_session(
    session: Session, gate: Any, listener: socket.socket, scheme: str, name: str, access: dict[str, Any],
    max_queue: int, *, sampling: Any, folder: Any,
) -> None:  # fmt: skip
    """Answers requests until a signal, then the ones under way."""
    from tiermoe.serve.app import create_app
    from tiermoe.serve.served import prefix_disk, served_of

    engine = session.engine
    disk = prefix_disk(engine, folder, note) if folder else None
    served = served_of(engine, session.tokenizer, name, sampling, max_queue, disk, session.speculation)
    worker = served.worker
    gate.app = create_app(served, **access)
    host, port = listener.getsockname()[:2]
    note(f"{name} at {scheme}://{host}:{port}/v1; Ctrl-C ends the server")
    try:
        _wait_for_a_signal()
        worker.close(GRACE_S)
    finally:
        worker.close(0)
        if worker.loop.disk is not None:
            worker.loop.disk.close(LAST_WRITES_S)
        engine.close()


# --- replicas ---


def _prepare_replicas(
    model: str,
    options: dict[str, Any],
    replicas: int,
    context_for: Callable[[Any, Any], int | None],
    kv_memory: int | None,
) -> tuple[str, dict[str, Any], int | None]:
    """(model, options, KV cache in bytes) of one of `replicas` processes: its share of memory, processors and
    `kv_memory`. The model is loaded once here: that packs it where it is not packed, and refuses a share that is too
    small before a replica starts."""
    opt.need_ray("--replicas")
    share = one_share(options, replicas)
    if Path(model).exists():
        model = str(Path(model).resolve())  # a replica may run in another folder
    if "store" in share:
        share["store"] = Path(share["store"]).resolve()
    part = None if kv_memory is None else kv_memory // replicas
    engine = open_session(model, share, context_for, served=True, kv_memory=part).engine
    engine.close()
    return model, {**share, "batch": engine.settings.batch}, engine.plan.kv_memory


def one_share(options: dict[str, Any], replicas: int) -> dict[str, Any]:
    """The options of one of `replicas` processes: its share of the memory, and of the processors where --threads is not
    named."""
    with starting():
        from tiermoe.engine.budget import memory_budget

        memory, _ = memory_budget(settings(**options))
    threads = options.get("threads") or max(1, processors() // replicas)
    return {**options, "memory": memory // replicas, "threads": threads}


def _serve_replicas(deployed: Deployed, replicas: int, address: tuple[str, int]) -> None:
    """Runs replicas behind an address until a signal."""
    from tiermoe.serve.replicas import start, stop

    host, port = address
    try:
        start(deployed, replicas, host, port, GRACE_S)
        share = format_size(deployed.options["memory"])
        note(f"{deployed.name} at http://{host}:{port}/v1, {replicas} replicas of {share}; Ctrl-C ends the server")
        _wait_for_a_signal()
    finally:
        stop()


# --- options and the address ---


def _keys(key: str | None, file: Path | None) -> list[str]:
    """The API keys; empty: the server asks for none. ConfigError for a file that is none of keys."""
    from tiermoe.serve.credentials import read_keys

    return [*([key] if key is not None else []), *(read_keys(file) if file is not None else [])]


def _tls(certfile: Path | None, keyfile: Path | None) -> dict[str, Any]:
    """uvicorn's options for HTTPS; empty: HTTP. ConfigError for files that are no certificate and its key."""
    if certfile is None:
        if keyfile is not None:
            raise ConfigError(f"--ssl-keyfile {keyfile} does nothing without --ssl-certfile; name the certificate")
        return {}
    from tiermoe.serve.credentials import check_certificate

    check_certificate(certfile, keyfile)
    return {"ssl_certfile": certfile, "ssl_keyfile": keyfile}


def _access(keys: list[str], host: str, hosts: str | None, origins: str | None) -> dict[str, Any]:
    """Access rules for `create_app`. With a key any host name is allowed: a foreign web page does not have the key."""
    from tiermoe.serve.guards import Hosts

    known = Hosts(host, _split(hosts)) if not keys or hosts is not None else None
    return {"keys": keys, "hosts": known, "origins": _split(origins)}


def _split(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def _prefix_disk_bytes(root: Path | None, size: str | None) -> int:
    """Most bytes of `--prefix-disk`. ConfigError for a size without a folder."""
    if root is None and size is not None:
        raise ConfigError(f"--prefix-disk-size {size} does nothing without --prefix-disk; name a folder")
    return parse_size(size or PREFIX_DISK_SIZE, "--prefix-disk-size")


def _wait_for_a_signal() -> None:
    """Blocks until SIGTERM or Ctrl-C. A second signal ends the process without waiting for answers: by the system,
    since a thread that hangs would keep Python from it."""
    ended, signals = threading.Event(), (signal.SIGTERM, signal.SIGINT)

    def end(*_: Any) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_DFL)
        ended.set()

    for each in signals:
        signal.signal(each, end)
    while not ended.wait(1):  # a signal that another thread gets does not end the sleep of this one
        pass


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
    """A socket bound to the address, before minutes of loading. ConfigError where the address cannot be bound."""
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
