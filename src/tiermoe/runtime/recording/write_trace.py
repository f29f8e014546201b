"""A loaded model and a text's sequences → a trace file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from tiermoe import __version__
from tiermoe.config import Settings
from tiermoe.runtime.prepare_store import Progress
from tiermoe.runtime.recording.measure_times import measure_times
from tiermoe.runtime.recording.recorder import DISTANCES, Recorder
from tiermoe.runtime.recording.sequences import Cut
from tiermoe.runtime.recording.trace_header import header_of
from tiermoe.trace_file import TraceWriter

MadeFrom = dict[str, str | int | float]


def write_trace(
    path: Path,
    model: Any,
    ids: torch.Tensor,
    shape: Cut,
    made_from: MadeFrom,
    progress: Progress,
    distances: Sequence[int] = DISTANCES,
    little: bool = True,
    theta: float | None = None,
) -> None:
    """Records the sequences `ids` (sequences, length) and writes them to `path`, which appears whole or not at all.
    Times are measured first, on the first sequence. distances, little, theta: as for `Recorder`. TraceError where
    `path` cannot be written."""
    times = measure_times(model, ids[0], shape.prompt)
    if theta is not None:
        made_from = {**made_from, "theta": theta}
    with Recorder(model, distances, little, theta) as recorder:
        header = header_of(model, times, recorder.holds, recorder.distances, made_from)
        with TraceWriter(path, header) as writer:
            done = 0
            for number, sequence in enumerate(ids):
                for passed in recorder.passes(sequence, shape.prompt, number):
                    writer.add(passed)
                    done += 1
                    progress("recording", done, shape.passes)


def made_from(text_name: str, text: str, shape: Cut, settings: Settings) -> MadeFrom:
    """What a trace or a profile is made from, beside the checkpoint: the same of the same, so without a date."""
    return {
        "text": text_name,
        "text_xxh3": xxhash.xxh3_64_hexdigest(text.encode()),
        "tokens": shape.sequences * shape.sequence,
        "prompt": shape.prompt,
        "sequence": shape.sequence,
        "bits": settings.bits,
        "dense_bits": settings.dense_bits_used,
        "quantizer": settings.quantizer,
        "version": __version__,
    }
