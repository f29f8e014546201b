"""Stand-ins for a model's keys and values."""

from __future__ import annotations


class Slabs:
    """Of each token a value, a byte each. values: what each slab holds, and a closed one held."""

    def __init__(self, slabs: int, context: int) -> None:
        self.context = context
        self.free = list(range(slabs))
        self.values: dict[int, list[int]] = {}
        self._reached: dict[int, int] = {}

    @property
    def nbytes_held(self) -> int:
        return sum(self._reached.values())

    def open(self) -> int:
        slab = self.free.pop()
        self.values[slab], self._reached[slab] = [], 0
        return slab

    def close(self, slab: int) -> None:
        self.free.append(slab)
        del self._reached[slab]

    def write(self, slab: int, values: list[int]) -> None:
        self.values[slab] = values
        self._reached[slab] = max(self._reached[slab], len(values))

    def fork(self, slab: int, length: int) -> int:
        other = self.open()
        self.write(other, self.values[slab][:length])
        return other

    def crop(self, slab: int, length: int) -> None:
        self.values[slab] = self.values[slab][:length]

    def length(self, slab: int) -> int:
        return len(self.values[slab])

    def reached(self, slab: int) -> int:
        """How far it was ever written."""
        return self._reached[slab]

    def kept(self, slab: int, length: int) -> int:
        return length

    def nbytes(self, positions: int) -> int:
        return positions
