"""Packing on several cores: each of a few threads makes one piece by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


def in_order(work: Callable[[int], Result], count: int, workers: int) -> Iterator[Result]:
    """work(0), work(1), … work(count - 1), `workers` pieces in memory at a time.

    Every worker computes on one thread. Threads that share one piece wait for each other at the end of every operation
    of a few megabytes; beside other programs that took up to ten times as long."""
    if workers < 2 or count < 2:
        yield from map(work, range(count))
        return
    threads = torch.get_num_threads()
    running: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for number in range(count):
            running.append(pool.submit(work, number))
            if len(running) == workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # the workers' number would be that of every thread to come
