"""A loaded model whose experts' bits change from pass to pass, to measure what they cost."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiermoe.compose import Tables
from tiermoe.composition import Composition
from tiermoe.config import CacheSize, Settings
from tiermoe.policy.precision import PrecisionContext, Table
from tiermoe.runtime.blueprint import Blueprint, inspect_model
from tiermoe.runtime.calibration.tasks import Task
from tiermoe.runtime.composition import Resolved
from tiermoe.runtime.evaluation.evaluate import reserved_bytes
from tiermoe.runtime.load import load_resolved
from tiermoe.runtime.prepare_store import Progress, ensure_packed, open_or_create, store_root
from tiermoe.systems.edgemoe import PRECISIONS, Place
from tiermoe.tiers.cuda import resolve_device

_PAIRS = ((4, 2), (16, 8), (8, 4))  # precisions that are held at once: one or two neighbours are asked for
_LOW_EVERY = 4  # of so many slots' bytes, about one is for the lower precision


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

    def __init__(self, source: Source, task: Task) -> None:
        self._source, self._task = source, task
        self._model: Any = None

    def __enter__(self) -> Measuring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def value(self, table: Mapping[Place, int]) -> float:
        """The task's metric with the experts in the bits of `table`: one precision, or two neighbours."""
        self._hold(set(table.values()))
        engine = self._model.tiermoe
        top_k = [layer.top_k for layer in engine.store.layers]
        with engine.scheduler.ruled_by(Table(PrecisionContext(engine.settings.bits, top_k, table))):
            return self._task.value(self._model)

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
        ensure_packed(store, blueprint, bits, settings.quantizer, settings.dense_bits_used, progress, device)


def _holding(blueprint: Blueprint, settings: Settings, pair: tuple[int, int]) -> Resolved:
    """An engine of two precisions. The table only says how its slots are shared out: most are high, as most experts
    are while one is measured alone."""
    high, low = pair
    table = {
        place: low if index % _LOW_EVERY == _LOW_EVERY - 1 else high for index, place in enumerate(places_of(blueprint))
    }
    composition = Composition("bitwidths", "measures what bits per expert cost", precision="table", exact_bits=True)
    return Resolved(replace(settings, bits=high, warm=False), composition, Tables(table), pair)
