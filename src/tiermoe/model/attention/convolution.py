"""Causal convolutions over a token's last inputs, channel by channel, and the short convolution that stands for
attention (LFM2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.kernels.convolution import ConvolutionKernel, takes_convolution
from tiermoe.model.attention.base import Attention, AttentionSizes
from tiermoe.model.cache.kv import LayerShape
from tiermoe.model.cache.recurrent import StateRows, StateShape
from tiermoe.model.parts import Linear
from tiermoe.model.step import Step
from tiermoe.model.weights import Scope
from tiermoe.types import Workload


class CausalConvolution:
    """weight (channels, 1, taps), bias (channels); silu: of the sums. The native kernel computes it if it takes the
    weights, and torch else, a product and a sum at a time.

    kept: inputs before a token's own. dtype: of the weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None, silu: bool = False) -> None:
        channels, _, taps = weight.shape
        self.kept, self.dtype, self._silu = taps - 1, weight.dtype, silu
        rows = weight[:, 0].t().contiguous()
        self._kernel: ConvolutionKernel | None = None
        if takes_convolution(weight.dtype, channels, self.kept) and not weight.is_meta:
            self._kernel = ConvolutionKernel(rows, bias, silu)
        else:
            self._taps, self._bias = list(rows.float()), None if bias is None else bias.float()

    def __call__(self, values: Tensor, layer: int, rows: StateRows) -> Tensor:
        """values (T, channels) of a step's rows → (T, channels). Leaves each sequence's last inputs as those of a
        layer."""
        inputs = rows.recurrent.inputs[layer]
        if self._kernel is not None:
            return self._kernel(values, rows.pieces, inputs)
        every = inputs.flatten(0, 1)
        found = [self._mixed(row.append(every, values[row.begin : row.end])) for row in rows.rows]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _mixed(self, whole: Tensor) -> Tensor:
        """A row's inputs (T + kept, channels) → (T, channels)."""
        mixed = convolved(whole.float(), self._taps)
        if self._bias is not None:
            mixed += self._bias
        mixed = mixed.to(whole.dtype)
        return F.silu(mixed) if self._silu else mixed


def causal_convolution(w: Scope, channels: int, taps: int, silu: bool = False) -> CausalConvolution:
    """The convolution with the weights of `w`."""
    bias = w.tensor("bias", channels) if w.has("bias") else None
    return CausalConvolution(w.tensor("weight", channels, 1, taps), bias, silu)


def convolved(inputs: Tensor, taps: Sequence[Tensor], distance: int = 1) -> Tensor:
    """Convolution of each channel: float32 inputs (N, channels), taps (channels) each, `distance` inputs apart →
    (N - distance * (taps - 1), channels), one for each window. A product and a sum at a time in the taps' order."""
    count = len(inputs) - distance * (len(taps) - 1)
    mixed = inputs[:count] * taps[0]
    for at, tap in enumerate(taps[1:], 1):
        mixed += inputs[at * distance : at * distance + count] * tap
    return mixed


@dataclass(frozen=True, slots=True)
class ConvolutionSizes(AttentionSizes):
    """The description of a `ShortConvolution`."""

    channels: int
    kept: int  # inputs before a token's own

    @property
    def shape(self) -> LayerShape:
        return LayerShape(0, 0, 0, state=StateShape(self.kept, self.channels, 0, 0, 0, verified=self.channels))

    @property
    def token_columns(self) -> int:
        """As of attention with so many columns: its queries are there four times, of which three are a token's
        projections here, and the rest is less."""
        return self.channels

    @property
    def taps_bytes(self) -> int:
        """Of the convolution's weights in float32; the kernel's take half."""
        return 4 * (self.kept + 1) * self.channels

    def prompt_bytes(self, load: Workload, dtype: torch.dtype) -> int:
        """Nothing beside what `token_columns` stands for."""
        return 0


def short_convolution(w: Scope, config: Any) -> ShortConvolution:
    """The convolution with the weights of `w` ('conv')."""
    sizes = ConvolutionSizes(w.hidden, config.conv_L_cache - 1)
    return ShortConvolution(
        sizes,
        w.linear("in_proj", 3 * w.hidden, w.hidden),
        w.linear("out_proj", w.hidden, w.hidden),
        causal_convolution(w.at("conv"), w.hidden, config.conv_L_cache),
    )


class ShortConvolution(Attention):
    """Input projection, a gate, the convolution over a token's last inputs, another gate, output projection.

    input: hidden → both gates and the values between them, (T, 3 channels)."""

    def __init__(self, sizes: ConvolutionSizes, input_: Linear, output: Linear, convolution: CausalConvolution) -> None:
        self.sizes = sizes
        self._input, self._output, self._convolution = input_, output, convolution

    def __call__(self, x: Tensor, layer: int, step: Step) -> Tensor:
        rows = step.states
        assert rows is not None
        gates, gates_after, values = self._input(x).chunk(3, dim=1)
        inputs = gates * values
        rows.recurrent.keep(layer, rows, self._replay, inputs)
        return self._output(gates_after * self._convolution(inputs, layer, rows))

    @property
    def batch_invariant(self) -> bool:
        return self._input.batch_invariant and self._output.batch_invariant

    @property
    def chunk_invariant(self) -> bool:
        return True

    def _replay(self, kept: Tensor, layer: int, rows: StateRows) -> None:
        self._convolution(kept, layer, rows)
