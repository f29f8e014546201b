"""A link that finishes loads in any order and may fail, and a controller over it: no weights, no files."""

from __future__ import annotations

import random
from collections import deque

from caches import pools
from tiermoe.decide.controller import Controller
from tiermoe.decide.link import Finished
from tiermoe.errors import LoadError
from tiermoe.types import Demand, ExpertKey, Load


class FakeLink:
    """Finishes one load a time step, in random order; keeps what each slot holds, like a disk would fill it."""

    def __init__(self, seed: int = 0, failing: frozenset[ExpertKey] = frozenset()) -> None:
        self.contents: dict[int, ExpertKey] = {}
        self.submitted: list[Load] = []
        self.failing = failing
        self.time = 0.0
        self._random = random.Random(seed)
        self._urgent: list[Load] = []
        self._speculative: list[Load] = []
        self._background: list[Load] = []
        self._running: list[Load] = []
        self._finished: deque[Finished] = deque()

    def submit(self, load: Load) -> None:
        self.submitted.append(load)
        queue = self._background if load.background else self._urgent if load.urgent else self._speculative
        queue.append(load)

    def step(self) -> None:
        """One transfer ends, chosen at random among what lanes could be running."""
        if self._urgent and self._random.random() < 0.7:
            self._running.append(self._urgent.pop(0))
        elif self._speculative and not self._urgent:
            self._running.append(self._speculative.pop(0))
        elif self._urgent:
            self._running.append(self._urgent.pop(0))
        elif self._background and self._random.random() < 0.8:
            self._running.append(self._background.pop(0))
        if self._running:
            load = self._running.pop(self._random.randrange(len(self._running)))
            self.contents[load.slot] = load.key
            error = LoadError(f"{load.key} is damaged") if load.key in self.failing else None
            self._finished.append(Finished(load, error))

    def wait(self) -> Finished:
        for _ in range(1000):
            if self._finished:
                return self._finished.popleft()
            self.step()
        raise AssertionError("waited for a load that nobody asked for")

    def poll(self) -> Finished | None:
        if self._random.random() < 0.5:
            self.step()
        return self._finished.popleft() if self._finished else None

    def recall(self) -> list[Load]:
        loads, self._speculative = self._speculative, []
        return loads

    def withdraw(self, key: ExpertKey) -> bool:
        before = len(self._background)
        self._background = [load for load in self._background if load.key != key]
        return len(self._background) < before

    def is_idle(self) -> bool:
        taken = [*self._running, *(finished.load for finished in self._finished)]
        return not (self._urgent or self._speculative or any(not load.background for load in taken))

    def roll_back(self) -> None:
        for loads in (self._urgent, self._speculative, self._background, self._running, self._finished):
            loads.clear()

    def now(self) -> float:
        return self.time


def controller_with(slots: int, **link: object) -> tuple[Controller, FakeLink]:
    fake = FakeLink(**link)  # type: ignore[arg-type]
    return Controller(pools(slots), fake), fake


def demands(*experts: int) -> list[Demand]:
    return [Demand(expert, 1, 4) for expert in experts]
