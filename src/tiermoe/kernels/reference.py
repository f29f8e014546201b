"""The oracle of every kernel: decode the weights, then multiply."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.quant.encoding import Encoding


class DecodedLinear:
    """Any encoding on any device: decodes the weights to `dtype` and takes the product in it."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        self._encoding = encoding
        self._dtype = dtype

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        weight = self._encoding.decode(slot, out, in_, self._dtype)
        return F.linear(x.to(self._dtype), weight).to(x.dtype)
