"""`tiermoe serve --replicas`: processes on Ray Serve behind one address."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiermoe.cli.output import note
from tiermoe.cli.session import open_session
from tiermoe.config import format_size, parse_size
from tiermoe.errors import ConfigError
from tiermoe.process.machine import processors

if TYPE_CHECKING:
    from tiermoe.serve.replicas import Deployed


def need_ray(option: str) -> None:
    """ConfigError, naming the option, where Ray is not installed, with its server."""
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{option} needs {error.name}: pip install 'tiermoe[ray]'") from error


def prepared(
    model: str,
    options: dict[str, Any],
    replicas: int,
    context_for: Callable[[Any, Any], int | None],
    kv_memory: int | None,
) -> tuple[str, dict[str, Any], int | None]:
    """The model, and the options of one of so many processes: its part of the memory and of the processors, and its
    part of `kv_memory`. It is loaded once here, which packs what is not packed, and says what does not fit, before a
    replica finds out."""
    need_ray("--replicas")
    share = one_share(model, options, replicas)
    if Path(model).exists():
        model = str(Path(model).resolve())  # a replica may run in another folder
    if "store" in share:
        share["store"] = Path(share["store"]).resolve()
    its = None if kv_memory is None else kv_memory // replicas
    engine = open_session(model, share, context_for, served=True, kv_memory=its).engine
    engine.close()
    return model, {**share, "batch": engine.settings.batch}, engine.plan.kv_memory


def one_share(model: str, options: dict[str, Any], replicas: int) -> dict[str, Any]:
    """Options with a part of the memory, and of the processors unless threads are named."""
    named = options.get("memory")
    if named is None:
        import tiermoe

        memory = tiermoe.plan(model, **options).budget
    else:
        memory = parse_size(named, "memory")
    threads = options.get("threads") or max(1, processors() // replicas)
    return {**options, "memory": memory // replicas, "threads": threads}


def run_replicas(
    deployed: Deployed, replicas: int, address: tuple[str, int], grace_s: int, wait: Callable[[], None]
) -> None:
    """Answers at an address until `wait` returns."""
    from tiermoe.serve.replicas import start, stop

    host, port = address
    try:
        start(deployed, replicas, host, port, grace_s)
        share = format_size(deployed.options["memory"])
        note(f"{deployed.name} at http://{host}:{port}/v1, {replicas} replicas of {share}; Ctrl-C ends the server")
        wait()
    finally:
        stop()
