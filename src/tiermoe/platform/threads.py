"""Threads of torch's own operations: how many, and how long they stay awake without work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_SPINS = 10_000  # some .1 ms; GNU's OpenMP takes 300,000 by default


def limit_spinning() -> None:
    """Has the threads of GNU's OpenMP, which torch uses on Linux, sleep soon after an operation. By default they stay
    awake for milliseconds, on cores that the native kernels' own threads need. Only before torch is imported; what the
    user's environment says stands."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """`count` threads within, as many as before afterwards; takes .3 µs. One thread between the steps of a decoder:
    an operation on a vocabulary's values is done before others would have woken."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
