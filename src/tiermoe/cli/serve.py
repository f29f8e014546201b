"""`tiermoe serve`: a model behind an HTTP server for OpenAI's, Anthropic's and Ollama's clients, or several processes
of it behind one address, on Ray Serve (`--replicas`). Several models are `serve_models`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiermoe.cli import options as opt
from tiermoe.cli.listening import SOCKET, Listener, listen, wait_for_a_signal
from tiermoe.cli.output import note, starting
from tiermoe.cli.serve_models import name_of, serve_models
from tiermoe.cli.session import Session, choose_sampling, make_sampling, open_session, read_ahead
from tiermoe.config import format_size, parse_size, settings
from tiermoe.errors import ConfigError
from tiermoe.platform.machine import processors, require_extra

if TYPE_CHECKING:
    from tiermoe.engine.sampling import Sampling
    from tiermoe.model.cache.prefix_disk import PrefixFolder
    from tiermoe.model.chat.format import ChatFormat
    from tiermoe.model.chat.template import ChatTemplate
    from tiermoe.model.hf.blueprint import Blueprint
    from tiermoe.serve.page import StartupApp
    from tiermoe.serve.replicas import Deployed

PREFIX_DISK_SIZE = "4GiB"
GRACE_S = 30  # seconds for answers under way when the server ends
LAST_WRITES_S = 10  # seconds for prefixes that are still to be written to disk
KEEP_ALIVE = "10m"  # for one of several models without a request
_LIBRARIES = ("fastapi", "httpx", "llguidance", "prometheus_client", "sse_starlette", "uvicorn")


@opt.engine_options()
def serve(
    options: dict[str, Any],
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="A model directory, a GGUF file, a hub id, or HUB-ID:FILE for one of its GGUF files; several share "
            "--memory, and each is loaded when a request names it.",
            show_default=False,
        ),
    ] = None,
    models_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder whose models are served: its folders with a model, and GGUF files.", show_default=False
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MODEL",
            help="Another name for one of several models, like small=Qwen3-30B-A3B. May be given several times.",
            show_default=False,
        ),
    ] = None,
    keep_alive: Annotated[
        str | None,
        typer.Option(
            help="How long one of several models stays loaded without a request, like 90s, 10m, 2h, or never. Default: "
            f"{KEEP_ALIVE}.",
            show_default=False,
        ),
    ] = None,
    models_max: Annotated[
        int | None,
        typer.Option(
            help="How many of several models are loaded at once, at most; each then has such a part of --memory at "
            "most. Default: as many as fit, and the first ones have what they can use.",
            min=1,
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on, or the path of a Unix socket, which ends in .sock.")
    ] = "127.0.0.1",
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
    special_tokens_in_text: Annotated[
        bool,
        typer.Option(
            "--special-tokens-in-text",
            help="Let texts of messages and tools contain special tokens: whoever writes <|im_end|> ends the turn. "
            "Otherwise it is text.",
        ),
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Name of the model in the API. Default: as named here.", show_default=False)
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(help="Processes on Ray Serve; --memory and the threads are divided among them.", min=1, max=64),
    ] = 1,
) -> None:
    """Serve a model to OpenAI's, Anthropic's and Ollama's clients, with several requests in a batch, or several models
    by turns.

    The KV cache of all requests is part of --memory; --context is the most tokens of one request. --temperature and the
    other values of sampling are those of requests that name none."""
    models = models or []
    if not models and models_dir is None:
        raise ConfigError("name a model, several, or a folder of models with --models-dir")
    several, drafts = models_dir is not None or len(models) > 1, draft not in ("lookup", "none")
    require_extra("serving", "serve", *_LIBRARIES)
    if several:
        one: dict[str, Any] = {"--name": name, "--replicas": replicas > 1, "--draft MODEL": drafts}
        one |= {f"--{each}": options.get(each) for each in ("also", "store")}
        _refuse(one, "belongs to one model, and several are named; leave it out, or name one model")
    else:
        own = {"--alias": alias, "--keep-alive": keep_alive, "--models-max": models_max}
        _refuse(own, "does nothing for one model; leave it out, or name several models")
    if replicas > 1:
        one = {f"--draft {draft}": drafts, "--prefix-disk": prefix_disk, f"--host {host}": host.endswith(SOCKET)}
        _refuse(one, "belongs to one process; leave it out, or --replicas")
    if prefix_disk is None:
        _refuse({"--prefix-disk-size": prefix_disk_size}, "does nothing without --prefix-disk; name a folder")
    disk_bytes = parse_size(prefix_disk_size or PREFIX_DISK_SIZE, "--prefix-disk-size")
    kv_bytes = None if kv_memory is None else parse_size(kv_memory, "--kv-memory")
    template = opt.read_template(chat_template_file)
    listener = listen(host, port, api_key, api_key_file, ssl_certfile, ssl_keyfile, allowed_hosts, allowed_origins)
    if replicas > 1:
        require_extra("--replicas", "ray", "ray.serve")
    options = options if max_batch is None else {**options, "batch": max_batch}
    named = opt.given(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty
    )
    if several:
        passed = opt.given(
            kv_memory=kv_memory, max_queue=max_queue, prefix_disk=prefix_disk, prefix_disk_size=prefix_disk_size,
            draft=draft, chat_template_file=chat_template_file, special_tokens_in_text=special_tokens_in_text or None,
            **named,
        )  # fmt: skip
        keep_alive = keep_alive or KEEP_ALIVE
        serve_models(models, models_dir, alias or [], keep_alive, models_max, options, passed, named, listener)
        return
    (model,) = models
    headers = read_ahead(model, options)
    if named:
        make_sampling(**named)
    chosen: dict[str, Any] = {"folder": None}

    def no_context(_: Any, blueprint: Blueprint, chat: ChatTemplate) -> None:
        from tiermoe.serve.batch_limits import prefix_folder, require_decoder

        require_decoder(blueprint)
        if prefix_disk is not None:
            chosen["folder"] = prefix_folder(prefix_disk, disk_bytes, blueprint, settings(**options))
        chosen["sampling"] = choose_sampling(blueprint, named, make_sampling(temperature=1.0))

    name = name or name_of(model)
    if replicas > 1:
        share, kv_share = prepare_replicas(model, options, replicas, no_context, kv_bytes)
        from tiermoe.serve.replicas import Deployed

        place = str(Path(model).resolve()) if Path(model).exists() else model  # a replica may run in another folder
        guesses, access = draft != "none", listener.access
        serve_replicas(
            Deployed(
                place, share, name, chosen["sampling"], access, max_queue, guesses, kv_share, template,
                not special_tokens_in_text,
            ),
            replicas, listener,
        )  # fmt: skip
        return
    from tiermoe.serve.page import StartupApp

    gate = StartupApp()
    with listener.serving(gate):
        session = open_session(
            model, options, no_context, headers=headers, on_progress=gate.report, served=True, kv_memory=kv_bytes,
            draft=draft, template=template,
        )  # fmt: skip
        session.chat = replace(session.chat, guards=not special_tokens_in_text)
        _answer(session, gate, listener, name, max_queue, **chosen)


def _answer(
    session: Session,
    gate: StartupApp,
    listener: Listener,
    name: str,
    max_queue: int,
    *,
    sampling: Sampling,
    folder: PrefixFolder | None,
) -> None:
    """Answers requests until a signal, then the ones under way."""
    from tiermoe.serve.app import create_app
    from tiermoe.serve.served import prefix_disk, served_of

    engine = session.engine
    disk = prefix_disk(engine, folder, note) if folder else None
    served = served_of(engine, session.tokenizer, name, sampling, max_queue, disk, session.speculation, session.chat)
    if session.chat.text and (why := session.chat.form.refused or session.chat.form.no_calls):
        note(f"note: {_without_calls(session.chat.form, why)}")
    worker = served.worker
    gate.app = create_app(served, **listener.access)
    note(f"{name} at {listener}; Ctrl-C ends the server")
    try:
        wait_for_a_signal()
        if worker.busy:
            note(f"answers under way have {GRACE_S} seconds to end; another signal ends the server at once")
        worker.close(GRACE_S)
    finally:
        worker.close(0)
        if worker.loop.disk is not None:
            worker.loop.disk.close(LAST_WRITES_S)
        engine.close()


def _without_calls(form: ChatFormat, why: str) -> str:
    """What a client must know of a chat template that says too little."""
    if form.refused:
        return f"the chat template is not used, and chats are refused: {why}"
    if form.calls is not None:
        return f"calls of tools are read as the model's family writes them: {why}"
    return f"requests with tools are refused, since no format of calls is known: {why}"


def _refuse(named: Mapping[str, Any], why: str) -> None:
    """ConfigError for an option that is named. named: option → its value, or whether it is named."""
    if wrong := next((option for option, value in named.items() if value), None):
        raise ConfigError(f"{wrong} {why}")


def prepare_replicas(
    model: str,
    options: dict[str, Any],
    replicas: int,
    context_for: Callable[[Any, Blueprint, ChatTemplate], int | None],
    kv_memory: int | None,
) -> tuple[dict[str, Any], int | None]:
    """(options, KV cache in bytes) of one of `replicas` processes: its share of memory, processors and `kv_memory`. The
    model is loaded once here: that packs it if it is not packed, and refuses a share that is too small before a
    replica starts."""
    share = one_share(options, replicas)
    if "store" in share:
        share["store"] = Path(share["store"]).resolve()
    part = None if kv_memory is None else kv_memory // replicas
    engine = open_session(model, share, context_for, served=True, kv_memory=part).engine
    engine.close()
    return {**share, "batch": engine.settings.batch}, engine.plan.kv_memory


def one_share(options: dict[str, Any], replicas: int) -> dict[str, Any]:
    """The options of one of `replicas` processes: its share of the memory, and of the processors where --threads is not
    named."""
    with starting():
        from tiermoe.engine.budget import memory_budget

        memory, _ = memory_budget(settings(**options))
    threads = options.get("threads") or max(1, processors() // replicas)
    return {**options, "memory": memory // replicas, "threads": threads}


def serve_replicas(deployed: Deployed, replicas: int, listener: Listener) -> None:
    """Serves replicas of a model until a signal."""
    from tiermoe.serve.replicas import start, stop

    (host, port), address = listener.bound.getsockname()[:2], str(listener)
    listener.bound.close()  # Ray Serve listens there
    memory = format_size(deployed.options["memory"])
    try:
        start(deployed, replicas, host, port, listener.tls, GRACE_S)
        note(f"{deployed.name} at {address}, {replicas} replicas of {memory}; Ctrl-C ends the server")
        wait_for_a_signal()
    finally:
        stop()
