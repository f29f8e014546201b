"""What bits cost: a loaded model whose experts' bits change from pass to pass, and the values it takes long to measure,
kept as they come, so that a run that was killed goes on where it stopped."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiermoe.config import CacheSize, Settings
from tiermoe.decide.compose import Tables
from tiermoe.decide.composition import Composition
from tiermoe.decide.precision import PrecisionContext, Table
from tiermoe.engine.load import load_resolved
from tiermoe.measure.evaluate import reserved_bytes
from tiermoe.measure.tasks import Task
from tiermoe.model.blueprint import Blueprint, inspect_model
from tiermoe.model.prepare_store import Progress, ensure_packed, open_or_create, store_root
from tiermoe.process.json_files import parse_json
from tiermoe.systems.edgemoe import PRECISIONS, Place
from tiermoe.systems.resolved import Resolved
from tiermoe.tiers.cuda import resolve_device

_PAIRS = ((4, 2), (16, 8), (8, 4))  # precisions that are held at once: one or two neighbours are asked for
_LOW_EVERY = 4  # of so many slots' bytes, about one is for the lower precision


class Measured:
    """Name → values of a task's items, of what is described by `made_from`; appended to the file `path` (None: kept in
    memory alone), one JSON object a line. Lines of other conditions and a line that was cut short are passed over and
    stay."""

    def __init__(self, path: Path | None, made_from: str) -> None:
        self._path, self._made_from = path, made_from
        self._values: dict[str, list[float]] = {}
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            file.seek(0)
            content = file.read()
            if content and not content.endswith(b"\n"):
                file.write(b"\n")
        for line in content.splitlines():
            self._read(line)

    def get(self, name: str) -> list[float] | None:
        """The values, None where they are yet to be measured."""
        return self._values.get(name)

    def add(self, name: str, values: list[float]) -> None:
        """Keeps values, in the file too before this returns."""
        self._values[name] = values
        if self._path is not None:
            with open(self._path, "a") as file:
                file.write(json.dumps({"of": self._made_from, "name": name, "values": values}) + "\n")

    def _read(self, line: bytes) -> None:
        try:
            entry = parse_json(line)
            if entry["of"] == self._made_from:
                self._values[str(entry["name"])] = [float(value) for value in entry["values"]]
        except (ValueError, KeyError, TypeError):
            return


@dataclass(frozen=True, slots=True)
class Source:
    """What a measuring model is loaded from; it goes to other processes."""

    directory: Path
    name: str
    settings: Settings

    @classmethod
    def of(cls, blueprint: Blueprint, settings: Settings, task: Task) -> Source:
        """Room for every expert in two precisions as far as memory goes, and passes over a whole text of `task`."""
        weights = sum(layer.experts * layer.expert_elements for layer in blueprint.layers)
        logits = reserved_bytes(task.tokens, blueprint.config.vocab_size, blueprint.dtype.itemsize)
        longest = blueprint.max_context() or task.tokens + 1
        changed = replace(
            settings,
            dense_bits=settings.dense_bits_used,  # the same whatever the experts have
            context=min(task.tokens + 1, longest),
            chunk=settings.chunk if blueprint.family.encoder_decoder else max(settings.chunk, task.tokens + 1),
            cache=settings.cache or CacheSize(nbytes=2 * weights * blueprint.dtype.itemsize),
            memory=None if settings.memory is None else max(settings.memory - logits, 1),
        )
        return cls(blueprint.directory, blueprint.name, changed)


class Measuring:
    """Holds two precisions of the experts at a time and is loaded again for two others. Close it, or use it as a
    context."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._model: Any = None

    def __enter__(self) -> Measuring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def values(self, table: Mapping[Place, int], task: Task) -> list[float]:
        """The task's metric with the experts in the bits of `table`: one precision, or two neighbours."""
        self._hold(set(table.values()))
        engine = self._model.tiermoe
        top_k = [layer.top_k for layer in engine.store.layers]
        with engine.scheduler.ruled_by(Table(PrecisionContext(engine.settings.bits_used, top_k, table))):
            return task.values(self._model)

    def close(self) -> None:
        """Lets the model go; measuring again loads it again."""
        if self._model is not None:
            self._model.tiermoe.close()
            self._model = None
            gc.collect()

    def _hold(self, needed: set[int]) -> None:
        if self._model is not None and needed <= set(self._model.tiermoe.precisions):
            return
        self.close()
        pair = next(pair for pair in _PAIRS if needed <= set(pair))
        blueprint = inspect_model(self._source.directory, self._source.name, self._source.settings.store)
        self._model = load_resolved(blueprint, _holding(blueprint, self._source.settings, pair))


def places_of(blueprint: Blueprint) -> list[Place]:
    """Every expert, in order."""
    return [(layer, expert) for layer, moe in enumerate(blueprint.layers) for expert in range(moe.experts)]


def pack_all(blueprint: Blueprint, settings: Settings, progress: Progress) -> None:
    """Packs every precision that is tried, so that no two processes begin to."""
    store = open_or_create(blueprint, store_root(blueprint, settings.store))
    device = resolve_device(settings.device)
    for bits in PRECISIONS:
        ensure_packed(store, blueprint, bits, settings.quantizer_used, settings.dense_bits_used, progress, device)


def _holding(blueprint: Blueprint, settings: Settings, pair: tuple[int, int]) -> Resolved:
    """An engine of two precisions. The table only says how its slots are shared out: most are high, as most experts
    are while one is measured alone."""
    high, low = pair
    table = {
        place: low if index % _LOW_EVERY == _LOW_EVERY - 1 else high for index, place in enumerate(places_of(blueprint))
    }
    composition = Composition("bitwidths", "measures what bits per expert cost", precision="table", exact_bits=True)
    return Resolved(replace(settings, bits=high, warm=False), composition, Tables(table), pair)
