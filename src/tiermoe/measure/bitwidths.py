"""EdgeMoE's offline part on a real model (section 3.2): what each expert costs alone at 2 bits, and from that a
bitwidth for each within a tolerated loss, judged on text that the search has not seen. Weights that are no experts'
stay as the settings say."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tiermoe.config import Settings
from tiermoe.measure.importance import OTHERS, measure_alone
from tiermoe.measure.measuring import Measured, Measuring, Source, pack_all, places_of
from tiermoe.measure.on_ray import by_ray
from tiermoe.measure.tasks import Task
from tiermoe.model.blueprint import Blueprint
from tiermoe.model.prepare_store import Progress
from tiermoe.systems.edgemoe import PRECISIONS, Judge, Place, accept, search


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
    even half of the task says which experts matter and where the search ends; what that finds is judged on the odd one,
    where the loss with its standard error must be within what is tolerated.

    processes: that measure experts side by side (None: one); each loads the model, and the memory is shared among
    them. ray: that Ray runs. resume_path: a file to which every measurement is appended; what it holds of the same
    checkpoint, task and settings is not measured again.

    Returns `table` and `importance` (a row of experts per MoE layer; importance is the loss against all experts at 4
    bits), `lower`, `upper`, `k`, `loss` and `loss_error` (on the odd half), `judged` ([lower, upper, k, loss, error] of
    all that were tried there), `searched` (what was found on the even half: `lower`, `upper`, `k`, `loss`), `losses`
    (there, 'uniform': bits → loss, 'mixed': k → loss), `metric`, `tolerated_loss`, and `seconds_per_expert` (None where
    nothing was left to measure). ConfigError, with the best found, where the tolerated loss cannot be met, and for a
    task that is too small to be halved."""
    even, odd = task.halves()
    places = places_of(blueprint)
    source = Source.of(blueprint, settings, task)
    measured = Measured(resume_path, _made_from(blueprint, settings, task))
    pack_all(blueprint, settings, progress)
    with Measuring(source) as measuring:

        def values(table: Mapping[Place, int], half: Task) -> list[float]:
            name = _name(table) if half is even else f"judged {_name(table)}"
            known = measured.get(name)
            if known is None:
                known = measuring.values(table, half)
                measured.add(name, known)
            return known

        def lost(half: Task) -> Judge:
            base = values(uniform[0], half)
            return lambda table: half.loss(values(table, half), base)

        uniform = [dict.fromkeys(places, bits) for bits in sorted(PRECISIONS, reverse=True)]
        for done, table in enumerate(uniform, 1):  # before the long part: the first pass finds what cannot work
            values(table, even)
            progress("measuring each precision", done, len(uniform))
        alone, seconds = measure_alone(
            measuring, source, even, places, measured, processes or 1, progress, by_ray if ray else None
        )
        four = values(dict.fromkeys(places, OTHERS), even)
        importance = {place: even.loss(alone[place], four).value for place in places}
        seen, unseen = lost(even), lost(odd)
        found = search(
            _told(lambda table: seen(table).value, "choosing bitwidths", _steps(places), progress),
            importance, tolerated_loss,
        )  # fmt: skip
        most = (len(PRECISIONS) - 1) + _steps(places)
        accepted = accept(_told(unseen, "judging on other text", most, progress), found, importance, tolerated_loss)
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


def _steps(places: Sequence[Place]) -> int:
    """The most measurements of a search."""
    return len(PRECISIONS) + (math.ceil(math.log2(len(places))) if len(places) > 1 else 0)


def _told(
    measure: Callable[[Mapping[Place, int]], Measure], what: str, most: int, progress: Progress
) -> Callable[[Mapping[Place, int]], Measure]:
    """`measure`, each measurement of at most `most` reported."""
    done = 0

    def telling(table: Mapping[Place, int]) -> Measure:
        nonlocal done
        found = measure(table)
        done += 1
        progress(what, min(done, most), most)
        return found

    return telling


def _rows(blueprint: Blueprint, values: Mapping[Place, Any]) -> list[list[Any]]:
    return [[values[layer, expert] for expert in range(moe.experts)] for layer, moe in enumerate(blueprint.layers)]


def _name(table: Mapping[Place, int]) -> str:
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
