"""I/O threads in Python, for loads whose work needs the interpreter: urgent before speculative, background last."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable

from tiermoe.types import ExpertKey, Load


class IOThreads:
    """`count` threads that call `work` for one load at a time each. `work` itself reports how a load ended
    and raises nothing. Of several threads one is kept free of background loads, so that an urgent one never waits for
    these; if there is one, for the one that has begun.

    The thread that computes may be interrupted anywhere (Ctrl-C). It uses plain locks and queues alone, which Python
    takes and gives back in one piece; in the midst of a `threading.Condition` it would leave the threads locked."""

    def __init__(self, count: int, work: Callable[[Load], None]) -> None:
        self._work = work
        self._urgent: deque[Load] = deque()
        self._speculative: deque[Load] = deque()
        self._background: OrderedDict[ExpertKey, Load] = OrderedDict()
        self._begun_in_background = 0
        self._most_in_background = max(1, count - 1)
        self._closed = False
        self._lock = threading.Lock()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each load, which a thread takes first
        self._working = [threading.Lock() for _ in range(count)]  # of each thread, held while it works
        self._threads = [
            threading.Thread(target=self._run, args=(working,), name=f"tiermoe-io-{index}", daemon=True)
            for index, working in enumerate(self._working)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, load: Load) -> None:
        with self._lock:
            if load.background:
                self._background[load.key] = load
            else:
                (self._urgent if load.urgent else self._speculative).append(load)
        self._wakes.put(None)

    def recall(self) -> list[Load]:
        """Takes back the speculative loads that have not begun."""
        with self._lock:
            loads = list(self._speculative)
            self._speculative.clear()
            return loads

    def withdraw(self, key: ExpertKey) -> Load | None:
        """Takes back the background load of `key`; None if it has begun."""
        with self._lock:
            return self._background.pop(key, None)

    def drop(self) -> None:
        """Drops what is queued and returns when what has begun has ended."""
        with self._lock:
            self._clear()
        for working in self._working:
            with working:
                pass

    def close(self) -> None:
        """Ends the threads once they are done with what has begun; what is queued is dropped."""
        with self._lock:
            self._closed = True
            self._clear()
        for _ in self._threads:
            self._wakes.put(None)
        for thread in self._threads:
            thread.join()

    def _clear(self) -> None:
        self._urgent.clear()
        self._speculative.clear()
        self._background.clear()

    def _run(self, working: threading.Lock) -> None:
        while not self._closed:
            load = self._take(working)
            if load is None:
                continue
            self._work(load)
            if load.background:
                with self._lock:
                    self._begun_in_background -= 1
                    waiting = bool(self._background)
                if waiting:
                    self._wakes.put(None)  # the last one may have been taken when no more could begin
            working.release()

    def _take(self, working: threading.Lock) -> Load | None:
        """The next load, for which a thread is woken, and with which it works from now on; None if there is none."""
        self._wakes.get()
        with self._lock:
            if self._closed:
                return None
            if self._urgent or self._speculative:
                load = self._urgent.popleft() if self._urgent else self._speculative.popleft()
            elif self._background and self._begun_in_background < self._most_in_background:
                self._begun_in_background += 1
                load = self._background.popitem(last=False)[1]
            else:
                return None
            working.acquire()
            return load
