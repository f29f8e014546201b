"""What each expert costs alone at few bits: the full enumeration that EdgeMoE makes (section 3.2), in one process or
several side by side."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import torch

from tiermoe.config import Settings
from tiermoe.errors import ConfigError
from tiermoe.measure.measuring import Measured, Measuring, Source
from tiermoe.measure.tasks import Task
from tiermoe.model.prepare_store import Progress
from tiermoe.process.machine import available_memory
from tiermoe.systems.edgemoe import Place

ALONE, OTHERS = 2, 4
"""One expert has ALONE bits while the others have OTHERS."""

_SHARE_OF_FREE = 0.8

SideBySide = Callable[
    [Source, Task, Sequence[Place], Sequence[Place], int], Iterator[tuple[Place, list[float]]]
]  # fmt: skip
"""As `by_processes`."""


def measure_alone(
    measuring: Measuring,
    source: Source,
    task: Task,
    places: Sequence[Place],
    measured: Measured,
    processes: int,
    progress: Progress,
    side_by_side: SideBySide | None = None,
) -> tuple[dict[Place, list[float]], float | None]:
    """The task's metric, item by item, with each expert alone at ALONE bits, and the seconds that each took (None where
    all were known). What `measured` holds is not measured again. With several processes, or `side_by_side` (None:
    `by_processes`), `measuring` lets its model go: they share its memory. ConfigError where one of them is killed."""
    left = [place for place in places if measured.get(_name(place)) is None]
    if not left or (processes == 1 and side_by_side is None):
        values = in_this_process(measuring, task, left, places)
    else:
        measuring.close()
        shared = replace(source, settings=_shared(source, processes))
        values = (side_by_side or by_processes)(shared, task, left, places, processes)
    begin, done = time.perf_counter(), len(places) - len(left)
    for place, its in values:
        measured.add(_name(place), its)
        done += 1
        progress("measuring each expert alone", done, len(places))
    took = (time.perf_counter() - begin) / len(left) if left else None
    found = {place: measured.get(_name(place)) for place in places}
    return {place: its for place, its in found.items() if its is not None}, took


def _name(place: Place) -> str:
    return f"alone {place[0]} {place[1]}"


def _table(place: Place, places: Sequence[Place]) -> dict[Place, int]:
    return {**dict.fromkeys(places, OTHERS), place: ALONE}


def in_this_process(
    measuring: Measuring, task: Task, left: Sequence[Place], places: Sequence[Place]
) -> Iterator[tuple[Place, list[float]]]:
    """The metric with each expert of `left`, of all `places`, alone; one after the other."""
    for place in left:
        yield place, measuring.values(_table(place, places), task)


def by_processes(
    shared: Source, task: Task, left: Sequence[Place], places: Sequence[Place], processes: int
) -> Iterator[tuple[Place, list[float]]]:
    """As `in_this_process`, by several at once, in any order. shared: the source with one process's share."""
    # spawn: a forked process would have torch's threads in an unknown state
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin_worker, (shared, task, places))
    try:
        running = {pool.submit(_in_worker, place): place for place in left}
        for finished in as_completed(running):
            yield running[finished], finished.result()
    except BrokenProcessPool:
        raise killed(processes) from None
    finally:
        pool.shutdown(cancel_futures=True)


def killed(processes: int) -> ConfigError:
    """What is said where one of so many processes ends by itself."""
    return ConfigError(
        f"one of {processes} measuring processes was killed, most likely for want of memory; what is measured is kept: "
        f"run again with fewer --processes"
    )


def _shared(source: Source, processes: int) -> Settings:
    """The settings of one of several processes: its share of the memory and of the threads."""
    settings = source.settings
    memory = settings.memory if settings.memory is not None else int(available_memory()[0] * _SHARE_OF_FREE)
    threads = settings.threads or torch.get_num_threads()
    return replace(settings, memory=memory // processes, threads=max(threads // processes, 1))


_worker: tuple[Measuring, Task, Sequence[Place]] | None = None  # of a process that `_side_by_side` started


def _begin_worker(source: Source, task: Task, places: Sequence[Place]) -> None:
    global _worker
    _worker = Measuring(source), task, places


def _in_worker(place: Place) -> list[float]:
    assert _worker is not None
    measuring, task, places = _worker
    return measuring.values(_table(place, places), task)
