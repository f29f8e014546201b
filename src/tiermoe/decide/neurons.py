"""Which neurons of a cached expert are there, which are worth loading (CORM, sections 4.1 and 4.3), and what is read
for them.

A set of neurons is an int: bit j stands for neuron j, row j of W1 and W3 and column j of W2.
"""

from __future__ import annotations

from typing import NamedTuple

from tiermoe.types import ExpertKey

DISK_GAP_BYTES = 128 << 10
"""The gap for drives, where none is set. Reading through it takes no longer than another read: with 45 % of the neurons
active at random, smaller gaps took 1.5 to 4 times as long on an NVMe drive, whatever they saved in bytes
(docs/notebook/reading-neurons.md)."""


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


class Records(NamedTuple):
    """Neurons one after the other in an expert of `end` bytes, the first at `first`, a page's begin, each of `size`
    bytes."""

    first: int
    size: int
    neurons: int
    end: int

    def spans(self, wanted: int, page: int, gap: int) -> list[tuple[int, int]]:
        """Where to read for the neurons `wanted`, in whole pages of `page` bytes, as (start, stop) in ascending order;
        through gaps of at most `gap` bytes."""
        found: list[tuple[int, int]] = []
        for neuron, count in runs(wanted, gap // self.size):
            start = max((self.first + neuron * self.size) // page * page, self.first)
            stop = min(-(-(self.first + (neuron + count) * self.size) // page) * page, self.end)
            if found and start <= found[-1][1]:
                start = found.pop()[0]
            found.append((start, stop))
        return found

    def within(self, start: int, stop: int) -> int:
        """The neurons that lie whole between two bytes."""
        first = -(-max(start - self.first, 0) // self.size)
        end = min((stop - self.first) // self.size, self.neurons)
        return whole(end - first) << first
