"""The GPU tier of the neuron unit (CORM, sections 4.1 to 4.3): main memory holds whole experts, a GPU's slot W1 and the
neurons that were active.

A load for a single token copies W1, computes act(W1 x) on the GPU and brings back which neurons are active; an I/O
thread waits for that. Their records are gathered into a pinned staging buffer, which one copy brings to the GPU and one
kernel scatters to their places in the slot. Above the upper limit the rest of the expert is one plain copy. Missing
neurons of cached experts come in the same way. Loads for several tokens bring whole experts.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tiermoe.formats.expert_format import PAGE, ExpertFormat, align
from tiermoe.formats.neurons import record_place
from tiermoe.offload.cuda import CudaCopier, Mark, Ticket
from tiermoe.offload.disk import SlotFiller
from tiermoe.offload.gpu import GpuLink
from tiermoe.offload.neurons import ActiveOf, LoadedNeurons, Token, to_bits, to_indices
from tiermoe.offload.policies.neurons import to_load, whole
from tiermoe.offload.slots import DeviceSlots, HostSlots, Slots
from tiermoe.types import ExpertKey, Load

Scatter = Callable[[torch.Tensor, int], None]
"""(staging buffer on the GPU, records in it): puts them in their places, which the buffer begins with: int64 (records,
3), the address of each place, the byte at which the record lies, and its bytes."""
_TO_BE_PINNED = -2
"""The slot of a load that ends in main memory, where the expert is pinned."""
_ENTRY, _ALIGNMENT = 24, 16  # bytes of a place there, and of what records lie at multiples of


class Part(NamedTuple):
    """Neurons that are to come into an expert's slot on the GPU."""

    key: ExpertKey
    slot: torch.Tensor
    neurons: int


@dataclass(slots=True)
class Staging:
    """A pinned buffer, and the one on the GPU that a copy brings its content to. `last`: the last such copy, with what
    reads it there."""

    host: torch.Tensor
    device: torch.Tensor
    last: Ticket | None = None


def neuron_staging_bytes(formats: Iterable[ExpertFormat], upper_limit: float) -> int:
    """Bytes that an expert takes in a staging buffer: a flag for each neuron, then places and records of those that are
    gathered."""
    most = 0
    for place in map(record_place, formats):
        gathered = int(upper_limit * place.neurons)
        most = max(most, place.neurons, align(_ENTRY * gathered, _ALIGNMENT) + gathered * place.record_bytes)
    return align(most, PAGE)


class NeuronLink(LoadedNeurons, GpuLink):
    """A `GpuLink` that brings W1 and active neurons. active_of: the rule for active neurons, on the GPU; its kernels
    read slots. upper_limit: share of an expert's neurons above which all come. staged: bytes of an expert in a staging
    buffer; each thread has one for an expert, the thread that computes one for `at_once` experts.

    BudgetError if the staging buffers are refused."""

    def __init__(
        self,
        filler: SlotFiller,
        host: Mapping[int, HostSlots],
        device: Slots,
        bytes_of: Callable[[ExpertKey], int],
        copier: CudaCopier,
        threads: int,
        active_of: ActiveOf,
        scatter: Scatter,
        upper_limit: float,
        staged: int,
        at_once: int,
    ) -> None:
        LoadedNeurons.__init__(self)
        self._active_of = active_of
        self._scatter = scatter
        self._upper_limit = upper_limit
        self._tokens: dict[int, Token | None] = {}  # by slot, of loads that were submitted
        sizes = [staged] * threads + [at_once * staged]
        on_device = DeviceSlots(1, sum(sizes), str(device.buffer(0).device)).buffer(0)
        self._pinned = HostSlots(1, sum(sizes), pin=True)
        pairs = zip(torch.split(self._pinned.buffer(0), sizes), torch.split(on_device, sizes), strict=True)
        *own, self._together = (Staging(*pair) for pair in pairs)
        self._brought: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()  # how the thread's own loads ended
        self._free: queue.SimpleQueue[Staging] = queue.SimpleQueue()
        for each in own:
            self._free.put(each)
        GpuLink.__init__(self, filler, host, device, bytes_of, copier, threads)

    def submit(self, load: Load) -> None:
        token = self._tokens[load.slot] = self.token
        if token is None:
            super().submit(load)
            return
        self._marks[load.slot] = self._copier.mark()
        self._threads.submit(load)  # which waits for the active neurons

    def to_load(self, key: ExpertKey, missing: int) -> int:
        """What is brought for neurons that are missing: they, or all above the upper limit."""
        return to_load(missing, record_place(self._filler.format_of(key)).neurons, self._upper_limit)

    def top_up(self, missing: Sequence[Part]) -> None:
        """Brings neurons that are missing of experts in slots: of at most `at_once` experts, or all neurons of any
        number. What the calling thread launches from now on finds them there. LoadError if main memory lacks an expert
        and cannot read it."""
        started = time.perf_counter()
        ticket = self._move(missing, self._together, self._copier.mark(), urgent=True, pinned=False)
        for part in missing:
            self.neurons.add(part.key, part.neurons)
        self._wait_s += time.perf_counter() - started
        assert ticket is not None
        self._before_use(ticket)

    def roll_back(self) -> None:
        super().roll_back()
        self._brought = queue.SimpleQueue()

    def close(self) -> None:
        super().close()
        del self._free, self._together
        self._pinned.close()

    def _pin(self, key: ExpertKey) -> None:
        """Pins an expert for the thread that computes. An I/O thread reads it if main memory lacks it: this one waits
        for no condition (`IOThreads`)."""
        if not self.host.pin_if_here(key):
            self._threads.submit(Load(key, _TO_BE_PINNED, urgent=True))
            error = self._brought.get()
            if error is not None:
                raise error

    def _work(self, load: Load) -> None:
        if load.slot != _TO_BE_PINNED:
            super()._work(load)
            return
        try:
            self.host.bring(load.key)
        except Exception as failure:  # handed to the thread that computes
            self._brought.put(failure)
        else:
            self._brought.put(None)

    def _transfer(self, load: Load, mark: Mark) -> Ticket:
        key, slot, token = load.key, self._device.buffer(load.slot), self._tokens.pop(load.slot)
        self._begin(key, slot)
        neurons = record_place(self._filler.format_of(key)).neurons
        if token is None:
            ticket = super()._transfer(load, mark)
            self._end(key, whole(neurons), neurons, None)
            return ticket
        staging = self._free.get()
        try:
            gate, active = self._bring_gate(key, slot, token, staging, mark, load.urgent)
            wanted = self.to_load(key, active)
            ticket = self._move([Part(key, slot, wanted)], staging, mark, load.urgent, pinned=True) or gate
        finally:
            self._free.put(staging)
        self._end(key, wanted, neurons, token)
        return ticket

    def _bring_gate(
        self, key: ExpertKey, slot: torch.Tensor, token: Token, staging: Staging, mark: Mark, urgent: bool
    ) -> tuple[Ticket, int]:
        """Copies W1 of a pinned expert, and waits for the neurons that it makes active. If that fails, the expert is
        unpinned."""
        try:
            form = self._filler.format_of(key)
            place, views = record_place(form), form.slot.views(slot)
            self._wait_out(staging)
            source, active = self.host.buffer(key)[: place.slot_at], staging.host[: place.neurons].view(torch.bool)

            def work() -> None:
                slot[: place.slot_at].copy_(source, non_blocking=True)
                active.copy_(self._active_of(key, token.hidden, views), non_blocking=True)

            ticket = self._copies.start(None, place.slot_at, work, mark, urgent)
            self._copier.wait(ticket)
            return ticket, to_bits(active)
        except BaseException:
            self.host.give_back(key)
            raise

    def _move(self, parts: Sequence[Part], staging: Staging, mark: Mark, urgent: bool, pinned: bool) -> Ticket | None:
        """Brings neurons of experts. pinned: main memory has them pinned; else each is pinned when its turn comes. They
        are unpinned once they were gathered or copied. Returns the last copy, which is over when all are; None if there
        is nothing to bring."""
        self._wait_out(staging)
        staged = sum(part.neurons.bit_count() for part in parts if not self._is_whole(part))
        entries, filled = staging.host[: _ENTRY * staged].view(torch.int64).view(-1, 3), 0
        end, last = align(_ENTRY * staged, _ALIGNMENT), None
        for part in parts:
            key, slot, place = part.key, part.slot, record_place(self._filler.format_of(part.key))
            if not pinned:
                self._pin(key)
            if self._is_whole(part):
                last = self.host.copy(key, self._bytes_of(key), slot, mark, urgent, place.slot_at)
                continue
            try:
                rows, record_bytes = to_indices(part.neurons), place.record_bytes
                records = self.host.buffer(key)[place.slot_at :][: place.neurons * record_bytes].view(-1, record_bytes)
                gathered = staging.host[end:][: len(rows) * record_bytes].view(-1, record_bytes)
                torch.index_select(records, 0, rows, out=gathered)
                places = entries[filled : filled + len(rows)]
                torch.add(rows * record_bytes, slot.data_ptr() + place.slot_at, out=places[:, 0])
                torch.arange(end, end + gathered.nbytes, record_bytes, out=places[:, 1])
                places[:, 2] = record_bytes
                filled, end = filled + len(rows), end + gathered.nbytes
            finally:
                self.host.give_back(key)
        if not staged:
            return last

        def work() -> None:
            staging.device[:end].copy_(staging.host[:end], non_blocking=True)
            self._scatter(staging.device, staged)

        staging.last = self._copies.start(None, end, work, mark, urgent)
        return staging.last

    def _is_whole(self, part: Part) -> bool:
        return part.neurons == whole(record_place(self._filler.format_of(part.key)).neurons)

    def _wait_out(self, staging: Staging) -> None:
        """Waits until nothing reads the buffers any more."""
        if staging.last is not None:
            self._copies.wait_out(staging.last)
