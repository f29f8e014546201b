"""Which neurons of a cached expert are there, and which are worth loading (CORM, sections 4.1 and 4.3).

A set of neurons is an int: bit j stands for neuron j, row j of W1 and W3 and column j of W2.
"""

from __future__ import annotations

from tiermoe.types import ExpertKey


class NeuronCache:
    """The neurons that are there of each expert in a slot. An expert has one slot at most, so its key names it; what
    is known of an expert that has left is replaced when it comes again."""

    def __init__(self) -> None:
        self._present: dict[ExpertKey, int] = {}

    def put(self, key: ExpertKey, neurons: int) -> None:
        """A newly cached expert starts with what was loaded."""
        self._present[key] = neurons

    def add(self, key: ExpertKey, neurons: int) -> None:
        """Keeps the union of what was there and what has been loaded."""
        self._present[key] |= neurons

    def missing(self, key: ExpertKey, active: int) -> int:
        """The active neurons that are not there."""
        return active & ~self._present[key]


def whole(neurons: int) -> int:
    """The set of all `neurons` neurons of an expert."""
    return (1 << neurons) - 1


def to_load(missing: int, neurons: int, limit: float) -> int:
    """What to load where `missing` of an expert's `neurons` are needed and not there: those, or all of them above the
    share `limit`, where gathering would cost more than it saves. Of a newly cached expert the missing ones are the
    active ones, as in the paper."""
    return whole(neurons) if missing.bit_count() > limit * neurons else missing


def runs(neurons: int, gap: int = 0) -> list[tuple[int, int]]:
    """The set as runs (first, count) in ascending order; runs with `gap` or fewer neurons between them are one."""
    found: list[tuple[int, int]] = []
    position = 0
    while neurons:
        absent = (neurons & -neurons).bit_length() - 1
        neurons >>= absent
        count = (~neurons & (neurons + 1)).bit_length() - 1
        neurons >>= count
        position += absent
        if found and absent <= gap:
            first, before = found[-1]
            found[-1] = (first, before + absent + count)
        else:
            found.append((position, count))
        position += count
    return found
