"""A causal convolution over a token's last inputs, channel by channel, whose earlier inputs a sequence keeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiermoe.model.cache.recurrent import StateRows
from tiermoe.model.weights import Scope


class CausalConvolution:
    """weight (channels, 1, taps), bias (channels). Sums are float32, a product and a sum at a time in the taps' order,
    so that a token's bits do not depend on the others of a step.

    kept: inputs before a token's own."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.kept = weight.shape[-1] - 1
        self._taps: list[Tensor] = list(weight[:, 0].t().float().contiguous())
        self._bias = None if bias is None else bias.float()

    def __call__(self, values: Tensor, layer: int, rows: StateRows) -> Tensor:
        """values (T, channels) of a step's rows → (T, channels). Leaves each sequence's last inputs as those of a
        layer."""
        inputs = rows.recurrent.inputs[layer].flatten(0, 1)
        whole = torch.cat([each for row in rows.rows for each in (inputs[row.before], values[row.begin : row.end])])
        mixed, found, end = self._mixed(whole), list[Tensor](), 0
        for row in rows.rows:
            tokens = row.end - row.begin
            found.append(mixed[end : end + tokens])
            end += self.kept + tokens
            inputs[row.after] = whole[end - self.kept : end]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _mixed(self, whole: Tensor) -> Tensor:
        """Convolution of the inputs (N, channels) of all rows, each behind its kept inputs → (N - kept, channels), one
        for each window. Windows over two rows belong to no token."""
        mixed = convolved(whole.float(), self._taps)
        if self._bias is not None:
            mixed += self._bias
        return mixed.to(whole.dtype)


def causal_convolution(w: Scope, channels: int, taps: int) -> CausalConvolution:
    """The convolution with the weights of `w`."""
    return CausalConvolution(
        w.tensor("weight", channels, 1, taps), w.tensor("bias", channels) if w.has("bias") else None
    )


def convolved(inputs: Tensor, taps: Sequence[Tensor], distance: int = 1) -> Tensor:
    """Convolution of each channel: float32 inputs (N, channels), taps (channels) each, `distance` inputs apart →
    (N - distance * (taps - 1), channels), one for each window. A product and a sum at a time in the taps' order."""
    count = len(inputs) - distance * (len(taps) - 1)
    mixed = inputs[:count] * taps[0]
    for at, tap in enumerate(taps[1:], 1):
        mixed += inputs[at * distance : at * distance + count] * tap
    return mixed
