"""A few threads that work off loads: urgent before speculative, and these before what the background asks for."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from tiermoe.types import ExpertKey, Load


class Lanes:
    """`count` threads that call `work` for one load at a time each. `work` itself reports how a load ended
    and raises nothing. Of several lanes one is kept free of background loads, so that an urgent one never waits for
    these; where there is one lane, for the one that has begun. `starts`: how many loads, background ones apart, found a
    lane without work; `start_s`: seconds from their submission until it took them."""

    def __init__(self, count: int, work: Callable[[Load], None]) -> None:
        self.starts = 0
        self.start_s = 0.0
        self._work = work
        self._asked: float | None = None  # when the first of the loads was that no lane has taken since
        self._urgent: deque[Load] = deque()
        self._speculative: deque[Load] = deque()
        self._background: OrderedDict[ExpertKey, Load] = OrderedDict()
        self._begun_in_background = 0
        self._most_in_background = max(1, count - 1)
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"tiermoe-lane-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, load: Load) -> None:
        with self._changed:
            if load.background:
                self._background[load.key] = load
            else:
                (self._urgent if load.urgent else self._speculative).append(load)
                if self._asked is None:
                    self._asked = time.perf_counter()
            self._changed.notify()

    def recall(self) -> list[Load]:
        """Takes back the speculative loads that have not begun."""
        with self._changed:
            loads = list(self._speculative)
            self._speculative.clear()
            if not self._urgent:
                self._asked = None
            return loads

    def withdraw(self, key: ExpertKey) -> Load | None:
        """Takes back the background load of `key`; None where it has begun."""
        with self._changed:
            return self._background.pop(key, None)

    def close(self) -> None:
        """Ends the threads once they are done with what has begun; what is queued is dropped."""
        with self._changed:
            self._closed = True
            self._urgent.clear()
            self._speculative.clear()
            self._background.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (load := self._take()) is not None:
            self._work(load)
            if load.background:
                with self._changed:
                    self._begun_in_background -= 1

    def _take(self) -> Load | None:
        with self._changed:
            slept = False
            while not (self._closed or self._urgent or self._speculative or self._may_begin_background()):
                self._changed.wait()
                slept = True
            if self._closed:
                return None
            if self._urgent or self._speculative:
                self._note_start(slept)
                return self._urgent.popleft() if self._urgent else self._speculative.popleft()
            self._begun_in_background += 1
            return self._background.popitem(last=False)[1]

    def _note_start(self, slept: bool) -> None:
        if slept and self._asked is not None:
            self.starts += 1
            self.start_s += time.perf_counter() - self._asked
        self._asked = None

    def _may_begin_background(self) -> bool:
        return bool(self._background) and self._begun_in_background < self._most_in_background
