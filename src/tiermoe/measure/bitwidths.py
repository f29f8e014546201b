"""EdgeMoE's offline part on a real model (section 3.2): what each expert costs alone at 2 bits, and from that a
bitwidth for each within a tolerated loss. Weights that are no experts' stay as the settings say."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tiermoe.config import Settings
from tiermoe.measure.importance import OTHERS, measure_alone
from tiermoe.measure.measuring import Measured, Measuring, Source, pack_all, places_of
from tiermoe.measure.tasks import Perplexity, Task
from tiermoe.model.blueprint import Blueprint
from tiermoe.model.prepare_store import Progress
from tiermoe.systems.edgemoe import PRECISIONS, Loss, Place, search


def find_bitwidths(
    blueprint: Blueprint,
    settings: Settings,
    ids: torch.Tensor,
    tolerated_loss: float,
    progress: Progress,
    processes: int | None = None,
    resume_path: Path | None = None,
) -> dict[str, Any]:
    """`find_bitwidths_for` the perplexity of `ids` (sequences, length)."""
    return find_bitwidths_for(blueprint, settings, Perplexity(ids), tolerated_loss, progress, processes, resume_path)


def find_bitwidths_for(
    blueprint: Blueprint,
    settings: Settings,
    task: Task,
    tolerated_loss: float,
    progress: Progress,
    processes: int | None = None,
    resume_path: Path | None = None,
) -> dict[str, Any]:
    """A bitwidth for every expert, with which `task` loses at most `tolerated_loss` (0.05 for 5 %) against 16 bits.

    processes: that measure experts side by side (None: one); each loads the model, and the memory is shared among
    them. resume_path: a file to which every measurement is appended; what it holds of the same checkpoint, task and
    settings is not measured again.

    Returns `table` and `importance` (a row of experts per MoE layer; importance is the loss against all experts at 4
    bits), `lower`, `upper`, `k`, `loss`, `losses` ('uniform': bits → loss, 'mixed': k → loss), `metric`,
    `tolerated_loss`, and `seconds_per_expert` (None where nothing was left to measure). ConfigError, with the best
    found, where the tolerated loss cannot be met."""
    places = places_of(blueprint)
    source = Source.of(blueprint, settings, task)
    measured = Measured(resume_path, _made_from(blueprint, settings, task))
    pack_all(blueprint, settings, progress)
    with Measuring(source, task) as measuring:

        def value(table: Mapping[Place, int]) -> float:
            name = _name(table)
            known = measured.get(name)
            if known is None:
                known = measuring.value(table)
                measured.add(name, known)
            return known

        uniform = [dict.fromkeys(places, bits) for bits in sorted(PRECISIONS, reverse=True)]
        for done, table in enumerate(uniform, 1):  # before the long part: the first pass finds what cannot work
            value(table)
            progress("measuring each precision", done, len(uniform))
        alone, seconds = measure_alone(measuring, source, task, places, measured, processes or 1, progress)
        four = value(dict.fromkeys(places, OTHERS))
        importance = {place: task.loss(alone[place], four) for place in places}
        base = value(uniform[0])
        loss = _told(lambda table: task.loss(value(table), base), len(places), progress)
        found = search(loss, importance, tolerated_loss)
    return {
        "table": _rows(blueprint, found.table),
        "importance": _rows(blueprint, importance),
        "lower": found.lower,
        "upper": found.upper,
        "k": found.k,
        "loss": found.loss,
        "losses": {"uniform": found.uniform, "mixed": found.mixed},
        "metric": task.name,
        "tolerated_loss": tolerated_loss,
        "seconds_per_expert": seconds,
    }


def _told(loss: Loss, experts: int, progress: Progress) -> Loss:
    """`loss`, each measurement of the search reported."""
    steps = len(PRECISIONS) + math.ceil(math.log2(experts)) if experts > 1 else len(PRECISIONS)
    done = 0

    def telling(table: Mapping[Place, int]) -> float:
        nonlocal done
        found = loss(table)
        done += 1
        progress("choosing bitwidths", min(done, steps), steps)
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
    return _digest([blueprint.checkpoint.fingerprint(), settings.quantizer, settings.dense_bits_used, task.digest()])


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()[:16]
