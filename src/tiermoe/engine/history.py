"""What an engine takes over from earlier runs of the same checkpoint and precision, and leaves to later ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from tiermoe.formats.store import Store
from tiermoe.offload.policies.prefetch_trial import PrefetchTrial
from tiermoe.offload.run_record import RunRecord, read_record, record_path, write_record
from tiermoe.offload.scheduler import Scheduler
from tiermoe.offload.usage import SizeCurve, Uses, merged

_CASES = 16  # circumstances of which it is kept whether prefetching paid, the newest


class History:
    """The record of the precision `key` in a store. circumstances: in which prefetching is measured, as text."""

    def __init__(self, store: Store, key: str, circumstances: str) -> None:
        self._path = record_path(store.root, f"{key}-mtp" if store.drafting else key)
        self._fingerprint = store.source.fingerprint
        self._experts = [layer.experts for layer in store.layers]
        self._circumstances = circumstances
        self._record = self._read()
        self._curve: SizeCurve | None = None

    @property
    def uses(self) -> Sequence[Sequence[float]]:
        """Of each layer's experts in earlier runs; empty where nothing is known."""
        return self._record.uses

    def trial(self, promises: Callable[[float], bool]) -> PrefetchTrial:
        """A trial of prefetching that begins with what earlier runs have found; promises: as there."""
        return PrefetchTrial(self._record.prefetching.get(self._circumstances), promises)

    def record(self, curve: SizeCurve) -> None:
        """What this run says of other sizes of the cache, by now."""
        self._curve = curve

    def keep(self, owner: object, scheduler: Scheduler) -> Callable[[], object]:
        """Writes down what `scheduler` has seen when `owner` ends, or the interpreter does, or the result is called:
        once."""
        return weakref.finalize(owner, self._write, scheduler.uses, scheduler.trial)

    def _read(self) -> RunRecord:
        return read_record(self._path, self._fingerprint, self._experts)

    def _write(self, uses: Uses, trial: PrefetchTrial | None) -> None:
        if not any(map(any, uses.counts)):
            return
        record = self._read()  # another process may have written meanwhile
        record.uses = merged(record.uses, uses.counts)
        if trial is not None and trial.pays is not None:
            record.prefetching.pop(self._circumstances, None)
            record.prefetching[self._circumstances] = trial.pays
            record.prefetching = dict(list(record.prefetching.items())[-_CASES:])
        record.curve = self._curve or record.curve
        write_record(self._path, self._fingerprint, record)
