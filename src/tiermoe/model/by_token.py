"""Few tokens, each computed by itself: torch's products, sums and functions may round a row differently beside other
rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tiermoe.types import FEW_TOKENS


def by_token(compute: Callable[..., Tensor], *xs: Tensor) -> Tensor:
    """compute(*xs), xs (T, ...), of which each of up to FEW_TOKENS has the bits that it has alone."""
    if not 1 < len(xs[0]) <= FEW_TOKENS:
        return compute(*xs)
    return torch.cat([compute(*each) for each in zip(*(torch.split(x, 1) for x in xs), strict=True)])
