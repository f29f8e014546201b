"""The unit in which experts are moved and computed: whole, some of them on the CPU beside a GPU (HOBBIT, section 4,
CPU-GPU cooperative computing), or by their active neurons (CORM, sections 4.2 and 4.3)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.kernels import gpu
from tiermoe.kernels.experts import ExpertKernel, SlotViews, Views, expert_kernel, one_by_one
from tiermoe.kernels.gates import Gate
from tiermoe.kernels.neurons import GpuNeuronKernel, NeuronKernel
from tiermoe.model.moe import ExpertGate
from tiermoe.offload.composition import Composition
from tiermoe.offload.disk import SlotFiller
from tiermoe.offload.gpu import GpuLink
from tiermoe.offload.link import MeteredLink
from tiermoe.offload.neuron_link import NeuronLink, Part, neuron_staging_bytes
from tiermoe.offload.neurons import NeuronFiller, PartReader, to_bits, to_indices, to_mask
from tiermoe.offload.policies.neurons import whole
from tiermoe.offload.policies.routing import MissCosts, averaged
from tiermoe.types import ExpertKey, Extent

ExtentOf = Callable[[ExpertKey], Extent]
FormatOf = Callable[[ExpertKey], ExpertFormat]
OnCpu = Callable[[int, int, torch.Tensor], "Future[torch.Tensor]"]
"""(expert, bits, x (M, H) in main memory) → its output (M, H) there, once it is computed; of one layer."""
_SLOT = "slot"


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """What computes the experts of a layer."""

    kernels: Mapping[int, ExpertKernel]  # by precision; one that serves several computes them in one call
    views_of: Callable[[ExpertKey, int], Views]  # expert, slot → typed views of what the slot has
    on_cpu: OnCpu | None = None  # computes experts that have no slot (`loader.CPU_FALLBACK`), beside this device
    expect: Callable[[int, torch.Tensor], None] | None = None
    """Called with the layer and its hidden states before its loads begin, by the neuron unit; parts then run one by
    one."""


class WholeExperts:
    """Experts are loaded and computed whole; those that a GPU lacks are computed on the CPU where `on_cpu` asks for it
    (misses=cpu, measured)."""

    wait_s = 0.0

    def __init__(self, device: str, on_cpu: bool) -> None:
        self._device = device
        self._on_cpu = on_cpu
        self._helper: CpuHelper | None = None
        self._link: GpuLink | None = None

    def filler(self, reader: PartReader, extent_of: ExtentOf, format_of: FormatOf, as_stored: bool) -> SlotFiller:
        return SlotFiller(reader, extent_of, format_of, as_stored)

    def gpu_link(self, formats: Sequence[ExpertFormat], at_once: int) -> Callable[..., GpuLink]:
        """What makes the link of a GPU, of the arguments of `GpuLink`."""
        return GpuLink

    def views(self, form: ExpertFormat, slot: torch.Tensor) -> Views:
        """What a kernel reads of a slot (uint8)."""
        return SlotViews(form.slot.views(slot))

    def over(self, link: MeteredLink) -> None:
        """Tells which link fills the slots."""
        if self._on_cpu:
            assert isinstance(link, GpuLink)
            self._helper, self._link = CpuHelper(link.host), link

    def experts(
        self,
        index: int,
        gate: ExpertGate,
        formats: Mapping[int, ExpertFormat],
        views_of: Callable[[ExpertKey, int], Views],
    ) -> LayerKernels:
        """What computes the experts of MoE layer `index`, which compute `gate` between their matrices; `formats` by
        precision."""
        kernels = {bits: expert_kernel(form, gate.activation, self._device) for bits, form in formats.items()}
        on_cpu = self._helper.layer(index, formats, gate.activation) if self._helper else None
        return LayerKernels(kernels, views_of, on_cpu)

    def stats(self) -> dict[str, float]:
        return {}

    def miss_costs(self) -> MissCosts:
        """What a missing expert has taken, loaded and on the CPU."""
        assert self._helper is not None
        assert self._link is not None
        return MissCosts(self._link.seconds_per_load, self._helper.seconds_per_expert)

    def roll_back(self) -> None:
        """Waits for what the CPU computes, which nobody is going to ask for."""
        if self._helper is not None:
            self._helper.finish()

    def close(self) -> None:
        """Ends what computes on the CPU; before the link is closed."""
        if self._helper is not None:
            self._helper.close()


class ActiveNeurons:
    """Experts are loaded W1 first, then by the neurons that it makes active (CORM)."""

    def __init__(self, composition: Composition, device: str) -> None:
        assert composition.theta is not None
        self._theta = composition.theta
        self._upper_limit = composition.upper_limit
        self._proceed = composition.proceeds
        self._gap_bytes = composition.gap_bytes
        self._device = device
        self._kernels: dict[tuple[int, int], NeuronKernel] = {}
        self._counts = NeuronCounts()
        self._loads: NeuronFiller | NeuronLink

    @property
    def wait_s(self) -> float:
        """Seconds in which the computing thread read missing neurons of cached experts, which a GPU's link counts."""
        return self._loads.wait_s if isinstance(self._loads, NeuronFiller) else 0.0

    def filler(self, reader: PartReader, extent_of: ExtentOf, format_of: FormatOf, as_stored: bool) -> SlotFiller:
        if self._device != "cpu":
            return SlotFiller(reader, extent_of, format_of, as_stored)
        self._loads = NeuronFiller(reader, extent_of, format_of, self._active, self._upper_limit, self._gap_bytes)
        return self._loads

    def gpu_link(self, formats: Sequence[ExpertFormat], at_once: int) -> Callable[..., GpuLink]:
        """As `WholeExperts.gpu_link`; for staging buffers of experts of these formats, `at_once` of which are computed
        in one call."""
        return functools.partial(
            NeuronLink, active_of=self._active, scatter=gpu.triton("triton_neurons").scatter,
            upper_limit=self._upper_limit, staged=neuron_staging_bytes(formats, self._upper_limit),
            at_once=at_once,
        )  # fmt: skip

    def views(self, form: ExpertFormat, slot: torch.Tensor) -> Views:
        return neuron_views(form, slot)

    def over(self, link: MeteredLink) -> None:
        """Tells which link fills the slots: a GPU's knows what it has brought."""
        if isinstance(link, NeuronLink):
            self._loads = link

    def experts(
        self,
        index: int,
        gate: ExpertGate,
        formats: Mapping[int, ExpertFormat],
        views_of: Callable[[ExpertKey, int], Views],
    ) -> LayerKernels:
        activation, loads = gate.require_elementwise(), self._loads
        made: Mapping[int, NeuronKernel]
        kernels: Mapping[int, ExpertKernel]
        if isinstance(loads, NeuronLink):
            on_gpu = {bits: GpuNeuronKernel(form, activation, self._theta) for bits, form in formats.items()}
            one = GpuNeuronExperts(on_gpu, loads, self._proceed, self._counts)
            made, kernels = on_gpu, dict.fromkeys(formats, one)
        else:
            made = {bits: NeuronKernel(form, activation, self._theta) for bits, form in formats.items()}
            kernels = {bits: NeuronExpert(kernel, loads, self._proceed, self._counts) for bits, kernel in made.items()}
        self._kernels |= {(bits, index): kernel for bits, kernel in made.items()}
        return LayerKernels(kernels, views_of, expect=loads.expect)

    def miss_costs(self) -> MissCosts:
        """Nothing is computed elsewhere."""
        return MissCosts(None, None)

    def stats(self) -> dict[str, float]:
        counts, loads = self._counts.read(), self._loads
        return {
            "neurons_active": counts.active / counts.neurons if counts.neurons else 0.0,
            "neurons_there": counts.there / counts.active if counts.active else 0.0,
            "neurons_left_out": counts.left_out / counts.active if counts.active else 0.0,
            "neurons_spared": loads.spared / loads.asked if loads.asked else 0.0,
        }

    def roll_back(self) -> None:
        """Nothing is computed elsewhere."""

    def close(self) -> None:
        """Nothing is computed elsewhere."""

    def _active(self, key: ExpertKey, hidden: torch.Tensor, views: Any) -> torch.Tensor:
        kernel = self._kernels[key.bits, key.layer]
        return kernel.active(kernel.activations(hidden, views))[0]


def unit_of(composition: Composition, device: str) -> WholeExperts | ActiveNeurons:
    """The unit of a composition on a device type that can run it (`require_device`)."""
    return (
        ActiveNeurons(composition, device)
        if composition.unit == "neuron"
        else WholeExperts(device, composition.misses != "load")
    )


class Lender(Protocol):
    """Holds experts in main memory (`offload.second_level.HostCache`)."""

    def borrow(self, key: ExpertKey) -> torch.Tensor: ...

    def give_back(self, key: ExpertKey) -> None: ...


class CpuHelper:
    """One thread that computes with what `lender` holds in main memory, one expert after the other.
    `seconds_per_expert`: what the last ones took on average, with reading them where main memory had to; None before
    the first."""

    def __init__(self, lender: Lender) -> None:
        self.seconds_per_expert: float | None = None
        self._lender = lender
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tiermoe-cpu")

    def layer(self, index: int, formats: Mapping[int, ExpertFormat], gate: Gate) -> OnCpu:
        """What computes experts of MoE layer `index`; `formats` by precision. The Future raises LoadError if the
        expert cannot be read."""
        kernels = {bits: expert_kernel(form, gate, "cpu") for bits, form in formats.items()}

        def compute(expert: int, bits: int, x: torch.Tensor) -> torch.Tensor:
            started = time.perf_counter()
            key = ExpertKey(index, expert, bits)
            slot = self._lender.borrow(key)
            try:
                output = kernels[bits](x, formats[bits].slot.views(slot))
            finally:
                self._lender.give_back(key)
            self.seconds_per_expert = averaged(self.seconds_per_expert, time.perf_counter() - started)
            return output

        return lambda expert, bits, x: self._thread.submit(compute, expert, bits, x)

    def finish(self) -> None:
        """Waits until all that was asked for is computed."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Ends the thread once it is done with the expert that it computes; the others are dropped."""
        self._thread.shutdown(cancel_futures=True)


@dataclass(slots=True)
class NeuronCounts:
    """Of experts that ran on single tokens: all their neurons, the active ones, and of these how many were there when
    the expert ran; `left_out` were neither there nor brought (proceeding on a prediction). `later`: active ones, and of
    these those that were there, of experts whose neurons only the GPU knows."""

    neurons: int = 0
    active: int = 0
    there: int = 0
    left_out: int = 0
    later: torch.Tensor | None = None

    def read(self) -> NeuronCounts:
        """Itself with what the GPU has counted, which lets the host wait."""
        if self.later is not None:
            active, there = self.later.tolist()
            self.active += active
            self.there += there
            self.left_out += active - there
            self.later = None
        return self


class NeuronExpert:
    """Computes one layer's experts in one precision, as `kernels.expert.ExpertKernel` does for whole experts.

    An expert whose active neurons are not all there is topped up first, except that with `proceed` one that was loaded
    by prediction goes on with what it has for the token it was predicted for.
    """

    def __init__(self, kernel: NeuronKernel, filler: NeuronFiller, proceed: bool, counts: NeuronCounts) -> None:
        self._kernel = kernel
        self._filler = filler
        self._proceed = proceed
        self._counts = counts

    def __call__(self, x: torch.Tensor, views: Views) -> torch.Tensor:
        """x (M, H) → (M, H); `views` as `neuron_views` gives them. LoadError if a neuron cannot be read."""
        slot = views[_SLOT]["bytes"]
        key = self._filler.holder(slot)
        predicted = self._filler.was_predicted(key)
        if len(x) > 1:
            self._bring(key, slot, whole(self._kernel.neurons))
            return self._kernel(x, views)
        activations = self._kernel.activations(x, views)
        active = to_bits(self._kernel.active(activations)[0])
        missing = self._filler.neurons.missing(key, active)
        self._count(active, missing)
        if self._proceed and predicted:
            self._counts.left_out += missing.bit_count()
            active &= ~missing
        else:
            self._bring(key, slot, active)
        return self._kernel.combine(x, activations, to_indices(active), views)

    def watched(self, wrap: Callable[[Any], Any]) -> NeuronExpert:
        """The same with wrap(kernel) in the place of what computes; around it, it waits for the drive."""
        return NeuronExpert(wrap(self._kernel), self._filler, self._proceed, self._counts)

    def forward_one(self, x: torch.Tensor, views: Sequence[Views]) -> torch.Tensor:
        """One token x (1, H) through each of several experts → (experts, H)."""
        return torch.cat([self(x, each) for each in views])

    def forward_ragged(
        self, x: torch.Tensor, counts: list[int], views: Sequence[Views], among_others: bool = False
    ) -> torch.Tensor:
        """Several experts, each with rows of its own: counts[i] of x (M, hidden) are the i-th's → (M, hidden)."""
        return one_by_one(self, x, counts, views)

    def _bring(self, key: ExpertKey, slot: torch.Tensor, active: int) -> None:
        missing = self._filler.neurons.missing(key, active)
        if missing:
            self._filler.top_up(key, slot, missing)

    def _count(self, active: int, missing: int) -> None:
        self._counts.neurons += self._kernel.neurons
        self._counts.active += active.bit_count()
        self._counts.there += (active & ~missing).bit_count()


class GpuNeuronExperts:
    """Computes one layer's experts in all precisions on a GPU, as `NeuronExpert` does on a CPU.

    The host learns which neurons of a token's cached experts are active, by one wait for all that are computed in a
    call, and has missing ones brought. An expert that was loaded for the token that runs has them all, and one that
    goes on with its prediction takes those that are there: the host needs to know nothing.
    """

    def __init__(
        self, kernels: Mapping[int, GpuNeuronKernel], link: NeuronLink, proceed: bool, counts: NeuronCounts
    ) -> None:
        self._kernels = kernels
        self._link = link
        self._proceed = proceed
        self._counts = counts

    def __call__(self, x: torch.Tensor, views: Views) -> torch.Tensor:
        """x (M, H), of a pass over several tokens → (M, H). LoadError if main memory lacks the expert and cannot read
        it."""
        return self.forward_ragged(x, [len(x)], [views])

    def watched(self, wrap: Callable[[Any], Any]) -> GpuNeuronExperts:
        """As of `NeuronExpert`."""
        kernels = {bits: wrap(kernel) for bits, kernel in self._kernels.items()}
        return GpuNeuronExperts(kernels, self._link, self._proceed, self._counts)

    def forward_one(self, x: torch.Tensor, views: Sequence[Views]) -> torch.Tensor:
        """One token x (1, H) through each of several experts, of any precision → (experts, H). LoadError as
        `__call__`."""
        link, counts, calls = self._link, self._counts, list[_Call]()
        slots = [each[_SLOT]["bytes"] for each in views]
        keys = [link.holder(slot) for slot in slots]
        goes_on = [self._goes_on(key) for key in keys]
        for bits in dict.fromkeys(key.bits for key in keys):
            kernel, places = self._kernels[bits], [place for place, key in enumerate(keys) if key.bits == bits]
            tiles = kernel.tiles_of([slots[place] for place in places])
            activations = kernel.activations_of(x, tiles)
            calls.append(_Call(kernel, places, tiles, activations, kernel.active(activations)))
            counts.neurons += activations.numel()
        if not all(goes_on):
            masks = gpu.read_back([call.active for call in calls])
            pairs = zip(calls, masks, strict=True)
            active = {place: to_bits(row) for call, mask in pairs for place, row in zip(call.places, mask, strict=True)}
            self._top_up([(key, slots[place], active[place], goes_on[place]) for place, key in enumerate(keys)])
        rows: dict[int, torch.Tensor] = {}
        for kernel, places, tiles, activations, wanted in calls:
            there = torch.stack([to_mask(link.neurons.present(keys[place]), kernel.neurons) for place in places])
            used = wanted & there.to(x.device, non_blocking=True)
            if all(goes_on):
                later = torch.stack((wanted.sum(), used.sum()))
                counts.later = later if counts.later is None else counts.later + later
            rows |= zip(places, kernel.sums(x, activations.masked_fill(~used, 0), tiles), strict=True)
        return torch.stack([rows[place] for place in range(len(keys))])

    def forward_ragged(
        self, x: torch.Tensor, counts: list[int], views: Sequence[Views], among_others: bool = False
    ) -> torch.Tensor:
        """Several experts, each with rows of its own: counts[i] of x (M, hidden) are the i-th's → (M, hidden)."""
        outputs, missing = [], list[Part]()
        keys = [self._link.holder(each[_SLOT]["bytes"]) for each in views]
        for key, each in zip(keys, views, strict=True):
            every = whole(self._kernels[key.bits].neurons)
            if self._link.neurons.missing(key, every):
                missing.append(Part(key, each[_SLOT]["bytes"], every))
        if missing:
            self._link.top_up(missing)
        for key, rows, each in zip(keys, torch.split(x, counts), views, strict=True):
            self._link.chosen_by(key)  # for no later token
            outputs.append(self._kernels[key.bits](rows, each))
        return torch.cat(outputs)

    def _goes_on(self, key: ExpertKey) -> bool:
        """Whether the expert takes what is there of its active neurons: they all are, or it was predicted."""
        link, token = self._link, self._link.chosen_by(key)
        if not link.neurons.missing(key, whole(self._kernels[key.bits].neurons)):
            return True
        if token is None:
            return False
        return token is link.token or (self._proceed and token.layer != key.layer)

    def _top_up(self, experts: Iterable[tuple[ExpertKey, torch.Tensor, int, bool]]) -> None:
        """Counts the active neurons of (expert, slot, its active ones, whether it goes on), and brings missing ones."""
        counts, missing = self._counts, list[Part]()
        for key, slot, active, goes_on in experts:
            absent = self._link.neurons.missing(key, active)
            counts.active += active.bit_count()
            counts.there += (active & ~absent).bit_count()
            if goes_on:
                counts.left_out += absent.bit_count()
            elif absent:
                missing.append(Part(key, slot, self._link.to_load(key, absent)))
        if missing:
            self._link.top_up(missing)


class _Call(NamedTuple):
    """Experts of one precision on a token."""

    kernel: GpuNeuronKernel
    places: list[int]  # among those of the layer's call
    tiles: dict[int, torch.Tensor]
    activations: torch.Tensor
    active: torch.Tensor


def neuron_views(form: ExpertFormat, slot: torch.Tensor) -> Views:
    """Typed views of a slot, and the slot itself, into which missing neurons are read."""
    return {**form.slot.views(slot), _SLOT: {"bytes": slot}}
