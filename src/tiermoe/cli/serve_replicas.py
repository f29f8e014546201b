"""`tiermoe serve --replicas`: several processes of one model behind one address, on Ray Serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiermoe.cli.listening import Listener, wait_for_a_signal
from tiermoe.cli.output import note, starting
from tiermoe.cli.session import open_session
from tiermoe.config import format_size, settings
from tiermoe.platform.machine import processors


def prepare_replicas(
    model: str,
    options: dict[str, Any],
    replicas: int,
    context_for: Callable[[Any, Any], int | None],
    kv_memory: int | None,
) -> tuple[dict[str, Any], int]:
    """(options, KV cache in bytes) of one of `replicas` processes: its share of memory, processors and `kv_memory`. The
    model is loaded once here: that packs it where it is not packed, and refuses a share that is too small before a
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


def serve_replicas(
    model: str, share: dict[str, Any], name: str, sampling: Any, listener: Listener, max_queue: int, guesses: bool,
    kv_memory: int, template: str | None, *, replicas: int, grace_s: int,
) -> None:  # fmt: skip
    """Serves `replicas` of a model until a signal, by the fields of `Deployed`. grace_s: seconds for answers under way
    in the end."""
    from tiermoe.serve.replicas import Deployed, start, stop

    if Path(model).exists():
        model = str(Path(model).resolve())  # a replica may run in another folder
    deployed = Deployed(model, share, name, sampling, listener.access, max_queue, guesses, kv_memory, template)
    (host, port), address = listener.bound.getsockname()[:2], str(listener)
    listener.bound.close()  # Ray Serve listens there
    try:
        start(deployed, replicas, host, port, listener.tls, grace_s)
        note(f"{name} at {address}, {replicas} replicas of {format_size(share['memory'])}; Ctrl-C ends the server")
        wait_for_a_signal()
    finally:
        stop()
