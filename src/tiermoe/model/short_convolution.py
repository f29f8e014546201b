"""A short convolution in the place of attention (LFM2): a token is mixed with the few before it, channel by channel,
between two gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiermoe.model.architecture import FamilyWeights
from tiermoe.model.attention import Attention, AttentionSizes
from tiermoe.model.kv_cache import LayerShape
from tiermoe.model.linear import Linear
from tiermoe.model.recurrent_states import StateShape
from tiermoe.model.step import Step
from tiermoe.types import Workload


def is_convolution(config: Any, index: int) -> bool:
    """Whether layer `index` has a short convolution."""
    kinds = getattr(config, "layer_types", None)
    return kinds is not None and kinds[index] == "conv"


@dataclass(frozen=True, slots=True)
class ConvolutionSizes(AttentionSizes):
    """The description of a `ShortConvolution`."""

    channels: int
    kept: int  # inputs before a token's own

    @classmethod
    def of(cls, config: Any) -> ConvolutionSizes:
        """Of each layer with a short convolution."""
        return cls(config.hidden_size, config.conv_L_cache - 1)

    @property
    def shape(self) -> LayerShape:
        return LayerShape(0, 0, 0, state=StateShape(self.kept, self.channels, 0, 0, 0))

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

    def block(self, weights: FamilyWeights, layer: str) -> ShortConvolution:
        part = f"{layer}.conv"
        return ShortConvolution(
            self,
            weights.linear(f"{part}.in_proj"),
            weights.linear(f"{part}.out_proj"),
            weights.tensor(f"{part}.conv.weight"),
            weights.optional_tensor(f"{part}.conv.bias"),
        )


class ShortConvolution(Attention):
    """Input projection, a gate, the convolution over a token's last inputs, another gate, output projection.

    input: hidden → both gates and the values between them, (T, 3 channels). convolution (channels, 1, taps), bias
    (channels). Sums are float32, a product and a sum at a time in the taps' order, so that a token's bits do not depend
    on the others of a step."""

    def __init__(
        self, sizes: ConvolutionSizes, input_: Linear, output: Linear, convolution: Tensor, bias: Tensor | None = None
    ) -> None:
        self.sizes, self._kept = sizes, sizes.kept
        self._input, self._output = input_, output
        self._taps: list[Tensor] = list(convolution[:, 0].t().float().contiguous())
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor, layer: int, step: Step) -> Tensor:
        """x (T, H), normed → (T, H). Leaves each sequence's last inputs in the step's cache."""
        states = step.cache.recurrent
        assert states is not None
        inputs = states.inputs[layer].flatten(0, 1)
        gates, gates_after, values = self._input(x).chunk(3, dim=1)
        gated = gates * values
        rows = [(span.end - span.begin, span, *places) for span, places in zip(step.spans, step.states, strict=True)]
        whole = torch.cat([each for _, span, old, _ in rows for each in (inputs[old], gated[span.begin : span.end])])
        mixed, found, end = self._mixed(whole), list[Tensor](), 0
        for tokens, _, _, new in rows:
            found.append(mixed[end : end + tokens])
            end += self._kept + tokens
            inputs[new] = whole[end - self._kept : end]
        return self._output(gates_after * (found[0] if len(found) == 1 else torch.cat(found)))

    def _mixed(self, whole: Tensor) -> Tensor:
        """Convolution of the inputs (N, channels) of all rows, each behind its kept inputs → (N - kept, channels), one
        for each window. Windows over two rows belong to no token."""
        mixed = convolved(whole.float(), self._taps)
        if self._bias is not None:
            mixed += self._bias
        return mixed.to(whole.dtype)


def convolved(inputs: Tensor, taps: Sequence[Tensor], distance: int = 1) -> Tensor:
    """Convolution of each channel: float32 inputs (N, channels), taps (channels) each, `distance` inputs apart →
    (N - distance * (taps - 1), channels), one for each window. A product and a sum at a time in the taps' order."""
    count = len(inputs) - distance * (len(taps) - 1)
    mixed = inputs[:count] * taps[0]
    for at, tap in enumerate(taps[1:], 1):
        mixed += inputs[at * distance : at * distance + count] * tap
    return mixed
