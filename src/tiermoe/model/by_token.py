"""Few tokens, each computed by itself: torch's products, sums and functions may round a row differently beside other
rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tiermoe.types import FEW_TOKENS

Computed = TypeVar("Computed", Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor])


def by_token(compute: Callable[..., Computed], *xs: Tensor) -> Computed:
    """compute(*xs), xs (T, ...). Up to FEW_TOKENS are computed one by one, so that a token has the bits that it has
    alone."""
    if not 1 < len(xs[0]) <= FEW_TOKENS:
        return compute(*xs)
    return joined([compute(*each) for each in zip(*(torch.split(x, 1) for x in xs), strict=True)])


def joined(parts: Sequence[Computed]) -> Computed:
    """The results of parts of the tokens, (T, ...) each, as one result."""
    if len(parts) == 1:
        return parts[0]
    each: list[Any] = list(parts)
    whole: Any = torch.cat(each) if isinstance(each[0], Tensor) else tuple(map(torch.cat, zip(*each, strict=True)))
    found: Computed = whole
    return found
