"""Waiting for what happens in other threads and processes. The machine may be busy, or stop a process for a while: a
test waits for the fact itself, and its time limit only says that something hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 600


def until(what: Callable[[], Any]) -> Any:
    """The first value of `what` that is true."""
    limit = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < limit, "it hangs"
        time.sleep(0.01)
    return found


def within(work: Callable[[], Any]) -> Any:
    """The result of `work`; fails where it hangs."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append((work(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert results, "it hangs"
    value, error = results[0]
    if error is not None:
        raise error
    return value
