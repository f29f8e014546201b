"""The experts of a layer one by one, in whatever groups they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from tiermoe.types import Ready


def each(run: Iterable[list[Ready]]) -> Iterator[Ready]:
    """Asks for the next group once all of one are taken."""
    return chain.from_iterable(run)
