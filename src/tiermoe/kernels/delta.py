"""The gated delta rule of linear attention between its projections (native/delta.h), for up to `FEW_TOKENS` tokens a
call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from tiermoe.formats.encoding import scratch
from tiermoe.kernels.convolution import COLUMNS, ConvolutionKernel, StatePiece, convolution_step, takes_convolution
from tiermoe.kernels.linear import plain
from tiermoe.native import _native, structs
from tiermoe.types import FEW_TOKENS


class DeltaGate(IntEnum):
    """What multiplies the norm; the order is that of delta.h."""

    SILU = 0
    SIGMOID = 1


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Sizes of a layer of linear attention."""

    key_heads: int
    heads: int  # heads / key_heads of them share a query and a key
    key_columns: int
    value_columns: int
    kept: int  # inputs of the convolution before a token's own
    by_channel: bool = False  # each key column decays by itself (Kimi), not each head

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries and keys of all key heads, and values of all heads."""
        return 2 * self.key_heads * self.key_columns + self.values

    @property
    def values(self) -> int:
        """Columns of all heads' values."""
        return self.heads * self.value_columns

    @property
    def decay_columns(self) -> int:
        """Decays of a head."""
        return self.key_columns if self.by_channel else 1

    @property
    def workspace(self) -> int:
        """Largest workspace of the kernel, in bytes."""
        return FEW_TOKENS * 4 * (self.channels + self.heads * (self.decay_columns + 1) + self.values)

    def suit(self, dtype: torch.dtype) -> bool:
        """Whether the kernel takes these sizes."""
        columns = self.key_columns % COLUMNS == 0 and self.value_columns % COLUMNS == 0
        fits = columns and self.heads % self.key_heads == 0
        return fits and takes_convolution(dtype, self.channels, self.kept)


class DeltaKernel:
    """Gated delta rule of one layer. taps bfloat16 (kept + 1, channels), those of the oldest input first; rates
    (heads) and biases (heads * decay columns) float32: the logarithm of a decay is -rate * softplus(a + bias), or with
    a least_decay below 0 least_decay * sigmoid(rate * (a + bias)); norm bfloat16 (value columns). Keeps the tensors
    alive."""

    def __init__(
        self,
        sizes: DeltaSizes,
        taps: Tensor,
        rates: Tensor,
        biases: Tensor,
        norm: Tensor,
        epsilon: float,
        gate: DeltaGate = DeltaGate.SILU,
        least_decay: float | None = None,
    ) -> None:
        shapes = (rates.shape, biases.shape) == ((sizes.heads,), (sizes.heads * sizes.decay_columns,))
        wide = shapes and rates.dtype == biases.dtype == torch.float32
        if not wide or not plain(norm) or taps.shape != (sizes.kept + 1, sizes.channels):
            raise ValueError("norm must be contiguous bfloat16, rates and biases float32")
        convolution = ConvolutionKernel(taps, None, silu=True)
        self._sizes, self._tensors = sizes, (convolution, rates, biases, norm)
        self._packed = _native.pack(
            structs.Delta(
                convolution=convolution.described, rates=rates.data_ptr(), biases=biases.data_ptr(),
                norm=norm.data_ptr(), epsilon=epsilon, least_decay=least_decay or 0, gate=gate,
                key_heads=sizes.key_heads, heads=sizes.heads, key_columns=sizes.key_columns,
                value_columns=sizes.value_columns, decay_columns=sizes.decay_columns,
            )
        )  # fmt: skip

    def workspace(self, tokens: int) -> int:
        """Workspace of a step of `tokens` tokens, in bytes."""
        return _native.delta_workspace(self._packed, tokens)

    def __call__(
        self,
        projected: tuple[Tensor, Tensor, Tensor, Tensor],
        pieces: Sequence[StatePiece],
        inputs: Tensor,
        states: Tensor,
    ) -> Tensor:
        """projected: of the hidden states of T tokens, bfloat16, rows contiguous: queries, keys and values
        (T, channels), gates (T, values), betas (T, heads), decays (T, heads * decay columns). inputs bfloat16
        (.., kept, channels) and states float32 (.., heads, key columns, value columns), contiguous, of all places →
        (T, values). The interpreter's lock is released meanwhile."""
        mixed, gates, betas, decays = projected
        out = mixed.new_empty((mixed.shape[0], self._sizes.values))
        threads = torch.get_num_threads()
        for piece in pieces:
            at = piece.begin
            workspace = scratch.address("delta", self.workspace(piece.end - at))
            step = structs.DeltaStep(
                mixed=convolution_step(piece, mixed, inputs), gates=gates[at:].data_ptr(), betas=betas[at:].data_ptr(),
                decays=decays[at:].data_ptr(), gates_stride=gates.stride(0), betas_stride=betas.stride(0),
                decays_stride=decays.stride(0), states=states.data_ptr(), out=out[at:].data_ptr(),
            )  # fmt: skip
            _native.run_delta(self._packed, _native.pack(step), workspace, threads)
        return out
