"""In what an expert is moved and computed: whole, or by its active neurons. What the engine asks of either."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tiermoe.engine.cooperative import CpuHelper
from tiermoe.engine.moe_layer import ExpertSource
from tiermoe.engine.neuron_experts import NeuronCounts, NeuronExpert, neuron_views
from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.kernels.experts import SlotViews, Views, expert_kernel
from tiermoe.kernels.neurons import NeuronKernel
from tiermoe.model.moe import ExpertGate
from tiermoe.offload.composition import Composition
from tiermoe.offload.disk import SlotFiller
from tiermoe.offload.gpu import GpuLink
from tiermoe.offload.link import MeteredLink
from tiermoe.offload.neurons import NeuronFiller, PartReader
from tiermoe.offload.policies.cpu_fallback import MissCosts
from tiermoe.types import ExpertKey, Extent

ExtentOf = Callable[[ExpertKey], Extent]
FormatOf = Callable[[ExpertKey], ExpertFormat]


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
    ) -> ExpertSource:
        """What computes the experts of MoE layer `index`, which compute `gate` between their matrices; `formats` by
        precision."""
        kernels = {bits: expert_kernel(form, gate.activation, self._device) for bits, form in formats.items()}
        on_cpu = self._helper.layer(index, formats, gate.activation) if self._helper else None
        return ExpertSource(kernels, views_of, on_cpu)

    def stats(self) -> dict[str, float]:
        return {}

    def miss_costs(self) -> MissCosts:
        """What a missing expert has taken, loaded and on the CPU."""
        assert self._helper is not None
        assert self._link is not None
        return MissCosts(self._link.seconds_per_load, self._helper.seconds_per_expert)

    def roll_back(self) -> None:
        """Waits for what runs beside the device, which nobody is going to ask for."""
        if self._helper is not None:
            self._helper.finish()

    def close(self) -> None:
        """Ends what runs beside the device; before the link is closed."""
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
    ) -> ExpertSource:
        activation = gate.require_elementwise()
        kernels = {}
        for bits, form in formats.items():
            self._kernels[bits, index] = kernel = NeuronKernel(form, activation, self._theta)
            kernels[bits] = NeuronExpert(kernel, self._filler, self._proceed, self._counts)
        return ExpertSource(kernels, views_of, expect=self._filler.expect)

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
        """Nothing runs beside the device."""

    def close(self) -> None:
        """Nothing runs beside the device."""

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
