"""What the runs of a checkpoint in one precision have found, in a small file beside its store. It decides how soon
experts are there and changes no token, so a file that is torn, foreign or cannot be written is passed over."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tiermoe.decide.reuse import SizeCurve
from tiermoe.process.json_files import read_json

FORMAT = "tiermoe-runs"
VERSION = 1


@dataclass(slots=True)
class RunRecord:
    """`uses[layer][expert]`: tokens served, those of earlier runs faded; empty: nothing is known. `prefetching`:
    whether it paid, by the circumstances in which that was measured. `curve`: what the last run that decoded enough
    says of other sizes of the cache."""

    uses: list[list[float]] = field(default_factory=list)
    prefetching: dict[str, bool] = field(default_factory=dict)
    curve: SizeCurve | None = None


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
    """ValueError, KeyError or TypeError where they are none."""
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


def replace_unlocked(path: Path, content: bytes) -> None:
    """Replaces a small file that can be lost, without the folder's lock: several processes may do so at once, and the
    last one stays. Where it cannot be written nothing happens."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
