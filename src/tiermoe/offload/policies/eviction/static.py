"""Static placements: the same experts stay, whatever is used."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from typing import ClassVar

from tiermoe.errors import ConfigError
from tiermoe.offload.policies.eviction.base import EvictionContext
from tiermoe.types import Demand, ExpertKey, Wanted


class LastLayersStay:
    """Evicts from the first layers, of a layer the last expert: the experts of as many last layers stay as fit
    (llama.cpp, --n-cpu-moe). If there is room for what is fetched (`context.room`), those that are `placed` never
    leave: what is fetched waits for the room."""

    def __init__(self, context: EvictionContext) -> None:
        self._slots, self._waits = context.slots, context.room > 0
        self._placed: set[tuple[int, int]] = set()
        self._order: list[tuple[tuple[float, int, int], ExpertKey]] = []  # who leaves first, first

    def admitted(self, key: ExpertKey) -> None:
        insort(self._order, (self._place(key.layer, key.expert), key))

    def used(self, key: ExpertKey, demand: Demand) -> None:
        """Uses do not count."""

    def removed(self, key: ExpertKey) -> None:
        del self._order[bisect_left(self._order, (self._place(key.layer, key.expert), key))]

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        first = next((key for _, key in self._order if evictable(key) and key[:2] not in self._placed), None)
        if first is not None or self._waits:
            return first
        return next((key for _, key in self._order if evictable(key)), None)

    def new_sequence(self) -> None:
        """Nothing is recorded."""

    def initial_experts(self, experts: Mapping[int, int]) -> list[Wanted]:
        """The experts that are placed, with which the cache begins: as many as there are slots. experts: number of
        each layer's, of the policy's layers."""
        places = [(layer, expert) for layer, count in experts.items() for expert in range(count)]
        places.sort(key=lambda place: self._place(*place), reverse=True)
        self._placed = set(places[: self._slots])
        return [Wanted(layer, expert, self.worth(layer, expert)) for layer, expert in places[: self._slots]]

    def worth(self, layer: int, expert: int) -> float:
        """Experts of the largest stay, of equal ones those of the first layers, then the first experts."""
        return layer

    def _place(self, layer: int, expert: int) -> tuple[float, int, int]:
        return self.worth(layer, expert), -layer, -expert


class MostFrequentStay(LastLayersStay):
    """Evicts the expert that served the fewest of the calibration's tokens (Fiddler: placement by popularity).
    ConfigError without a calibration."""

    reads_table: ClassVar[str] = "frequencies"

    def __init__(self, context: EvictionContext) -> None:
        if not context.frequencies:
            raise ConfigError(
                "cache=most-frequent needs the experts' frequencies and there are none; make them with tiermoe "
                "calibrate MODEL --text FILE --for fiddler"
            )
        super().__init__(context)
        self._frequencies = context.frequencies

    def worth(self, layer: int, expert: int) -> float:
        return self._frequencies.get((layer, expert), 0.0)
