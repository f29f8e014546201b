"""What lanes count: loads that found one without work, and how long they took to be taken."""

from __future__ import annotations

import queue
import threading

from tiermoe.offload.io_threads import IOThreads
from tiermoe.types import ExpertKey, Load


def load(expert: int) -> Load:
    return Load(ExpertKey(0, expert, 4), expert, True)


def test_only_loads_that_find_a_lane_without_work_count_as_starts() -> None:
    begun: queue.SimpleQueue[Load] = queue.SimpleQueue()
    go_on = threading.Semaphore(0)

    def work(load: Load) -> None:
        begun.put(load)
        go_on.acquire()

    lanes = IOThreads(1, work)
    lanes.submit(load(0))
    begun.get()
    starts = lanes.starts  # 0 where the thread had not gone to sleep before
    lanes.submit(load(1))  # waits for the lane, which has work
    go_on.release()
    begun.get()
    assert starts in (0, 1)
    assert lanes.starts == starts
    assert (lanes.start_s > 0) == (starts > 0)
    go_on.release()
    lanes.close()
