"""What a quantizer returns, and the interface it keeps."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tiermoe.errors import PackError

BLOCK_WEIGHTS = 1 << 18  # weights rounded at a time: bounds the float32 temporaries


@dataclass(frozen=True)
class Quantized:
    """A matrix of N outputs and K inputs in groups of K / G weights of a row: w ~ codes * scale + offset."""

    codes: Tensor  # uint8 (N, K), values 0 .. 2**bits - 1
    scale: Tensor  # float32 (N, G), never negative; 0 in a group of equal weights
    offset: Tensor  # float32 (N, G)

    def dequantized(self) -> Tensor:
        """The weights that codes, scales and offsets stand for, float32 (N, K)."""
        rows, groups = self.scale.shape
        codes = self.codes.view(rows, groups, -1).float()
        return torch.addcmul(self.offset[..., None], codes, self.scale[..., None]).view(rows, -1)


class Ladder(NamedTuple):
    """Four of the 16 levels of 4 bits: step * c + (5 - step) * place, c = 0..3. `step` 2..5, `place` 0..3: place 0
    begins at level 0, place 3 ends at level 15."""

    step: int
    place: int

    @property
    def offset(self) -> int:
        return (5 - self.step) * self.place

    @property
    def packed(self) -> int:
        """Four bits: step - 2 in the lower two, place in the upper ones."""
        return self.step - 2 | self.place << 2


@dataclass(frozen=True)
class Grid:
    """What 2 bits choose from, in groups of K / G weights of a row: levels (n - 8) * scale + zero, n = 0..15."""

    scale: Tensor  # float32 (N, G), never negative; 0 in a group of equal weights
    zero: Tensor  # float32 (N, G)
    ladders: tuple[Ladder, ...]  # those that may be used


class Quantizer(Protocol):
    """Finds codes, scales and offsets for a weight (N, K) of any float dtype; K is a multiple of `group`."""

    name: str

    def __call__(self, weight: Tensor, bits: int, group: int) -> Quantized: ...

    def parameters(self, weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
        """The scales and offsets of `__call__`, without codes."""
        ...

    def rows_apart(self, columns: int) -> int:
        """A part of a matrix that begins at a multiple of so many rows, and ends at one or with the matrix, gets the
        codes that it has in the matrix."""
        ...

    def grid(self, weight: Tensor, group: int) -> Grid:
        """The levels and ladders of 2 bits within the 4-bit format."""
        ...


def levels(weight: Tensor, quantizer: Quantizer, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and zero (N, K / group) of 4 bits as they are stored, in `dtype`: w ~ (code - 8) * scale + zero."""
    scale, offset = quantizer.parameters(weight, 4, group)
    return scale.to(dtype), (offset + 8 * scale).to(dtype)


def nearest(weight: Tensor, scale: Tensor, offset: Tensor, low: int, high: int) -> Tensor:
    """The integers in low..high for which ``integer * scale + offset`` is nearest to `weight`, as floats.

    A scale of 0 (a group of equal weights, or one too small for its dtype) gives the integer nearest to 0."""
    codes = torch.sub(weight, offset)
    codes.div_(torch.where(scale == 0, torch.inf, scale))
    return codes.round_().clamp_(low, high)


def nearest_codes(weight: Tensor, scale: Tensor, offset: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """`nearest` for a matrix (N, K) with `scale` and `offset` (N, G), all of any float dtype.

    The result is (N, K) in `dtype`. Blocks of rows, so that no float32 copy of the matrix is made."""
    rows, columns = weight.shape
    groups = scale.shape[1]
    scale, offset = scale.float()[..., None], offset.float()[..., None]
    codes = torch.empty(rows, columns, dtype=dtype)
    block = max(1, BLOCK_WEIGHTS // columns)
    for first in range(0, rows, block):
        part = slice(first, first + block)
        grouped = weight[part].float().reshape(-1, groups, columns // groups)
        codes[part] = nearest(grouped, scale[part], offset[part], low, high).flatten(1)
    return codes


def require_finite(*parameters: Tensor) -> None:
    """Raises PackError where the weights held an infinity or NaN, which reaches every minimum and maximum."""
    if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
        raise PackError("a weight matrix holds infinite or undefined values and cannot be quantized")
