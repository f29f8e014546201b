"""One expert on packed weights: first matrix, activation, second matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from tiermoe.kernels import linear_for
from tiermoe.kernels.cpu import native_tokens
from tiermoe.kernels.grouped import GroupedExperts, grouped_experts
from tiermoe.kernels.native.experts import GatedExperts, bias_of, combine, combines, gated_experts
from tiermoe.store.layout import ExpertFormat
from tiermoe.types import Part

Activation = Callable[[torch.Tensor], torch.Tensor]
Views = Mapping[str, Mapping[str, torch.Tensor]]


class SlotViews(dict[str, Mapping[str, torch.Tensor]]):
    """Views of a slot that lives as long as they do. `packed`: what a native kernel was told of it, once it was."""

    packed: bytes | None = None


class ExpertKernel(Protocol):
    """Computes experts of one format. The same kernel runs for an expert and precision wherever it lies, chosen by the
    number of tokens alone, so that results do not depend on the cache."""

    def __call__(self, x: torch.Tensor, views: Views) -> torch.Tensor:
        """x (M, hidden) in the compute dtype → (M, hidden). `views` are the fields of the expert's slot."""
        ...

    def together(self, x: torch.Tensor, views: Sequence[Views]) -> torch.Tensor:
        """One token x (1, hidden) through each of several experts → (experts, hidden): the values that calling them one
        by one gives (`OneTokenInOneCall`: but for the last bits)."""
        ...

    def apart(
        self, x: torch.Tensor, counts: list[int], views: Sequence[Views], among_others: bool = False
    ) -> torch.Tensor:
        """Several experts, each with rows of its own: counts[i] of x (M, hidden), one after the other,
        are the i-th's → (M, hidden). among_others: in a pass of many tokens, much of which torch computes; changes no
        value."""
        ...


def weighted_sum(outputs: Sequence[torch.Tensor], weights: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """sum of outputs[i] * weights[places[i]], in their order, rounded to the outputs' dtype after each product and each
    sum. outputs (H), at least one; weights (K) in that dtype or float32 → (1, H)."""
    first = outputs[0]
    if combines(first):
        gates = weights.tolist()
        return combine(outputs, [gates[place] for place in places])
    total: torch.Tensor | None = None
    for output, place in zip(outputs, places, strict=True):
        # a slice, not a scalar: a scalar tensor would not promote the product to float32 where weights are
        part = (output * weights[place : place + 1]).to(first.dtype)
        total = part if total is None else total + part
    assert total is not None
    return total[None]


def one_by_one(
    kernel: Callable[[torch.Tensor, Views], torch.Tensor], x: torch.Tensor, counts: list[int], views: Sequence[Views]
) -> torch.Tensor:
    """`ExpertKernel.apart`, in a call for each expert."""
    return torch.cat([kernel(rows, each) for rows, each in zip(torch.split(x, counts), views, strict=True)])


def expert_kernel(form: ExpertFormat, activation: Activation, device: str) -> ExpertKernel:
    """The kernel of experts of format `form` on a device type: the native one where it takes them, on a GPU the grouped
    one."""
    separate = SeparateSteps(form, activation, device)
    if device == "cuda":
        grouped = grouped_experts(form)
        return separate if grouped is None else Grouped(grouped, activation, separate)
    native = gated_experts(form, activation) if device == "cpu" else None
    if native is None:
        return separate
    return OneTokenInOneCall(native, separate) if native.plain else InOneCall(native, separate)


def separate_steps(kernel: ExpertKernel) -> SeparateSteps:
    """The kernel that computes the same expert in separate steps, between which one can look."""
    steps = kernel.separate if isinstance(kernel, InOneCall | OneTokenInOneCall | Grouped) else kernel
    assert isinstance(steps, SeparateSteps)
    return steps


class InOneCall:
    """Native gated experts; from the number of tokens on where another kernel is faster, that one."""

    def __init__(self, native: GatedExperts, separate: SeparateSteps) -> None:
        self.native, self.separate = native, separate
        self._tokens = native_tokens()

    def __call__(self, x: torch.Tensor, views: Views) -> torch.Tensor:
        if x.shape[0] > self._tokens:
            return self.separate(x, views)
        return self.native(x, (self.packed(views),), among_others=True)[0]

    def together(self, x: torch.Tensor, views: Sequence[Views]) -> torch.Tensor:
        return self.native(x, [self.packed(each) for each in views], among_others=False)[:, 0]

    def apart(
        self, x: torch.Tensor, counts: list[int], views: Sequence[Views], among_others: bool = False
    ) -> torch.Tensor:
        """In one call; the values that a call for each gives."""
        if max(counts) > self._tokens:
            return one_by_one(self, x, counts, views)
        return self.native.apart(x, counts, [self.packed(each) for each in views], among_others)

    def packed(self, views: Views) -> bytes:
        """What the native kernel is told of the expert."""
        return _packed(self.native, views)


class OneTokenInOneCall:
    """Experts at 16 bits: native for a token alone, in separate steps for those of several tokens, which give the bits
    of transformers' eager experts. An expert with one of several tokens is among these."""

    def __init__(self, native: GatedExperts, separate: SeparateSteps) -> None:
        self.native, self.separate = native, separate

    def __call__(self, x: torch.Tensor, views: Views) -> torch.Tensor:
        return self.separate(x, views)

    def together(self, x: torch.Tensor, views: Sequence[Views]) -> torch.Tensor:
        return self.native(x, [_packed(self.native, each) for each in views], among_others=False)[:, 0]

    def apart(
        self, x: torch.Tensor, counts: list[int], views: Sequence[Views], among_others: bool = False
    ) -> torch.Tensor:
        return one_by_one(self, x, counts, views)


def _packed(native: GatedExperts, views: Views) -> bytes:
    if not isinstance(views, SlotViews):
        return native.pack(views)
    if views.packed is None:
        views.packed = native.pack(views)
    return views.packed


class Grouped:
    """On a GPU: the experts of one token with one launch per matrix, whose values are those of separate steps; more
    tokens in separate steps."""

    def __init__(self, grouped: GroupedExperts, activation: Activation, separate: SeparateSteps) -> None:
        self.separate = separate
        self._grouped = grouped
        self._activation = activation

    def __call__(self, x: torch.Tensor, views: Views) -> torch.Tensor:
        return self.separate(x, views)

    def together(self, x: torch.Tensor, views: Sequence[Views]) -> torch.Tensor:
        return self._grouped(x, views, self._activation)

    def apart(
        self, x: torch.Tensor, counts: list[int], views: Sequence[Views], among_others: bool = False
    ) -> torch.Tensor:
        return one_by_one(self, x, counts, views)


class SeparateSteps:
    """First matrix, activation, second matrix, each in a call of its own."""

    def __init__(self, form: ExpertFormat, activation: Activation, device: str) -> None:
        first, second = (part for part in form.layer.parts if part.is_matrix)
        self._first = _matrix(form, first, device)
        self._second = _matrix(form, second, device)
        self._activation = activation

    def __call__(self, x: torch.Tensor, views: Views) -> torch.Tensor:
        return self._second(self._activation(self.features(x, views)), views)

    def features(self, x: torch.Tensor, views: Views) -> torch.Tensor:
        """What comes out of the first matrix, before the activation: (M, its features)."""
        return self._first(x, views)

    def together(self, x: torch.Tensor, views: Sequence[Views]) -> torch.Tensor:
        return torch.cat([self(x, each) for each in views])

    def apart(
        self, x: torch.Tensor, counts: list[int], views: Sequence[Views], among_others: bool = False
    ) -> torch.Tensor:
        return one_by_one(self, x, counts, views)


def _matrix(form: ExpertFormat, part: Part, device: str) -> Callable[[torch.Tensor, Views], torch.Tensor]:
    """x (M, in), views → (M, out), with the bias where the expert has one."""
    name, (out, in_) = part.name, part.out_in
    bias = bias_of(form, part)
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
