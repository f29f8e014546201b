"""`tiermoe trace`: a routing trace of a model on a text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from tiermoe.cli import options as opt
from tiermoe.cli.output import note, progress_bar
from tiermoe.cli.session import open_session
from tiermoe.config import format_size
from tiermoe.errors import ConfigError, TiermoeError
from tiermoe.lab.cli import options as lab

Neurons = Annotated[
    float | None,
    typer.Option(
        help="Record the neurons with |act(W1 x)| above this threshold too, for corm.",
        metavar="THETA",
        show_default=False,
    ),
]

Costs = Annotated[
    str | None,
    typer.Option(help="Presets to run for what they cost, like all or fate,hobbit.", show_default=False),
]


@opt.engine_options(without=["cache", "chunk", "context", "kv_bits", "preset", "set"])
def trace(
    model: opt.Model,
    text: lab.RecordedText,
    out: Annotated[Path, typer.Option(help="File to write the trace to.", show_default=False)],
    options: dict[str, Any],
    tokens: lab.RecordedTokens = 2048,
    prompt: lab.SequencePrompt = 32,
    sequence: lab.SequenceLength = 256,
    little: Annotated[bool, typer.Option("--little/--no-little", help="Record MoBiLE's little pass too.")] = True,
    little_k: Annotated[
        int | None,
        typer.Option(min=1, help="Experts of a token in that pass. Default: half of its experts.", show_default=False),
    ] = None,
    neurons: Neurons = None,
    costs: Costs = None,
) -> None:
    """Record routing, gate weights, predictions for later layers, and compute times, for `tiermoe simulate`.

    --costs runs presets in the engine on the same text, 45 % of the experts
    cached, and records what their decisions and loads take and how fast the link
    is. `tiermoe simulate` without --link and --machine charges that."""
    content = opt.read_text(text)
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"the folder of {out} does not exist; make it, or choose another --out")
    if neurons is not None and not 0 <= neurons < math.inf:
        raise ConfigError(f"--neurons must be a threshold from 0 on, like 0.05, got {neurons:g}")
    options["preset"], options["warm"] = "lru", False
    cut_text: dict[str, Any] = {}

    def context_for(tokenizer: Any, blueprint: Any, chat: Any) -> int:
        from tiermoe.formats.neurons import neuron_layer
        from tiermoe.lab.measure.texts import SequenceShape, cut_sequences

        if neurons is not None:
            for layer in blueprint.layers:
                neuron_layer(layer)
        cut_text["shape"] = shape = SequenceShape(tokens, prompt, sequence)
        cut_text["ids"] = cut_sequences(tokenizer, content, shape, blueprint.max_context())
        if not blueprint.family.encoder_decoder:
            options["chunk"] = shape.chunk
        return sequence + 1

    runs = _runs(model, content, (prompt, sequence - prompt, tokens), costs, options) if costs else None
    session = open_session(model, options, context_for)
    from tiermoe.lab.measure.record import made_from, write_trace

    settings = session.engine.settings
    try:
        with progress_bar() as progress:
            write_trace(
                out, session.engine, cut_text["ids"], cut_text["shape"],
                made_from(text.name, content, cut_text["shape"], settings), progress, little=little, theta=neurons,
                little_k=little_k, runs=runs,
            )  # fmt: skip
    finally:
        session.engine.close()
    recorded = cut_text["ids"].numel()
    note(f"[{recorded:,} tokens in {len(cut_text['ids'])} sequences, {format_size(out.stat().st_size)}]")
    print(out)


def _runs(
    model: str, content: str, shape: tuple[int, int, int], presets: str, options: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """What each preset, and `NEEDED`, took on the text, in processes of their own. A preset that cannot run, as one
    without its calibration, is left out with a line that says why."""
    from tiermoe.lab.measure.compare import Case, evaluate_apart, presets_asked
    from tiermoe.lab.measure.costs import COST_CACHE, NEEDED

    found = {}
    with progress_bar() as progress:
        for name in dict.fromkeys((*NEEDED, *presets_asked(presets))):
            try:
                found[name] = evaluate_apart(
                    Case(model, content, shape, {**options, "preset": name, "cache": COST_CACHE}), progress
                )
            except TiermoeError as error:
                if name in NEEDED:
                    raise
                note(f"left out {name}: {error}")
    return found
