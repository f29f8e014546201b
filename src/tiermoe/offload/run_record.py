"""The record of earlier runs of a checkpoint in one precision, in a small file beside its store. It decides how soon
experts are there and changes no token, so that a file that is torn, foreign or cannot be written is ignored."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tiermoe.offload.usage import SizeCurve
from tiermoe.platform.json_files import read_json, replace_unlocked

FORMAT = "tiermoe-runs"
VERSION = 1


@dataclass(slots=True)
class RunRecord:
    """What earlier runs have found."""

    uses: list[list[float]] = field(default_factory=list)
    """[layer][expert]: tokens served, those of earlier runs faded; empty: nothing is known."""
    prefetching: dict[str, bool] = field(default_factory=dict)
    """Whether prefetching paid, by the circumstances in which that was measured."""
    curve: SizeCurve | None = None
    """What the last run that decoded enough says of other sizes of the cache."""


def record_path(root: Path, precision: str) -> Path:
    """The file of a precision's record in the store at `root`."""
    return root / f"runs-{precision}.json"


def read_record(path: Path, fingerprint: str, experts: Sequence[int]) -> RunRecord:
    """The record of a checkpoint with this fingerprint and so many experts a layer; an empty one where there is none
    that can be used."""
    try:
        document = read_json(path)
        if (document["format"], document["version"], document["fingerprint"]) != (FORMAT, VERSION, fingerprint):
            return RunRecord()
        uses = [[float(count) for count in row] for row in document["uses"]]
        prefetching = {str(name): bool(pays) for name, pays in document["prefetching"].items()}
        curve = _curve(document["curve"]) if document.get("curve") else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return RunRecord()
    whole = all(math.isfinite(count) and count >= 0 for row in uses for count in row)
    if not whole or [len(row) for row in uses] != list(experts):
        return RunRecord()
    return RunRecord(uses, prefetching, curve)


def _curve(values: dict[str, Any]) -> SizeCurve:
    """The curve that a record has. ValueError, KeyError or TypeError where the values are no curve."""
    curve = SizeCurve(
        tuple(float(count) for count in values["distances"]), float(values["first"]), int(values["slots"]),
        int(values["layers"]), float(values["miss_rate"]), float(values["compute_s"]), float(values["wait_s"]),
    )  # fmt: skip
    numbers = [*curve.distances, curve.first, curve.wait_s]
    if not all(math.isfinite(each) and each >= 0 for each in numbers) or curve.slots < 1 or curve.layers < 1:
        raise ValueError
    if not (0 < curve.miss_rate <= 1 and 0 < curve.compute_s < math.inf):
        raise ValueError
    return curve


def write_record(path: Path, fingerprint: str, record: RunRecord) -> None:
    """Replaces the record: a reader sees the old or the new one. Where it cannot be written nothing happens."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": fingerprint,
        "uses": [[round(count, 1) for count in row] for row in record.uses],
        "prefetching": record.prefetching,
        "curve": record.curve and asdict(record.curve),
    }
    replace_unlocked(path, json.dumps(document, separators=(",", ":")).encode())
