"""EdgeMoE's offline part on a real model (section 3.2): a bitwidth for each expert within a tolerated loss, from what
each expert costs alone at 2 bits (`importance`), judged on text that the search has not seen. Dense weights stay in the
bits of the settings."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tiermoe.config import Settings
from tiermoe.lab.measure.importance import OTHERS, BitsMeter, Journal, ModelSource, by_ray, measure_alone, places_of
from tiermoe.lab.measure.tasks import Task
from tiermoe.lab.papers.edgemoe import PRECISIONS, ExpertPlace, Judge, accept, search
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.prepare_store import Progress, ensure_packed, open_or_create, store_root
from tiermoe.offload.cuda import resolve_device


def find_bitwidths(
    blueprint: Blueprint,
    settings: Settings,
    task: Task,
    tolerated_loss: float,
    progress: Progress,
    processes: int | None = None,
    resume_path: Path | None = None,
    ray: bool = False,
) -> dict[str, Any]:
    """A bitwidth for every expert, with which `task` loses at most `tolerated_loss` (0.05 for 5 %) against 16 bits. The
    search runs on the even half of the task; its table is judged on the odd half, where the loss plus its standard
    error must be within the tolerated loss.

    processes: that measure experts side by side (None: one); each loads the model, and they share the memory. ray: Ray
    runs the processes. resume_path: a file to which every measurement is appended; measurements there of the same
    checkpoint, task and settings are not repeated.

    Returns `table` and `importance` (a row of experts per MoE layer; importance is the loss against all experts at 4
    bits), `lower`, `upper`, `k`, `loss` and `loss_error` (on the odd half), `judged` ([lower, upper, k, loss, error] of
    every table that was tried there), `searched` (found on the even half: `lower`, `upper`, `k`, `loss`), `losses`
    (there, 'uniform': bits → loss, 'mixed': k → loss), `metric`, `tolerated_loss`, and `seconds_per_expert` (None where
    nothing was left to measure). ConfigError, with the best found, where the tolerated loss cannot be met, and for a
    task that is too small to be halved."""
    even, odd = task.halves()
    places = places_of(blueprint)
    source = ModelSource.of(blueprint, settings, task)
    journal = Journal(resume_path, _made_from(blueprint, settings, task))
    _pack_all(blueprint, settings, progress)
    with BitsMeter(source) as meter:

        def values(table: Mapping[ExpertPlace, int], half: Task) -> list[float]:
            name = _name(table) if half is even else f"judged {_name(table)}"
            known = journal.get(name)
            if known is None:
                known = meter.values(table, half)
                journal.add(name, known)
            return known

        def lost(half: Task) -> Judge:
            base = values(uniform[0], half)
            return lambda table: half.loss(values(table, half), base)

        uniform = [dict.fromkeys(places, bits) for bits in sorted(PRECISIONS, reverse=True)]
        for done, table in enumerate(uniform, 1):  # before the long part: the first pass finds what cannot work
            values(table, even)
            progress("measuring each precision", done, len(uniform))
        alone, seconds = measure_alone(
            meter, source, even, places, journal, processes or 1, progress, by_ray if ray else None
        )
        four = values(dict.fromkeys(places, OTHERS), even)
        importance = {place: even.loss(alone[place], four).value for place in places}
        seen, unseen = lost(even), lost(odd)
        found = search(
            _reported(lambda table: seen(table).value, "choosing bitwidths", _steps(places), progress),
            importance, tolerated_loss,
        )  # fmt: skip
        most = (len(PRECISIONS) - 1) + _steps(places)
        accepted = accept(_reported(unseen, "judging on other text", most, progress), found, importance, tolerated_loss)
    return {
        "table": _rows(blueprint, accepted.table),
        "importance": _rows(blueprint, importance),
        "lower": accepted.lower,
        "upper": accepted.upper,
        "k": accepted.k,
        "loss": accepted.loss.value,
        "loss_error": accepted.loss.error,
        "judged": [[*tried, *loss] for tried, loss in accepted.judged.items()],
        "searched": {"lower": found.lower, "upper": found.upper, "k": found.k, "loss": found.loss},
        "losses": {"uniform": found.uniform, "mixed": found.mixed},
        "metric": task.name,
        "tolerated_loss": tolerated_loss,
        "seconds_per_expert": seconds,
    }


Measure = TypeVar("Measure")


def _steps(places: Sequence[ExpertPlace]) -> int:
    """The most measurements of a search."""
    return len(PRECISIONS) + (math.ceil(math.log2(len(places))) if len(places) > 1 else 0)


def _reported(
    measure: Callable[[Mapping[ExpertPlace, int]], Measure], what: str, most: int, progress: Progress
) -> Callable[[Mapping[ExpertPlace, int]], Measure]:
    """`measure`, which reports each measurement of at most `most`."""
    done = 0

    def reporting(table: Mapping[ExpertPlace, int]) -> Measure:
        nonlocal done
        found = measure(table)
        done += 1
        progress(what, min(done, most), most)
        return found

    return reporting


def _pack_all(blueprint: Blueprint, settings: Settings, progress: Progress) -> None:
    """Packs every precision that is tried, so that no two processes begin to pack."""
    store = open_or_create(blueprint, store_root(blueprint, settings.store))
    device = resolve_device(settings.device)
    for bits in PRECISIONS:
        ensure_packed(store, blueprint, bits, settings.quantizer_used, settings.dense_bits_used, progress, device)


def _rows(blueprint: Blueprint, values: Mapping[ExpertPlace, Any]) -> list[list[Any]]:
    return [[values[layer, expert] for expert in range(moe.experts)] for layer, moe in enumerate(blueprint.layers)]


def _name(table: Mapping[ExpertPlace, int]) -> str:
    kinds = sorted(set(table.values()))
    if len(kinds) == 1:
        return f"all {kinds[0]}"
    return "mixed " + _digest([[*place, bits] for place, bits in sorted(table.items())])


def _made_from(blueprint: Blueprint, settings: Settings, task: Task) -> str:
    return _digest(
        [blueprint.checkpoint.fingerprint(), settings.quantizer_used, settings.dense_bits_used, task.digest()]
    )


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()[:16]
