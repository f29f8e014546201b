"""Channel-wise symmetric linear quantization, as EdgeMoE uses it (section 3.2 of the paper)."""

import torch
from torch import Tensor

from tiermoe.quant.quantized import Grid, Ladder, Quantized, nearest_codes, require_finite


class LinearQuantizer:
    """Rounds to multiples of one scale per output channel: its largest magnitude / largest code (1, 7, 127).

    The scale is repeated over the groups. A code is the multiple plus 2**(bits - 1): code 0 is never used."""

    name = "linear"

    def __call__(self, weight: Tensor, bits: int, group: int) -> Quantized:
        rows, columns = weight.shape
        middle = 1 << (bits - 1)
        scale = self.row_scale(weight, bits)
        offset = -middle * scale
        codes = nearest_codes(weight, scale, offset, 0, 2 * middle - 1, torch.uint8)
        shape = (rows, columns // group)
        return Quantized(codes, scale.expand(shape).contiguous(), offset.expand(shape).contiguous())

    def rows_apart(self, columns: int) -> int:
        return 1

    def grid(self, weight: Tensor, group: int) -> Grid:
        """One ladder everywhere, whose levels are -1, 0, 1 and 2 times the scale of 2 bits; the last is never the
        nearest one."""
        scale = (self.row_scale(weight, 2) / 2).expand(-1, weight.shape[1] // group).contiguous()
        return Grid(scale, torch.zeros_like(scale), (Ladder(step=2, place=2),))

    @staticmethod
    def row_scale(weight: Tensor, bits: int) -> Tensor:
        """One scale per row, float32 (N, 1)."""
        low, high = weight.aminmax(dim=1, keepdim=True)
        scale = torch.maximum(-low, high).float() / ((1 << (bits - 1)) - 1)
        require_finite(scale)
        return scale
