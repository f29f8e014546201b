"""One expert of the neuron unit on packed weights: activations first, then the active neurons alone (CORM, section 3).

An expert is W2 (act(W1 x) * W3 x). Neuron j is active where |act(W1 x)_j| > theta; the others count as zero. So
theta = 0 gives the dense result of the packed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tiermoe.formats.encoding import scratch
from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.formats.neurons import GATE, NEURONS, Records, Sealed, record_place
from tiermoe.kernels import gpu
from tiermoe.kernels.experts import Views
from tiermoe.kernels.gates import Activation
from tiermoe.kernels.linear import linear_for, product_dtype
from tiermoe.native import _native, available, structs

BLOCK_WEIGHTS = 1 << 20  # weights of a half unpacked at a time: bounds the temporaries
APART = 8  # tokens up to which the kernels of one token, token by token, take less time than unpacking all neurons


class NeuronKernel:
    """Computes experts of one format of the neuron unit. activation: of W1 x, elementwise. device: 'cpu', or as
    `GpuNeuronKernel`.

    The number of tokens and the used neurons alone choose the kernel, never the cache."""

    def __init__(self, form: ExpertFormat, activation: Activation, theta: float, device: str = "cpu") -> None:
        gate, records = form.encodings[GATE], form.encodings[NEURONS]
        assert isinstance(gate, Sealed)
        assert isinstance(records, Records)
        self.neurons, self._width = form.layer.parts[0].out_in
        self._gate = linear_for(gate.inner.name, device, form.dtype)
        self._activation = activation
        self._records = records
        self._dtype = form.dtype
        self._product_dtype = product_dtype(form.dtype) if device == "cpu" else form.dtype
        self._theta = theta
        self._block = max(1, BLOCK_WEIGHTS // self._width)
        self._native = device == "cpu" and takes_records(records, self._width, form.dtype)

    def activations(self, x: Tensor, views: Views) -> Tensor:
        """act(W1 x): x (T, H) in the compute dtype → (T, I)."""
        return self._activation(self._gate(x, views[GATE], self.neurons, self._width))

    def active(self, activations: Tensor) -> Tensor:
        """Where |a| > theta; an undefined activation is active, so that it is not hidden."""
        return ~(activations.float().abs() <= self._theta)

    def combine(self, x: Tensor, activations: Tensor, used: Tensor, views: Views) -> Tensor:
        """The sum over neurons `used` (int64 (n,), ascending) of a_j (w3_j . x) w2_j: x (1, H) and activations (1, I)
        → (1, H). Only the used records are read."""
        records = views[NEURONS]["records"]
        if self._native:
            return combined(x, activations, used, records, self._records)
        whole = len(used) == self.neurons
        strips = self._records.strips
        x_groups = x[0].to(self._product_dtype).view(strips, -1, self._records.group)
        x_sums = x[0].float().view(-1, self._records.group).sum(1)
        gates = activations[0, used].float()
        total = torch.zeros(x.shape[1])
        for first in range(0, len(used), self._block):
            part = slice(first, first + self._block)
            rows = records[part] if whole else self._gathered(records, used[part])
            products = gates[part] * self._up(rows, x_groups, x_sums)
            total += self._down(rows, products)
        return total.to(x.dtype)[None]

    def __call__(self, x: Tensor, views: Views) -> Tensor:
        """Many tokens, every neuron there: x (T, H) → (T, H), inactive neurons as zeros."""
        activations = self.activations(x, views)
        active = self.active(activations)
        if self._native and len(x) <= APART:
            used = [each.nonzero()[:, 0] for each in active]
            rows = zip(x[:, None], activations[:, None], used, strict=True)
            return torch.cat([self.combine(*row, views) for row in rows])
        activations = activations.masked_fill(~active, 0).to(self._product_dtype)
        x_product = x.to(self._product_dtype)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for first in range(0, self.neurons, self._block):
            part = slice(first, first + self._block)
            records = views[NEURONS]["records"][part]
            up, down = (self._records.decode_half(records, half, self._width, self._dtype) for half in (0, 1))
            products = torch.nn.functional.linear(x_product, up.to(self._product_dtype)) * activations[:, part]
            total += products @ down.to(self._product_dtype)
        return total.to(x.dtype)

    def _gathered(self, records: Tensor, used: Tensor) -> Tensor:
        rows = scratch.take("records", (len(used), records.shape[1]), torch.uint8)
        return torch.index_select(records, 0, used, out=rows)

    def _up(self, records: Tensor, x_groups: Tensor, x_sums: Tensor) -> Tensor:
        """W3 x of the records, float32 (n,). Codes are multiplied as they are, group by group: scaling a group's
        product costs less than scaling its weights."""
        scale, zero = self._records.parameters(records, 0, self._width, self._dtype)
        products = [
            torch.bmm(codes, x[..., None])[..., 0] for codes, x in zip(self._codes(records, 0), x_groups, strict=True)
        ]
        return (torch.cat(products).float() * scale.t()).sum(0) + zero @ x_sums

    def _down(self, records: Tensor, products: Tensor) -> Tensor:
        """The sum of the records' columns of W2, times `products` (n,): float32 (H,)."""
        scale, zero = self._records.parameters(records, 1, self._width, self._dtype)
        scaled = (products[:, None] * scale).t().to(self._product_dtype)
        weights = scaled.view(self._records.strips, -1, 1, len(records))
        sums = [torch.bmm(w, codes)[:, 0] for codes, w in zip(self._codes(records, 1), weights, strict=True)]
        return (torch.cat(sums).float() + (products @ zero)[:, None]).view(-1)

    def _codes(self, records: Tensor, half: int) -> list[Tensor]:
        """Each strip's codes as (groups, n, group)."""
        codes = self._records.codes(records, half, self._width)
        values = scratch.take("code values", tuple(codes.shape), self._product_dtype).copy_(codes)
        return list(values.view(self._records.strips, len(records), -1, self._records.group).transpose(1, 2))


class GpuNeuronKernel(NeuronKernel):
    """Computes experts of one format of the neuron unit on a GPU, a token by Triton's kernels: through several experts
    at a time, which are found by `tiles_of` their slots. Needs Triton."""

    def __init__(self, form: ExpertFormat, activation: Activation, theta: float) -> None:
        super().__init__(form, activation, theta, "cuda")
        self._matrix = gpu.packed_matrix(form, form.layer.parts[0])
        self._place = record_place(form)
        self._kernels = gpu.triton()
        self._sums: Callable[..., Tensor] = gpu.triton("triton_neurons").neuron_sums

    def __call__(self, x: Tensor, views: Views) -> Tensor:
        if len(x) > APART:
            return super().__call__(x, views)
        activations = self.activations(x, views)
        gates = activations.masked_fill(~self.active(activations), 0)
        first = next(iter(views[GATE].values()))  # where the slot begins
        tiles = self.tiles_of([first])
        rows = zip(x[:, None], gates[:, None], strict=True)
        return torch.cat([self.sums(each, own, tiles) for each, own in rows])

    def tiles_of(self, slots: Sequence[Tensor]) -> dict[int, Tensor]:
        """What finds experts in these slots, which take one token each."""
        starts = [slot.data_ptr() for slot in slots]
        found: dict[int, Tensor] = self._kernels.tiles_of(starts, [1] * len(slots), slots[0].device)
        return found

    def activations_of(self, x: Tensor, tiles: dict[int, Tensor]) -> Tensor:
        """act(W1 x) of each of several experts: x (1, H) → (E, I), with the bits of `activations`."""
        return self._activation(self._kernels.grouped_linear(x, tiles, self._matrix, shared=True))

    def sums(self, x: Tensor, gates: Tensor, tiles: dict[int, Tensor]) -> Tensor:
        """The sum over each expert's neurons of gates_j (w3_j . x) w2_j: x (1, H), gates (E, I) → (E, H). Records of
        neurons whose gate is 0 are not read."""
        return self._sums(x, gates, tiles[1], self._records, self._place, self._dtype)


_AT_ONCE = 16  # codes


def takes_records(records: Records, width: int, dtype: torch.dtype) -> bool:
    """Whether the kernel computes with such records, of halves of `width` weights, in `dtype`."""
    fits = records.group % _AT_ONCE == 0 and width % (records.strips * records.group) == 0
    return dtype == torch.bfloat16 and fits and available()


def combined(x: Tensor, activations: Tensor, used: Tensor, rows: Tensor, records: Records) -> Tensor:
    """x (1, H) and activations (1, I) in bfloat16, used int64 (n,) ascending, rows uint8 (I, record bytes) → (1, H):
    the sum over `used` of a_j (w3_j . x) w2_j. Only their records are read."""
    x, activations, width = x.contiguous(), activations.contiguous(), x.shape[1]
    out = torch.empty_like(x)
    floats = width + width // records.group + len(used)
    workspace = scratch.take("neurons", (floats,), torch.float32)
    neurons = structs.Neurons(
        records=rows.data_ptr(), record_bytes=rows.stride(0), width=width, group=records.group, bits=records.bits,
        two_level=records.two_level, used=used.data_ptr(), count=len(used), gates=activations.data_ptr(),
    )  # fmt: skip
    packed, threads = _native.pack(neurons), torch.get_num_threads()
    _native.neurons(packed, x.data_ptr(), workspace.data_ptr(), floats, out.data_ptr(), threads)
    return out
