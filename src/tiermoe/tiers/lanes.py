"""A few threads that work off loads: urgent before speculative."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from tiermoe.types import Load


class Lanes:
    """`count` threads that call `work` for one load at a time each. `work` itself reports how a load ended
    and raises nothing."""

    def __init__(self, count: int, work: Callable[[Load], None]) -> None:
        self._work = work
        self._urgent: deque[Load] = deque()
        self._speculative: deque[Load] = deque()
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"tiermoe-lane-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, load: Load) -> None:
        with self._changed:
            (self._urgent if load.urgent else self._speculative).append(load)
            self._changed.notify()

    def recall(self) -> list[Load]:
        """Takes back the speculative loads that have not begun."""
        with self._changed:
            loads = list(self._speculative)
            self._speculative.clear()
            return loads

    def close(self) -> None:
        """Ends the threads once they are done with what has begun; what is queued is dropped."""
        with self._changed:
            self._closed = True
            self._urgent.clear()
            self._speculative.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (load := self._take()) is not None:
            self._work(load)

    def _take(self) -> Load | None:
        with self._changed:
            while not (self._closed or self._urgent or self._speculative):
                self._changed.wait()
            if self._closed:
                return None
            return self._urgent.popleft() if self._urgent else self._speculative.popleft()
