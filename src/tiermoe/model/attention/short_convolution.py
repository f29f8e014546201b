"""A short convolution in the place of attention (LFM2): a token is mixed with the few before it, channel by channel,
between two gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiermoe.model.attention.base import Attention, AttentionSizes
from tiermoe.model.attention.convolution import CausalConvolution, causal_convolution
from tiermoe.model.cache.kv import LayerShape
from tiermoe.model.cache.recurrent import StateRows, StateShape
from tiermoe.model.linear import Linear
from tiermoe.model.step import Step
from tiermoe.model.weights import Scope
from tiermoe.types import Workload


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
        """Of the convolution's weights in float32."""
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
        """x (T, H), normed → (T, H). Leaves each sequence's last inputs in the step's cache."""
        rows = step.states
        assert rows is not None
        gates, gates_after, values = self._input(x).chunk(3, dim=1)
        inputs = gates * values
        rows.recurrent.keep(layer, rows, self._replay, inputs)
        return self._output(gates_after * self._convolution(inputs, layer, rows))

    @property
    def batch_invariant(self) -> bool:
        return self._input.batch_invariant and self._output.batch_invariant

    def _replay(self, kept: Tensor, layer: int, rows: StateRows) -> None:
        """As `recurrent_states.Replay`."""
        self._convolution(kept, layer, rows)
