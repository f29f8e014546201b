"""The neuron unit in a model: experts computed with the neurons that are active, which are brought where they are not
there (CORM, sections 4.2 and 4.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.kernels.experts import Views, one_by_one
from tiermoe.kernels.neurons import NeuronKernel
from tiermoe.offload.neurons import NeuronFiller, to_bits, to_indices
from tiermoe.offload.policies.neurons import whole
from tiermoe.types import ExpertKey

_SLOT = "slot"


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
        """x (M, H) → (M, H); `views` as `neuron_views` gives them. LoadError where a neuron cannot be read."""
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
