"""Experts measured alone by processes that Ray runs (`tiermoe calibrate --ray`): on this machine, or on a cluster whose
machines have the model and its store under the same path.

A process is an actor of Ray's, whose model stays loaded from one task to the next: so as many are in memory as there
are shares of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tiermoe.config import format_size
from tiermoe.errors import ConfigError
from tiermoe.measure.importance import in_this_process, killed
from tiermoe.measure.measuring import Measuring, Source
from tiermoe.measure.tasks import Task
from tiermoe.process.start_ray import on_cluster, start_ray
from tiermoe.systems.edgemoe import Place


class Measurer:
    """What a process of Ray's holds: the model, and what is measured on it."""

    def __init__(self, source: Source, task: Task, places: Sequence[Place]) -> None:
        self._measuring, self._task, self._places = Measuring(source), task, places

    def values(self, place: Place) -> tuple[Place, list[float]]:
        """The task's metric, item by item, with one expert alone."""
        return next(in_this_process(self._measuring, self._task, [place], self._places))


def by_ray(
    shared: Source, task: Task, left: Sequence[Place], places: Sequence[Place], processes: int
) -> Iterator[tuple[Place, list[float]]]:
    """As `importance.by_processes`. ConfigError where a cluster has no room for so many, and where one is killed."""
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
        actor = ray.remote(Measurer).options(**options)
        pool = ActorPool([actor.remote(shared, task, places) for _ in range(processes)])
        yield from pool.map_unordered(lambda each, place: each.values.remote(place), left)
    except RayTaskError as error:
        raise error.cause from error
    except RayActorError as error:
        raise killed(processes) from error
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
