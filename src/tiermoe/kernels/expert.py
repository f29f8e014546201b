"""One expert on packed weights: first matrix, activation, second matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tiermoe.kernels import linear_for
from tiermoe.store.layout import ExpertFormat
from tiermoe.types import Part

Activation = Callable[[torch.Tensor], torch.Tensor]
Views = Mapping[str, Mapping[str, torch.Tensor]]


class ExpertKernel:
    """Computes experts of one format. The same kernel runs for an expert and precision wherever it lies, chosen by the
    number of tokens alone, so that results do not depend on the cache."""

    def __init__(self, form: ExpertFormat, activation: Activation, device: str) -> None:
        first, second = (part for part in form.layer.parts if part.is_matrix)
        self._first = _matrix(form, first, device)
        self._second = _matrix(form, second, device)
        self._activation = activation

    def __call__(self, x: torch.Tensor, views: Views) -> torch.Tensor:
        """x (M, hidden) in the compute dtype → (M, hidden). `views` are the fields of the expert's slot."""
        return self._second(self._activation(self._first(x, views)), views)


def _matrix(form: ExpertFormat, part: Part, device: str) -> Callable[[torch.Tensor, Views], torch.Tensor]:
    """x (M, in), views → (M, out), with the bias where the expert has one."""
    name, (out, in_) = part.name, part.out_in
    bias = _bias_of(form, part)
    encoding = form.encodings.get(name)
    if encoding is None and part.transposed:

        def multiply(x: torch.Tensor, views: Views) -> torch.Tensor:
            return x @ views[name]["weight"]
    else:
        kernel = linear_for(encoding.name if encoding else "plain", device, form.dtype)

        def multiply(x: torch.Tensor, views: Views) -> torch.Tensor:
            return kernel(x, views[name], out, in_)

    if bias is None:
        return multiply

    def multiply_and_add(x: torch.Tensor, views: Views) -> torch.Tensor:
        return multiply(x, views) + views[bias]["weight"]

    return multiply_and_add


def _bias_of(form: ExpertFormat, matrix: Part) -> str | None:
    names = {f"{matrix.name}_bias", matrix.name.replace(".weight", ".bias")} - {matrix.name}
    return next((part.name for part in form.layer.parts if part.name in names), None)
