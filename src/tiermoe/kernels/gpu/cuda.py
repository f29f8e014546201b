"""CUDA kernels: torch's own product for plain weights, Triton's for packed ones (see `triton_linear`)."""

from collections.abc import Mapping
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.errors import ConfigError
from tiermoe.quant.encoding import Encoding


class PlainLinear:
    """The checkpoint's own weights."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        pass

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        return F.linear(x, slot["weight"])


class Int8Linear:
    """Slots of Int8. Raises ConfigError where Triton is not installed."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        self._linear = _triton_linear().int8_linear

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        result: Tensor = self._linear(x, slot["weight"], slot["scale"])
        return result


class RowMajorInt2Linear:
    """Slots of RowMajorInt2. Raises ConfigError where Triton is not installed."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        self._linear = _triton_linear().int2_linear

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        result: Tensor = self._linear(x, slot["codes"], slot["ladders"], slot["scale"], slot["zero"])
        return result


class RowMajorInt4Linear:
    """Slots of RowMajorInt4. Raises ConfigError where Triton is not installed."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        self._linear = _triton_linear().int4_linear

    def __call__(self, x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int) -> Tensor:
        result: Tensor = self._linear(x, slot["codes"], slot["scale"], slot["zero"])
        return result


def _triton_linear() -> ModuleType:
    """Imported on first use: Triton exists for Linux alone, and a machine without a GPU needs none of it."""
    try:
        from tiermoe.kernels.gpu import triton_linear
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise ConfigError("packed weights on a GPU need Triton: pip install tiermoe[cuda]") from error
    return triton_linear
