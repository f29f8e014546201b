"""Loading a model for a command: prompt first, so that the plan knows the context, then the model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiermoe.cli.output import note, progress_bar, waiting


@dataclass(slots=True)
class Session:
    """A model's engine, its tokenizer, and what loading took in seconds."""

    engine: Any
    tokenizer: Any
    load_s: float


def open_session(
    model: str,
    options: dict[str, Any],
    context_for: Callable[[Any, Any], int | None],
    on_progress: Callable[[str, int, int], None] | None = None,
    served: bool = False,
) -> Session:
    """Loads `model`. `context_for(tokenizer, blueprint)` gives the tokens to reserve memory for where no
    context is asked for; it may refuse the prompt before anything heavy happens. on_progress: told of packing as the
    terminal is. served: memory is reserved for what a server's batch asks of a step, and for as many requests as there
    is room for where no batch is named. The plan's warnings go to standard error."""
    started = time.perf_counter()
    with waiting("starting"):
        from tiermoe.process import footprint

        footprint.import_libraries(own_process=True)
        from tiermoe.config import format_size, settings
        from tiermoe.engine.describe import loss_of
        from tiermoe.engine.load import start
        from tiermoe.model.blueprint import inspect_model
        from tiermoe.model.hub import load_tokenizer, resolve_model
        from tiermoe.types import USUAL

        asked = settings(**options)
        directory = resolve_model(model)
        blueprint = inspect_model(directory, model, asked.store)
        tokenizer = load_tokenizer(directory)
        context = context_for(tokenizer, blueprint)
        if context is not None and options.get("context") is None:
            options = {**options, "context": context}
    packed: set[str] = set()
    with progress_bar() as progress:

        def packing(what: str, done: int, total: int) -> None:
            packed.add(what)
            progress(what, done, total)
            if on_progress is not None:
                on_progress(what, done, total)

        asked, use = settings(**options), USUAL
        if served:
            from tiermoe.serve.scoring import use_of

            use = use_of(blueprint.config.vocab_size, asked.chunk)
            asked = asked if "batch" in options else _with_room(blueprint, asked, use)
        engine = start(blueprint, asked, packing, use)
    loss = loss_of(engine, blueprint)
    if packed and loss:
        note(loss)
    plan = engine.plan
    if options.get("memory") is None:
        note(f"memory: {format_size(plan.budget)}, {plan.budget_source}; --memory sets another bound")
    for warning in plan.warnings:
        note(f"note: {warning}")
    return Session(engine, tokenizer, time.perf_counter() - started)


def _with_room(blueprint: Any, asked: Any, use: Any) -> Any:
    """Settings of a server for as many requests at once as there is room for."""
    from dataclasses import replace

    from tiermoe.engine.load import plan_for
    from tiermoe.serve.room import MOST_AT_ONCE, requests_at_once

    count = requests_at_once(lambda batch: plan_for(blueprint, replace(asked, batch=batch), use))
    if count < MOST_AT_ONCE:
        note(
            f"note: requests that run at once: {count}; keys and values of {2 * count} would leave experts too little "
            f"memory; --max-batch names another number, --context fewer tokens for each"
        )
    return replace(asked, batch=count)


def make_sampling(**values: Any) -> Any:
    """`Sampling` of these values, checked. ConfigError where one is out of range."""
    from tiermoe.process import footprint

    footprint.import_libraries(own_process=True)
    from tiermoe.generation.sampling import Sampling

    return Sampling(**values)


def choose_sampling(blueprint: Any, named: dict[str, Any], otherwise: Any) -> Any:
    """`Sampling` for a model: as `named`, as its generation_config.json says, or as `otherwise`. A line on standard
    error tells of the file's where it makes the answer random."""
    from tiermoe.generation.sampling import sampling_for

    config = blueprint.generation_config()
    sampling = sampling_for(config, named, otherwise)
    if sampling != sampling_for(None, named, otherwise) and sampling.temperature and "temperature" not in named:
        note(
            f"sampling as the model's generation_config.json says: temperature {sampling.temperature:g}, top-p "
            f"{sampling.top_p:g}, top-k {sampling.top_k or 'all'}; --temperature 0 takes the likeliest tokens"
        )
    return sampling
