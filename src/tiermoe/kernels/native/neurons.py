"""One token through some neurons of an expert, whose records are read where they lie."""

from __future__ import annotations

import torch
from torch import Tensor

from tiermoe.native import _native, available
from tiermoe.quant.neuron_records import Records
from tiermoe.quant.scratch import scratch

_AT_ONCE = 16  # codes


def takes(records: Records, width: int, dtype: torch.dtype) -> bool:
    """Whether the kernel computes with such records, of halves of `width` weights, in `dtype`."""
    fits = records.group % _AT_ONCE == 0 and width % (records.strips * records.group) == 0
    return dtype == torch.bfloat16 and fits and available()


def combined(x: Tensor, activations: Tensor, used: Tensor, rows: Tensor, records: Records) -> Tensor:
    """x (1, H) and activations (1, I) in bfloat16, used int64 (n,) ascending, rows uint8 (I, record bytes) → (1, H):
    the sum over `used` of a_j (w3_j . x) w2_j. Only their records are read."""
    x, activations, width = x.contiguous(), activations.contiguous(), x.shape[1]
    out = torch.empty_like(x)
    floats = width + width // records.group + len(used)
    workspace = scratch.take("neurons", (floats,), torch.float32)
    _native.neurons(
        rows.data_ptr(), rows.stride(0), width, records.group, records.bits, used.data_ptr(), len(used),
        activations.data_ptr(), x.data_ptr(), workspace.data_ptr(), floats, out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out
