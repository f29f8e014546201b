"""Experts on packed weights: first matrix, activation, second matrix. Fused in one native call where the native kernels
take them, with one launch for each matrix on a GPU, else unfused: each matrix by its linear kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tiermoe.formats.encoding import scratch
from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.formats.plain import Plain
from tiermoe.kernels import gpu
from tiermoe.kernels.gates import Gate
from tiermoe.kernels.gpu import GroupedExperts, grouped_experts
from tiermoe.kernels.linear import MatrixForm, linear_for, matrix_form
from tiermoe.native import ROWS, _native, available, structs
from tiermoe.types import Part

Views = Mapping[str, Mapping[str, Tensor]]


class SlotViews(dict[str, Mapping[str, Tensor]]):
    """Views of a slot that lives as long as they do."""

    packed: bytes | None = None  # its `structs.Expert`, from the first call on


class ExpertKernel(Protocol):
    """Computes experts of one format. The number of tokens alone chooses the kernel of an expert and precision, so that
    results do not depend on the cache."""

    def __call__(self, x: Tensor, views: Views) -> Tensor:
        """x (M, hidden) in the compute dtype → (M, hidden). `views` are the fields of the expert's slot."""
        ...

    def forward_one(self, x: Tensor, views: Sequence[Views]) -> Tensor:
        """One token x (1, hidden) through each of several experts → (experts, hidden): the values that calling them one
        by one gives."""
        ...

    def forward_ragged(
        self, x: Tensor, counts: list[int], views: Sequence[Views], among_others: bool = False
    ) -> Tensor:
        """Several experts, each with rows of its own: counts[i] of x (M, hidden), one after the other,
        are the i-th's → (M, hidden). among_others: in a pass of many tokens, much of which torch computes; changes no
        value."""
        return one_by_one(self, x, counts, views)


def weighted_sum(outputs: Sequence[Tensor], weights: Tensor, places: Sequence[int]) -> Tensor:
    """sum of outputs[i] * weights[places[i]], in their order, rounded to the outputs' dtype after each product and each
    sum. outputs (H), at least one, on any device; weights (K) in that dtype or float32, in main memory → (1, H)."""
    first = outputs[0]
    if combines(first):
        gates = weights.tolist()
        return combine(outputs, [gates[place] for place in places])
    factors = weights[list(places), None].to(first.device, non_blocking=True)
    products = (torch.stack(list(outputs)) * factors).to(first.dtype)
    total = products[:1]
    for place in range(1, len(outputs)):
        total = total + products[place]
    return total


def one_by_one(
    kernel: Callable[[Tensor, Views], Tensor], x: Tensor, counts: list[int], views: Sequence[Views]
) -> Tensor:
    """`ExpertKernel.forward_ragged` by one call for each expert."""
    return torch.cat([kernel(rows, each) for rows, each in zip(torch.split(x, counts), views, strict=True)])


def expert_kernel(form: ExpertFormat, gate: Gate, device: str) -> ExpertKernel:
    """The kernel of experts of format `form` on a device type: the native one where it takes them, on a GPU the grouped
    one."""
    separate = UnfusedExperts(form, gate, device)
    if device == "cuda":
        grouped = grouped_experts(form)
        return separate if grouped is None else Grouped(grouped, gate, separate)
    native = gated_experts(form, gate) if device == "cpu" else None
    return separate if native is None else FusedExperts(native, separate)


def unfused(kernel: ExpertKernel) -> UnfusedExperts:
    """The kernel of the same experts in separate steps: values between the matrices can be read."""
    steps = kernel.separate if isinstance(kernel, FusedExperts | Grouped) else kernel
    assert isinstance(steps, UnfusedExperts)
    return steps


class FusedExperts(ExpertKernel):
    """Native gated experts."""

    def __init__(self, native: GatedExperts, separate: UnfusedExperts) -> None:
        self.native, self.separate = native, separate

    def __call__(self, x: Tensor, views: Views) -> Tensor:
        return self.native(x, (self.packed(views),), among_others=True)[0]

    def forward_one(self, x: Tensor, views: Sequence[Views]) -> Tensor:
        return self.native(x, [self.packed(each) for each in views], among_others=False)[:, 0]

    def forward_ragged(
        self, x: Tensor, counts: list[int], views: Sequence[Views], among_others: bool = False
    ) -> Tensor:
        """All experts in one call, with the values of a call for each."""
        return self.native.forward_ragged(x, counts, [self.packed(each) for each in views], among_others)

    def packed(self, views: Views) -> bytes:
        """The expert's `structs.Expert`."""
        if not isinstance(views, SlotViews):
            return self.native.pack(views)
        if views.packed is None:
            views.packed = self.native.pack(views)
        return views.packed


class Grouped(ExpertKernel):
    """Experts on a GPU: several by few launches a matrix, with the values of separate steps."""

    def __init__(self, grouped: GroupedExperts, gate: Gate, separate: UnfusedExperts) -> None:
        self.separate = separate
        self._grouped = grouped
        self._gate = gate

    def __call__(self, x: Tensor, views: Views) -> Tensor:
        return self.separate(x, views)

    def forward_one(self, x: Tensor, views: Sequence[Views]) -> Tensor:
        return self._grouped(x, [1] * len(views), views, self._gate, shared=True)

    def forward_ragged(
        self, x: Tensor, counts: list[int], views: Sequence[Views], among_others: bool = False
    ) -> Tensor:
        return self._grouped(x, counts, views, self._gate)

    def sum_one(self, x: Tensor, views: Sequence[Views], weights: list[float]) -> Tensor:
        """One token x (1, hidden) through each expert, and the sum of what they give by these weights, in their order
        → (1, hidden): the values of `forward_one` and `combine`. One copy, and one graph where there are graphs."""
        return self._grouped.sum_one(x, views, weights, self._gate)


class UnfusedExperts(ExpertKernel):
    """First matrix, activation, second matrix, each in a call of its own."""

    def __init__(self, form: ExpertFormat, gate: Gate, device: str) -> None:
        first, second = (part for part in form.layer.parts if part.is_matrix)
        self._first = _linear(form, first, device)
        self._second = _linear(form, second, device)
        self._gate = gate

    def __call__(self, x: Tensor, views: Views) -> Tensor:
        return self._second(self._gate(self.features(x, views)), views)

    def features(self, x: Tensor, views: Views) -> Tensor:
        """The first matrix's outputs, before the activation: (M, features)."""
        return self._first(x, views)

    def forward_one(self, x: Tensor, views: Sequence[Views]) -> Tensor:
        return torch.cat([self(x, each) for each in views])


def _linear(form: ExpertFormat, part: Part, device: str) -> Callable[[Tensor, Views], Tensor]:
    """x (M, in), views → (M, out), with the bias where the expert has one."""
    name, (out, in_) = part.name, part.out_in
    bias = form.bias_of(part)
    encoding = form.encodings.get(name)
    if encoding is None and part.transposed:

        def multiply(x: Tensor, views: Views) -> Tensor:
            return x @ views[name]["weight"]
    else:
        kernel = linear_for(encoding.name if encoding else "plain", device, form.dtype)

        def multiply(x: Tensor, views: Views) -> Tensor:
            return kernel(x, views[name], out, in_)

    if bias is None:
        return multiply

    def multiply_and_add(x: Tensor, views: Views) -> Tensor:
        return multiply(x, views) + views[bias]["weight"]

    return multiply_and_add


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """A matrix of an expert."""

    name: str  # of the part in a slot
    form: MatrixForm
    bias: str | None  # the name of the bias's part

    def bias_in(self, views: Views) -> int:
        """The bias's address; 0 without one."""
        return views[self.bias]["weight"].data_ptr() if self.bias else 0


class GatedExperts:
    """Experts second(gate(first(x))) in bfloat16; first (2 I, H), without a gate (I, H), second (H, I). `hidden`: H."""

    def __init__(self, first: ExpertMatrix, second: ExpertMatrix, gate: Gate) -> None:
        self._first, self._second = first, second
        self.hidden, self._inner = second.form.out, second.form.in_
        limit, alpha = (*gate.settings, 0.0, 0.0)[:2]
        self._gate = gate.native, limit, alpha

    def pack(self, views: Views) -> bytes:
        """A `structs.Expert` of the expert in a slot; valid as long as the slot lives."""
        first, second = self._first, self._second
        return self._packed(
            first.form.pack(views[first.name]), second.form.pack(views[second.name]), first.bias_in(views),
            second.bias_in(views),
        )  # fmt: skip

    def absent(self) -> bytes:
        """`structs.Expert` of an absent expert: addresses are 0."""
        return self._packed(self._first.form.absent(), self._second.form.absent(), 0, 0)

    def _packed(self, first: bytes, second: bytes, first_bias: int, second_bias: int) -> bytes:
        matrices = structs.Matrix.from_buffer_copy(first), structs.Matrix.from_buffer_copy(second)
        return _native.pack(structs.Expert(*matrices, first_bias, second_bias, *self._gate))

    def __call__(self, x: Tensor, experts: Sequence[bytes], among_others: bool) -> Tensor:
        """x (M, H) through each of the packed `experts` → (experts, M, H). among_others: in a pass of several tokens,
        much of which torch computes; decides whose threads compute, and changes no value."""
        results = x.shape[0] * len(experts)
        return self._run(x, experts, None, results, among_others).view(len(experts), x.shape[0], self.hidden)

    def forward_ragged(self, x: Tensor, counts: list[int], experts: Sequence[bytes], among_others: bool) -> Tensor:
        """Each of the packed `experts` computes rows of its own: the first counts[0] rows of x (M, H) are the first
        one's, and so on → (M, H). A row's result depends on neither the other rows nor the other experts.
        among_others: see a call."""
        return self._run(x, experts, counts, x.shape[0], among_others)

    def _run(
        self, x: Tensor, experts: Sequence[bytes], counts: list[int] | None, results: int, among_others: bool
    ) -> Tensor:
        x = x.contiguous()
        rows, threads = x.shape[0], torch.get_num_threads()
        out = torch.empty((results, self.hidden), dtype=torch.bfloat16)
        inner = scratch.address("inner", 2 * results * self._inner)
        room = scratch.address("prepared", _native.prepared(experts[0], rows, results, threads))
        _native.experts(
            b"".join(experts), counts, x.data_ptr(), rows, inner, room, out.data_ptr(), threads, among_others
        )
        return out


def gated_experts(form: ExpertFormat, gate: Gate) -> GatedExperts | None:
    """The kernel of experts of a format; None where it cannot take their matrices, biases or gate."""
    first, second = (_matrix(form, part) for part in form.layer.parts if part.is_matrix)
    if first is None or second is None or gate.native is None:
        return None
    named = {first.name, second.name, first.bias, second.bias}
    if any(part.name not in named for part in form.layer.parts):
        return None
    up, down = first.form, second.form
    inner = 2 * down.in_ if gate.kind.gated else down.in_
    if down.in_ % ROWS or down.out % ROWS or (up.out, up.in_) != (inner, down.out):
        return None
    return GatedExperts(first, second, gate)


def _matrix(form: ExpertFormat, part: Part) -> ExpertMatrix | None:
    encoding = form.encodings.get(part.name)
    if encoding is None and part.transposed:
        return None
    taken = matrix_form(encoding or Plain(), *part.out_in, form.dtype)
    return ExpertMatrix(part.name, taken, form.bias_of(part)) if taken else None


def combines(output: Tensor) -> bool:
    """Whether `combine` takes outputs like this one (H)."""
    if output.device.type != "cpu":
        return gpu.has_triton()
    return output.dtype == torch.bfloat16 and output.numel() % 16 == 0 and available()


def combine(outputs: Sequence[Tensor], weights: list[float]) -> Tensor:
    """sum of weights[i] * outputs[i], in their order, rounded to their dtype after each product and each sum: the
    values that torch's separate operations give. outputs (H), contiguous, at least one → (1, H)."""
    return combine_rows([output.data_ptr() for output in outputs], weights, outputs[0])


def combine_rows(addresses: list[int], weights: list[float], like: Tensor) -> Tensor:
    """`combine` of contiguous rows that lie at `addresses`, 0 where there is none, on the device of `like` (..., H) and
    of its dtype → (1, H)."""
    if like.device.type != "cpu":
        return gpu.weighted_sums(torch.tensor([addresses]), torch.tensor([weights]), like)
    columns = like.shape[-1]
    out = torch.empty((1, columns), dtype=torch.bfloat16)
    there = [each for each in zip(addresses, weights, strict=True) if each[0]]
    _native.combine([address for address, _ in there], [weight for _, weight in there], columns, out.data_ptr())
    return out


def combine_many(addresses: Tensor, weights: Tensor, like: Tensor) -> Tensor:
    """`combine_rows` for each of T tokens → (T, H). addresses: int64 (T, K), in the order in which rows are added;
    weights: float32 (T, K). Both in main memory."""
    if like.device.type != "cpu":
        return gpu.weighted_sums(addresses, weights, like)
    (tokens, k), columns = addresses.shape, like.shape[-1]
    out = torch.empty((tokens, columns), dtype=torch.bfloat16)
    _native.combine_many(
        addresses.data_ptr(), weights.data_ptr(), tokens, k, columns, out.data_ptr(), torch.get_num_threads()
    )
    return out
