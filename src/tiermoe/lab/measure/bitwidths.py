"""EdgeMoE's offline part on a real model (section 3.2): a bitwidth for each expert within a tolerated loss, from what
each expert costs alone at few bits, judged on text that the search has not seen. Dense weights stay in the bits of the
settings.

A model whose experts' bits change from pass to pass measures that importance, in this process, in several side by side,
or in processes that Ray runs. Each value is kept at once, so that a run that was killed goes on where it stopped."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from tiermoe.config import CacheSize, Settings, format_size
from tiermoe.engine.load import load_resolved
from tiermoe.errors import ConfigError
from tiermoe.lab.measure.evaluate import reserved_bytes
from tiermoe.lab.measure.tasks import Task
from tiermoe.lab.papers.edgemoe import PRECISIONS, ExpertPlace, Judge, accept, search
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.model.prepare_store import Progress, ensure_packed, open_or_create, store_root
from tiermoe.offload.composition import Composition
from tiermoe.offload.plugins import load_named
from tiermoe.offload.policies.precision import PrecisionContext, Table
from tiermoe.offload.presets import Resolved
from tiermoe.offload.profiles import Tables
from tiermoe.platform.json_files import parse_json
from tiermoe.platform.machine import available_memory
from tiermoe.platform.ray import on_cluster, start_ray


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
    store = open_or_create(blueprint, store_root(blueprint, settings.store))
    for bits in PRECISIONS:  # before processes that would all begin to
        ensure_packed(store, blueprint, bits, settings.quantizer_used, settings.dense_bits_used, progress)
    with BitsMeter(source) as meter:

        def values(table: Mapping[ExpertPlace, int], half: Task) -> list[float]:
            name = _table_name(table) if half is even else f"judged {_table_name(table)}"
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
        alone, seconds = measure_alone(meter, source, even, places, journal, processes or 1, ray, progress)
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


def _rows(blueprint: Blueprint, values: Mapping[ExpertPlace, Any]) -> list[list[Any]]:
    return [[values[layer, expert] for expert in range(moe.experts)] for layer, moe in enumerate(blueprint.layers)]


def _table_name(table: Mapping[ExpertPlace, int]) -> str:
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


ALONE, OTHERS = 2, 4
"""One expert has ALONE bits while the others have OTHERS."""

_SHARE_OF_FREE = 0.8
_PAIRS = ((4, 2), (16, 8), (8, 4))  # precisions that a model is loaded with: a table has one, or two neighbours
_LOW_EVERY = 4  # one of so many slots' bytes, about, is for the lower precision


class Journal:
    """Measured values of a task's items by name, of what `made_from` describes; appended to the file `path` (None: kept
    in memory alone), one JSON object a line. Lines of other conditions and a line that was cut short are passed over
    and stay."""

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
        """The values; None where they are not measured yet."""
        return self._values.get(name)

    def add(self, name: str, values: list[float]) -> None:
        """Keeps values, and appends them to the file before it returns."""
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
class ModelSource:
    """What a `BitsMeter` loads its model from; it goes to other processes."""

    directory: Path
    name: str
    settings: Settings

    @classmethod
    def of(cls, blueprint: Blueprint, settings: Settings, task: Task) -> ModelSource:
        """Settings with room for every expert in two precisions as far as memory goes, and for a whole text of `task`
        in one pass."""
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


class BitsMeter:
    """Measures a task with each expert in bits of its own, on a model that is loaded with two precisions of the experts
    at a time, and again for two others. Close it, or use it as a context."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._model: Any = None

    def __enter__(self) -> BitsMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def values(self, table: Mapping[ExpertPlace, int], task: Task) -> list[float]:
        """The task's metric with the experts in the bits of `table`: one precision, or two neighbours."""
        self._load(set(table.values()))
        engine = self._model.tiermoe
        top_k = [layer.top_k for layer in engine.store.layers]
        with engine.scheduler.ruled_by(Table(PrecisionContext(engine.settings.bits_used, top_k, table))):
            return task.values(self._model)

    def close(self) -> None:
        """Closes the model; the next measurement loads it again."""
        if self._model is not None:
            self._model.tiermoe.close()
            self._model = None
            gc.collect()

    def _load(self, needed: set[int]) -> None:
        if self._model is not None and needed <= set(self._model.tiermoe.precisions):
            return
        self.close()
        pair = next(pair for pair in _PAIRS if needed <= set(pair))
        blueprint = inspect_model(self._source.directory, self._source.name, self._source.settings.store)
        self._model = load_resolved(blueprint, _two_precisions(blueprint, self._source.settings, pair))


def places_of(blueprint: Blueprint) -> list[ExpertPlace]:
    """Every expert, in order."""
    return [(layer, expert) for layer, moe in enumerate(blueprint.layers) for expert in range(moe.experts)]


def _two_precisions(blueprint: Blueprint, settings: Settings, pair: tuple[int, int]) -> Resolved:
    """The preset of an engine with two precisions. The table only says how slots are shared out: most are high, as most
    experts are while one is measured alone."""
    high, low = pair
    table = {
        place: low if index % _LOW_EVERY == _LOW_EVERY - 1 else high for index, place in enumerate(places_of(blueprint))
    }
    composition = Composition("bitwidths", "measures what bits per expert cost", precision="table", exact_bits=True)
    return Resolved(replace(settings, bits=high, warm=False), composition, Tables(table), pair)


def measure_alone(
    meter: BitsMeter,
    source: ModelSource,
    task: Task,
    places: Sequence[ExpertPlace],
    journal: Journal,
    processes: int,
    ray: bool,
    progress: Progress,
) -> tuple[dict[ExpertPlace, list[float]], float | None]:
    """Each expert alone at ALONE bits → the task's metric, item by item; and the seconds that one took (None where all
    were known). What `journal` has is not measured again. With several processes, or Ray's, `meter` closes its model:
    they share its memory. ConfigError where one is killed."""
    left = [place for place in places if journal.get(_name(place)) is None]
    if not left or (processes == 1 and not ray):
        measured: Iterator[tuple[ExpertPlace, list[float]]]
        measured = ((place, meter.values(_table(place, places), task)) for place in left)
    else:
        meter.close()
        shared = replace(source, settings=_shared(source, processes))
        measured = (by_ray if ray else by_processes)(shared, task, left, places, processes)
    begin, done = time.perf_counter(), len(places) - len(left)
    for place, found in measured:
        journal.add(_name(place), found)
        done += 1
        progress("measuring each expert alone", done, len(places))
    took = (time.perf_counter() - begin) / len(left) if left else None
    known = {place: journal.get(_name(place)) for place in places}
    return {place: found for place, found in known.items() if found is not None}, took


def _name(place: ExpertPlace) -> str:
    return f"alone {place[0]} {place[1]}"


def _table(place: ExpertPlace, places: Sequence[ExpertPlace]) -> dict[ExpertPlace, int]:
    return {**dict.fromkeys(places, OTHERS), place: ALONE}


class AloneMeter:
    """Measures a task with one expert alone, in a process of its own: the model stays loaded from one expert to the
    next, so as many models are in memory as there are processes."""

    def __init__(self, source: ModelSource, task: Task, places: Sequence[ExpertPlace]) -> None:
        load_named()
        self._meter, self._task, self._places = BitsMeter(source), task, places

    def values(self, place: ExpertPlace) -> tuple[ExpertPlace, list[float]]:
        """The expert, and the task's metric, item by item, with it alone at ALONE bits."""
        return place, self._meter.values(_table(place, self._places), self._task)


def by_processes(
    shared: ModelSource, task: Task, left: Sequence[ExpertPlace], places: Sequence[ExpertPlace], processes: int
) -> Iterator[tuple[ExpertPlace, list[float]]]:
    """Each expert of `left` alone, of all `places` → the task's metric, in any order, by several processes at once.
    shared: the source with the share of memory and threads that one process has."""
    # spawn: a forked process would have torch's threads in an unknown state
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin_worker, (shared, task, places))
    try:
        for finished in as_completed([pool.submit(_in_worker, place) for place in left]):
            yield finished.result()
    except BrokenProcessPool:
        raise _killed(processes) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _killed(processes: int) -> ConfigError:
    """The error where one of so many processes ends by itself."""
    return ConfigError(
        f"one of {processes} measuring processes was killed, most likely for want of memory; what is measured is kept: "
        f"run again with fewer --processes"
    )


def _shared(source: ModelSource, processes: int) -> Settings:
    """The settings of one of several processes, with a share of the memory and of the threads."""
    settings = source.settings
    memory = settings.memory if settings.memory is not None else int(available_memory()[0] * _SHARE_OF_FREE)
    threads = settings.threads or torch.get_num_threads()
    return replace(settings, memory=memory // processes, threads=max(threads // processes, 1))


_worker: AloneMeter | None = None  # of a process that `by_processes` started


def _begin_worker(source: ModelSource, task: Task, places: Sequence[ExpertPlace]) -> None:
    global _worker
    _worker = AloneMeter(source, task, places)


def _in_worker(place: ExpertPlace) -> tuple[ExpertPlace, list[float]]:
    assert _worker is not None
    return _worker.values(place)


def by_ray(
    shared: ModelSource, task: Task, left: Sequence[ExpertPlace], places: Sequence[ExpertPlace], processes: int
) -> Iterator[tuple[ExpertPlace, list[float]]]:
    """As `by_processes`, by processes that Ray runs: on this machine, or on a cluster whose machines have the model and
    its store under the same path. ConfigError where a cluster has no room for so many, and where one is killed."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError
    from ray.util import ActorPool

    threads, memory = shared.settings.threads or 1, shared.settings.memory or 0
    start_ray(processes * threads)
    try:
        options: dict[str, Any] = {"num_cpus": threads}
        if on_cluster():
            check_room(ray.cluster_resources(), processes, threads, memory)
            options["memory"] = memory
        actor = ray.remote(AloneMeter).options(**options)
        pool = ActorPool([actor.remote(shared, task, places) for _ in range(processes)])
        yield from pool.map_unordered(lambda each, place: each.values.remote(place), left)
    except RayTaskError as error:
        raise error.cause from error
    except RayActorError as error:
        raise _killed(processes) from error
    finally:
        ray.shutdown()


def check_room(has: dict[str, float], processes: int, threads: int, memory: int) -> None:
    """ConfigError where processes would wait for ever for processors or memory."""
    if has.get("CPU", 0) < processes * threads or has.get("memory", 0) < processes * memory:
        raise ConfigError(
            f"{processes} processes of {threads} threads and {format_size(memory)} each are more than Ray's cluster "
            f"has, {has.get('CPU', 0):g} processors and {format_size(has.get('memory', 0))}; use fewer --processes, "
            f"--threads or less --memory"
        )
