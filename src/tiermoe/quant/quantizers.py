"""The quantizers by name."""

from tiermoe.quant.hqq import HqqQuantizer
from tiermoe.quant.linear import LinearQuantizer
from tiermoe.quant.quantized import Quantized, Quantizer

__all__ = ["QUANTIZERS", "Quantized", "Quantizer"]

QUANTIZERS: dict[str, Quantizer] = {"linear": LinearQuantizer(), "hqq": HqqQuantizer()}
