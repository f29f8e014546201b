"""Experts of the neuron unit: what is loaded of each, and the loads of main memory: W1 first, then the active neurons
alone (CORM, sections 4.1 and 4.2).

A load is one piece of work for an I/O thread: read W1, compute act(W1 x) for the hidden state that runs, or that
predicts, and read the records of the neurons above the threshold, or all of them above the upper limit. Sets of neurons
are ints to policies and tensors to kernels.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from tiermoe.formats.expert_format import ExpertFormat, PartViews
from tiermoe.formats.neurons import GATE, RecordPlace, Sealed, holds, record_place
from tiermoe.offload.disk import Reader, SlotFiller
from tiermoe.offload.policies.neurons import NeuronCache, Records, runs, to_load, whole
from tiermoe.offload.reader import HeldReader, damaged, verify
from tiermoe.types import ExpertKey, Extent, Segment


def to_bits(mask: torch.Tensor) -> int:
    """A mask, bool (I,), as an int whose bit j is mask[j]."""
    return int.from_bytes(np.packbits(mask.numpy(), bitorder="little").tobytes(), "little")


def to_mask(bits: int, neurons: int) -> torch.Tensor:
    """The set as a mask, bool (neurons,): what `to_bits` takes."""
    packed = np.frombuffer(bits.to_bytes(-(-neurons // 8), "little"), dtype=np.uint8)
    return torch.from_numpy(np.unpackbits(packed, count=neurons, bitorder="little").view(np.bool_))


def to_indices(bits: int) -> torch.Tensor:
    """The set's neurons in ascending order, int64 (n,)."""
    packed = np.frombuffer(bits.to_bytes(-(-bits.bit_length() // 8), "little"), dtype=np.uint8)
    return torch.from_numpy(np.flatnonzero(np.unpackbits(packed, bitorder="little")))


ActiveOf = Callable[[ExpertKey, torch.Tensor, dict[str, PartViews]], torch.Tensor]
"""(expert, hidden state (1, H), views of its slot) → which neurons are active, bool (I,)."""


class Token(NamedTuple):
    """A single token, as layer `layer` runs on it: its hidden state (1, H)."""

    layer: int
    hidden: torch.Tensor


class LoadedNeurons:
    """What loads of the neuron unit are to bring, and have brought; any thread may load.

    neurons: what is there of each expert. token: the one that runs, by which loads that begin now choose neurons; None:
    they bring whole experts. Of the experts that were loaded for single tokens, `asked`: all their neurons, `spared`:
    those that were not loaded."""

    def __init__(self) -> None:
        self.neurons = NeuronCache()
        self.token: Token | None = None
        self.asked = self.spared = 0
        self._chosen_by: dict[ExpertKey, Token] = {}
        self._holders: dict[int, ExpertKey] = {}
        self._counting = threading.Lock()

    def expect(self, layer: int, hidden: torch.Tensor) -> None:
        """Layer `layer` runs on `hidden` (T, H): with one token, loads that begin from now on bring the neurons that
        are active for it; with more, whole experts."""
        self.token = Token(layer, hidden.clone()) if len(hidden) == 1 else None

    def holder(self, slot: torch.Tensor) -> ExpertKey:
        """The expert that was last loaded into `slot`."""
        return self._holders[slot.data_ptr()]

    def chosen_by(self, key: ExpertKey) -> Token | None:
        """The token by which the last load of `key` chose its neurons; None from the second time on."""
        return self._chosen_by.pop(key, None)

    def was_predicted(self, key: ExpertKey) -> bool:
        """Whether the last load of `key` chose its neurons by an earlier layer's hidden state. True once a load."""
        token = self.chosen_by(key)
        return token is not None and token.layer != key.layer

    def _begin(self, key: ExpertKey, slot: torch.Tensor) -> None:
        """A load of `key` into `slot` begins."""
        self._chosen_by.pop(key, None)
        self._holders[slot.data_ptr()] = key

    def _end(self, key: ExpertKey, brought: int, neurons: int, token: Token | None) -> None:
        """It has brought the neurons `brought` of so many, for a token or whole."""
        self.neurons.put(key, brought)
        if token is None:
            return
        with self._counting:
            self.asked += neurons
            self.spared += neurons - brought.bit_count()
        self._chosen_by[key] = token


class PartReader(Reader, Protocol):
    """Reads parts of extents as well."""

    @property
    def page(self) -> int:
        """Parts are read from and to multiples of so many bytes."""

    @property
    def checked(self) -> bool:
        """Whether what a part is read from has been verified already."""

    def read_part(self, part: Segment, target: memoryview, key: ExpertKey) -> None:
        """Fills its place in `target` with a part. LoadError if it cannot."""


class NeuronFiller(LoadedNeurons, SlotFiller):
    """Reads experts of the neuron unit into slots in main memory, from any number of threads at once.

    active_of: the rule for active neurons. upper_limit: share of an expert's neurons above which all are read.
    gap_bytes: records between two wanted ones are read through if they take up no more than that; what is read through
    and whole counts as there. A whole expert is verified by its checksum, W1 and each record of a part by their own.
    `wait_s` adds up the time spent in `top_up`.
    """

    def __init__(
        self,
        reader: PartReader,
        extent_of: Callable[[ExpertKey], Extent],
        format_of: Callable[[ExpertKey], ExpertFormat],
        active_of: ActiveOf,
        upper_limit: float,
        gap_bytes: int,
    ) -> None:
        LoadedNeurons.__init__(self)
        SlotFiller.__init__(self, reader, extent_of, format_of)
        self.wait_s = 0.0
        self._parts = reader
        self._active_of = active_of
        self._upper_limit = upper_limit
        self._gap_bytes = gap_bytes

    def top_up(self, key: ExpertKey, slot: torch.Tensor, missing: int) -> None:
        """Reads neurons that are `missing` of the expert in `slot` and adds them to those that are there. LoadError
        if they cannot be read. For the thread that computes."""
        started = time.perf_counter()
        try:
            with self._reading():
                place = record_place(self.format_of(key))
                wanted = to_load(missing, place.neurons, self._upper_limit)
                self.neurons.add(key, self._read_records(key, place, wanted, slot))
        finally:
            self.wait_s += time.perf_counter() - started

    def _read(self, key: ExpertKey, slot: torch.Tensor) -> None:
        token, form = self.token, self.format_of(key)
        place = record_place(form)
        self._begin(key, slot)
        brought = whole(place.neurons)
        if token is None:
            super()._read(key, slot)
        else:
            self._read_gate(key, form, place, slot)
            active = to_bits(self._active_of(key, token.hidden, form.slot.views(slot)))
            brought = self._read_records(key, place, to_load(active, place.neurons, self._upper_limit), slot)
        self._end(key, brought, place.neurons, token)

    def _read_gate(self, key: ExpertKey, form: ExpertFormat, place: RecordPlace, slot: torch.Tensor) -> None:
        """Reads W1 into its place in the slot."""
        encoding = form.encodings[GATE]
        assert isinstance(encoding, Sealed)
        target = slot.numpy().data
        segment = self._segment(key)
        self._parts.read_part(Segment(segment.file, segment.offset, place.stored_at, 0), target, key)
        if not self._parts.checked and not encoding.holds(form.slot.views(slot)[GATE]):
            raise damaged(f"W1 of {key}", segment.file)

    def _read_records(self, key: ExpertKey, place: RecordPlace, wanted: int, slot: torch.Tensor) -> int:
        """Reads the records of `wanted` and returns which neurons that has brought."""
        segment, target = self._segment(key), slot.numpy().data
        if isinstance(self._parts, HeldReader) and not self._gap_bytes:
            nbytes = place.neurons * place.record_bytes
            records_at = Segment(segment.file, segment.offset + place.stored_at, nbytes, place.slot_at)
            self._parts.gather(records_at, target, key, to_indices(wanted), place.record_bytes)
            return wanted
        records = Records(place.stored_at, place.record_bytes, place.neurons, segment.nbytes)
        brought = 0
        for start, stop in records.spans(wanted, self._parts.page, self._gap_bytes):
            at = place.slot_at + start - place.stored_at
            self._parts.read_part(Segment(segment.file, segment.offset + start, stop - start, at), target, key)
            brought |= records.within(start, stop)
        if not self._parts.checked:
            self._verify(key, place, brought, target)
        return brought

    def _verify(self, key: ExpertKey, place: RecordPlace, brought: int, slot: memoryview) -> None:
        """Checks the records that were read: one by one, or with the expert if all were and W1 lies before them."""
        if brought == whole(place.neurons) and place.slot_at == place.stored_at:
            verify(self.extent_of(key), slot, key)
            return
        for first, count in runs(brought):
            for neuron in range(first, first + count):
                at = place.slot_at + neuron * place.record_bytes
                if not holds(slot[at : at + place.record_bytes], neuron, place.check_at):
                    raise damaged(f"neuron {neuron} of {key}", self._segment(key).file)

    def _segment(self, key: ExpertKey) -> Segment:
        (segment,) = self.extent_of(key).segments
        return segment
