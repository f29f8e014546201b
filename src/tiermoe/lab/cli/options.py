"""Options that several of the laboratory's commands share: the text that is scored or recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tiermoe.cli.options import read_text
from tiermoe.errors import ConfigError
from tiermoe.lab.measure.pairs import Pair, read_pairs, require_pairs

# --- what is timed: bench, compare ---

WithoutKernels = Annotated[
    bool,
    typer.Option("--without-kernels", help="Measure torch's operators in the place of the compiled kernels."),
]

# --- a text that is scored: eval, compare ---

ScoredText = Annotated[Path | None, typer.Option("--text", help="A text file to score, UTF-8.", show_default=False)]
ScoredPairs = Annotated[
    Path | None,
    typer.Option(
        "--pairs",
        help='Score summaries instead, of documents: {"document": ..., "summary": ...} a line. The first one only '
        "warms the cache.",
        show_default=False,
    ),
]
ScoredMetric = Annotated[
    str,
    typer.Option(
        "--metric",
        help="Metric of --pairs: perplexity of the summaries behind their documents, or rouge2 of greedy summaries.",
    ),
]
ScoredTokens = Annotated[int, typer.Option(help="Tokens to score, in whole windows spread over the text.")]
Window = Annotated[int, typer.Option(help="Scored tokens of a window, each decoded on its own; of a summary at most.")]
WindowPrompt = Annotated[
    int | None,
    typer.Option(
        help="Tokens before them in a window, which run as a prompt. Default: 32; of a document 512 at most.",
        show_default=False,
    ),
]
Reference = Annotated[
    str, typer.Option(help="Compare with the checkpoint's own weights: 16bit, none, or a saved file.")
]

# --- a text whose routing is recorded: trace, calibrate ---

RecordedText = Annotated[Path, typer.Option("--text", help="A text file to run, UTF-8.", show_default=False)]
RecordedTokens = Annotated[int, typer.Option(help="Tokens to record, in whole sequences spread over the text.")]
SequencePrompt = Annotated[int, typer.Option(help="Tokens of a sequence that run as its prompt.")]
SequenceLength = Annotated[
    int, typer.Option(help="Tokens of a sequence; those after its prompt are decoded one by one.")
]


@dataclass(frozen=True, slots=True)
class Material:
    """What eval and compare score: a text, or documents with their summaries. prompt: tokens that are read before."""

    text: str
    pairs: tuple[Pair, ...]
    prompt: int


def read_material(text: Path | None, pairs: Path | None, prompt: int | None) -> Material:
    """The text or the pairs. ConfigError unless one of both is named, and where it cannot be read."""
    if (text is None) == (pairs is None):
        raise ConfigError(
            "name what is scored: a text with --text, or documents and their summaries with --pairs"
            + ("" if text is None else ", not both")
        )
    if text is not None:
        return Material(read_text(text), (), 32 if prompt is None else prompt)
    assert pairs is not None
    return Material("", tuple(require_pairs(read_pairs(pairs))), 512 if prompt is None else prompt)
