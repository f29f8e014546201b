"""Neurons of experts (CORM, sections 4.1 and 4.3): which are cached, which to load, and where their bytes lie.

A set of neurons is an int: bit j stands for neuron j, row j of W1 and W3 and column j of W2.
"""

from __future__ import annotations

from typing import NamedTuple

from tiermoe.types import ExpertKey

DISK_GAP_BYTES = 128 << 10
"""Default gap for drives: bytes between two wanted neurons that are read through. That takes no longer than another
read: with 45 % of the neurons active at random, smaller gaps took 1.5 to 4 times as long on an NVMe drive, whatever
they saved in bytes (notebook/2026-11-22-reading-neurons.md)."""


class NeuronCache:
    """The cached neurons of each expert in a slot. An expert has one slot at most, so its key names the slot; `put`
    replaces what is known of an expert that has left and comes again."""

    def __init__(self) -> None:
        self._present: dict[ExpertKey, int] = {}

    def put(self, key: ExpertKey, neurons: int) -> None:
        """A newly cached expert has the loaded neurons."""
        self._present[key] = neurons

    def add(self, key: ExpertKey, neurons: int) -> None:
        """Loaded neurons join those that are cached."""
        self._present[key] |= neurons

    def present(self, key: ExpertKey) -> int:
        """The neurons that are cached."""
        return self._present[key]

    def missing(self, key: ExpertKey, active: int) -> int:
        """The active neurons that are not cached."""
        return active & ~self._present[key]


def whole(neurons: int) -> int:
    """The set of all `neurons` neurons of an expert."""
    return (1 << neurons) - 1


def to_load(missing: int, neurons: int, limit: float) -> int:
    """The neurons to load: the `missing` ones, or all `neurons` of the expert if more than the share `limit` is
    missing and gathering would cost more than it saves. A newly cached expert misses its active ones, as in the
    paper."""
    return whole(neurons) if missing.bit_count() > limit * neurons else missing


def runs(neurons: int, gap: int = 0) -> list[tuple[int, int]]:
    """A set of neurons as runs (first, count), ascending; runs with `gap` or fewer neurons between them are one."""
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
    """Neurons one after the other in the bytes of an expert."""

    first: int  # byte of the first neuron, a page's begin
    size: int  # bytes of a neuron
    neurons: int
    end: int  # bytes of the expert

    def spans(self, wanted: int, page: int, gap: int) -> list[tuple[int, int]]:
        """Bytes to read for the neurons `wanted`, in whole pages of `page` bytes, as (start, stop), ascending; gaps of
        at most `gap` bytes are read through."""
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
