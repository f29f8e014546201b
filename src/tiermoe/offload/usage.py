"""How often experts are used: counts of this run, what they say of caches of other sizes, and the record that a run
leaves to the next. The record is a small file beside the store, of a checkpoint in one precision. It decides how soon
experts are there and changes no token, so that a file that is torn, foreign or cannot be written is ignored."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tiermoe.platform.json_files import read_json, replace_unlocked
from tiermoe.types import Demand, ExpertKey

WINDOW = 1 << 15
"""Uses of a layer's experts after which counts of earlier runs are worth nothing: 4,096 tokens of 8 experts."""

WATCHED = 8
"""Layers, spread evenly, whose reuse distances are counted: a use takes half a microsecond."""


class Uses:
    """Tokens that each expert has served in this run. experts: number of each layer's."""

    def __init__(self, experts: Sequence[int]) -> None:
        self.counts = [[0] * count for count in experts]  # counts[layer][expert]
        self._recorded: list[tuple[int, Sequence[Demand]]] = []  # in the running pass

    def start_pass(self) -> None:
        """What was recorded before stays."""
        self._recorded.clear()

    def record(self, layer: int, demands: Sequence[Demand]) -> None:
        """The router of a layer has spoken."""
        self._recorded.append((layer, demands))
        row = self.counts[layer]
        for demand in demands:
            row[demand.expert] += demand.tokens

    def discard_pass(self) -> None:
        """The running pass does not count."""
        for layer, demands in self._recorded:
            row = self.counts[layer]
            for demand in demands:
                row[demand.expert] -= demand.tokens
        self._recorded.clear()


def merged(earlier: Sequence[Sequence[float]], uses: Sequence[Sequence[float]]) -> list[list[float]]:
    """Uses of a run added to those of the runs before it, which fade by as much of `WINDOW` as the run fills. Both: a
    row of experts for each layer; earlier: empty if there were no runs."""
    if not earlier:
        return [list(row) for row in uses]
    result = []
    for old, new in zip(earlier, uses, strict=True):
        kept = max(0.0, 1 - sum(new) / WINDOW)
        result.append([kept * before + now for before, now in zip(old, new, strict=True)])
    return result


def shares_of(uses: Sequence[Sequence[float]], top_k: Sequence[int]) -> list[list[float]]:
    """The share of a layer's tokens that each expert served. uses: a row of experts for each layer; top_k: experts of a
    token in each."""
    shares = []
    for row, k in zip(uses, top_k, strict=True):
        tokens = max(sum(row) / k, 1.0)
        shares.append([count / tokens for count in row])
    return shares


def most_used(experts: Sequence[int], bits: int, uses: Sequence[Sequence[float]], everything: bool) -> list[ExpertKey]:
    """The experts of a model in the precision `bits`, most used first, of equal ones in their order. experts: number of
    each layer's. uses: a row of experts for each layer; empty if nothing is known. everything: unused ones too."""
    ranked = [
        (-(uses[layer][expert] if uses else 0.0), layer, expert)
        for layer, count in enumerate(experts)
        for expert in range(count)
    ]
    return [ExpertKey(layer, expert, bits) for used, layer, expert in sorted(ranked) if used or everything]


class Reuse:
    """Reuse distances of decoded tokens' experts. experts: number of each layer's.

    An LRU cache that gives each layer c slots hits the uses with fewer than c other experts between them, whatever c
    is, so one list a layer stands for caches of all sizes (Mattson and others, 1970)."""

    def __init__(self, experts: Sequence[int]) -> None:
        count = min(len(experts), WATCHED)
        # watched layer → its experts, most recently used first
        self._recent: dict[int, list[int]] = {index * len(experts) // count: [] for index in range(count)}
        self.distances = [0] * max(experts)  # distances[d]: uses with d other experts of the layer since the last one
        self.first = 0  # uses of experts that had not been used

    def record(self, layer: int, demands: Sequence[Demand], phase: str) -> None:
        """The router of a layer has spoken. A prompt's experts are used, but their distances do not count."""
        recent = self._recent.get(layer)
        if recent is None:
            return
        if phase == "decode":
            for demand in demands:  # before any of them moves: a token's experts are asked for at once
                if demand.expert in recent:
                    self.distances[recent.index(demand.expert)] += 1
                else:
                    self.first += 1
        for demand in demands:
            if demand.expert in recent:
                recent.remove(demand.expert)
            recent.insert(0, demand.expert)


@dataclass(frozen=True, slots=True)
class SizeCurve:
    """What a run says of caches of other sizes. Hits of another policy or of prefetching, in relation to those of LRU,
    are a factor, measured at the size that ran."""

    distances: tuple[float, ...]  # as `Reuse` counts them
    first: float  # as `Reuse` counts them
    slots: int  # of the cache that ran
    layers: int
    miss_rate: float  # of the experts that were asked for
    compute_s: float  # seconds of a decoded token
    wait_s: float  # seconds of a decoded token, waiting for experts

    def at(self, slots: int) -> tuple[float, float]:
        """(hit rate, decoded tokens a second) with `slots` slots: waiting is in proportion to misses, and misses to an
        LRU cache's."""
        lru = missed(self.distances, self.first, self.slots / self.layers)
        factor = self.miss_rate / lru if lru else 1.0
        rate = min(1.0, factor * missed(self.distances, self.first, slots / self.layers))
        return 1 - rate, 1 / (self.compute_s + self.wait_s * rate / self.miss_rate)


def missed(distances: Sequence[float], first: float, slots: float) -> float:
    """Share of the uses that `Reuse` counted that an LRU cache of `slots` slots a layer misses; 0 if there are none.
    Between two whole numbers of slots in proportion."""
    total = sum(distances) + first
    whole = min(int(slots), len(distances))
    hits = sum(distances[:whole])
    if whole < len(distances):
        hits += (slots - whole) * distances[whole]
    return 1 - hits / total if total else 0.0


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
    """The record of a checkpoint with this fingerprint and so many experts a layer; an empty one if there is none
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
    """The curve that a record has. ValueError, KeyError or TypeError if the values are no curve."""
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
