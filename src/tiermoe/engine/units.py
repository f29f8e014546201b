"""The unit in which experts are moved and computed: whole, some of them on the CPU beside a GPU (HOBBIT, section 4,
CPU-GPU cooperative computing), or by their active neurons (CORM, sections 4.2 and 4.3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.kernels.experts import ExpertKernel, SlotViews, Views, expert_kernel, one_by_one
from tiermoe.kernels.gates import Gate
from tiermoe.kernels.neurons import NeuronKernel
from tiermoe.model.moe import ExpertGate
from tiermoe.offload.composition import Composition
from tiermoe.offload.disk import SlotFiller
from tiermoe.offload.gpu import GpuLink
from tiermoe.offload.link import MeteredLink
from tiermoe.offload.neurons import NeuronFiller, PartReader, to_bits, to_indices
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

    kernels: Mapping[int, ExpertKernel]  # one for each precision
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
    """Experts are loaded W1 first, then by the neurons that it makes active (CORM), on the CPU."""

    def __init__(self, composition: Composition) -> None:
        assert composition.theta is not None
        self._theta = composition.theta
        self._upper_limit = composition.upper_limit
        self._proceed = composition.proceeds
        self._gap_bytes = composition.gap_bytes
        self._kernels: dict[tuple[int, int], NeuronKernel] = {}
        self._counts = NeuronCounts()
        self._filler: NeuronFiller

    @property
    def wait_s(self) -> float:
        """Seconds in which the computing thread read missing neurons of cached experts."""
        return self._filler.wait_s

    def filler(self, reader: PartReader, extent_of: ExtentOf, format_of: FormatOf, as_stored: bool) -> SlotFiller:
        self._filler = NeuronFiller(reader, extent_of, format_of, self._active, self._upper_limit, self._gap_bytes)
        return self._filler

    def views(self, form: ExpertFormat, slot: torch.Tensor) -> Views:
        return neuron_views(form, slot)

    def over(self, link: MeteredLink) -> None:
        """Neurons are topped up through the filler, whatever the link."""

    def experts(
        self,
        index: int,
        gate: ExpertGate,
        formats: Mapping[int, ExpertFormat],
        views_of: Callable[[ExpertKey, int], Views],
    ) -> LayerKernels:
        activation = gate.require_elementwise()
        kernels = {}
        for bits, form in formats.items():
            self._kernels[bits, index] = kernel = NeuronKernel(form, activation, self._theta)
            kernels[bits] = NeuronExpert(kernel, self._filler, self._proceed, self._counts)
        return LayerKernels(kernels, views_of, expect=self._filler.expect)

    def miss_costs(self) -> MissCosts:
        """Nothing is computed elsewhere."""
        return MissCosts(None, None)

    def stats(self) -> dict[str, float]:
        counts = self._counts
        return {
            "neurons_active": counts.active / counts.neurons if counts.neurons else 0.0,
            "neurons_there": counts.there / counts.active if counts.active else 0.0,
            "neurons_left_out": counts.left_out / counts.active if counts.active else 0.0,
            "neurons_spared": self._filler.spared / self._filler.asked if self._filler.asked else 0.0,
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
        ActiveNeurons(composition)
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
    the expert ran; `left_out` were neither there nor brought (proceeding on a prediction)."""

    neurons: int = 0
    active: int = 0
    there: int = 0
    left_out: int = 0


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
        """Several experts, each with rows of its own: counts[i] of x (M, H) are the i-th's → (M, H)."""
        return one_by_one(self, x, counts, views)

    def _bring(self, key: ExpertKey, slot: torch.Tensor, active: int) -> None:
        missing = self._filler.neurons.missing(key, active)
        if missing:
            self._filler.top_up(key, slot, missing)

    def _count(self, active: int, missing: int) -> None:
        self._counts.neurons += self._kernel.neurons
        self._counts.active += active.bit_count()
        self._counts.there += (active & ~missing).bit_count()


def neuron_views(form: ExpertFormat, slot: torch.Tensor) -> Views:
    """Typed views of a slot, and the slot itself, into which missing neurons are read."""
    return {**form.slot.views(slot), _SLOT: {"bytes": slot}}
