"""Routers: a matrix, scores of its products, the K best."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from tiermoe.kernels.linear import address, plain
from tiermoe.native import _native, available, structs

COLUMNS = 32  # a hidden size is a multiple of it


class Scoring(IntEnum):
    """Scoring of experts by their logits; the order is that of route.h."""

    SOFTMAX = 0
    """The softmax of all logits."""
    CHOSEN = 1
    """The logits; the weights are the softmax of the chosen ones."""
    SIGMOID = 2
    """The sigmoid of each logit."""
    SQRT_SOFTPLUS = 3
    """The root of log(1 + e^logit) of each, each step rounded as the logits are."""


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """A layer's router; tensors are contiguous."""

    weight: Tensor  # bfloat16 (E, H), or (3, E, H), whose sum it is (`in_parts`)
    k: int  # experts of a token
    scoring: Scoring = Scoring.SOFTMAX
    bias: Tensor | None = None  # of the logits, bfloat16 (E)
    correction: Tensor | None = None  # float32 (E), added to the scores for choosing, not to the weights
    corrects_logits: bool = False  # or to the logits
    groups: int = 1  # of consecutive experts
    kept: int = 1  # groups that a token's experts come from: the best
    judges: int = 1  # a group is as good as the sum of so many best scores: 1 or 2
    exact_logits: bool = False  # float32; else rounded to bfloat16
    normalise: bool = False  # weights are divided by their sum plus epsilon
    epsilon: float = 0.0
    scale: float = 1.0  # of the weights in the end
    dtype: torch.dtype = torch.float32  # what weights are rounded to
    _packed: dict[int, bytes] = field(default_factory=dict, init=False, repr=False)
    """Address of `weight` → the struct: it may move once, into a stack of all layers' matrices."""

    def pack(self) -> bytes:
        """A `structs.Router`; valid as long as the tensors live. ValueError where the groups do not divide the experts,
        or the kept ones have fewer than k."""
        weight = self.weight.data_ptr()
        if (known := self._packed.get(weight)) is not None:
            return known
        experts, columns = self.weight.shape[-2:]
        packed = self._packed[weight] = _native.pack(
            structs.Router(
                weight=weight, parts=self.weight[..., 0, 0].numel(), bias=address(self.bias),
                correction=address(self.correction),
                corrects_logits=self.corrects_logits, experts=experts, columns=columns, k=self.k, groups=self.groups,
                kept=self.kept, judges=self.judges,
                scoring=self.scoring, exact_logits=self.exact_logits, round_weights=self.dtype != torch.float32,
                normalise=self.normalise, epsilon=self.epsilon, scale=self.scale,
            )
        )  # fmt: skip
        return packed

    def suits(self) -> bool:
        """Whether the kernels take its tensors."""
        if not takes(self.weight) or self.dtype not in (torch.float32, torch.bfloat16):
            return False
        vectors = ((self.bias, torch.bfloat16), (self.correction, torch.float32))
        return all(each is None or (each.dtype == dtype and each.is_contiguous()) for each, dtype in vectors)


def router_of(experts: int, columns: int, k: int) -> bytes:
    """`structs.Router` for known choices: sizes alone."""
    return _native.pack(structs.Router(experts=experts, columns=columns, k=k, groups=1, kept=1, judges=1, scale=1.0))


def route(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., H) in bfloat16, contiguous, T tokens → weights (T, k) and experts int64 (T, k), of each token the best
    first, of equal ones the first first."""
    tokens = x.numel() // router.weight.shape[-1]
    weights = torch.empty((tokens, router.k), dtype=torch.float32)
    experts = torch.empty((tokens, router.k), dtype=torch.int64)
    _native.route(router.pack(), x.data_ptr(), tokens, experts.data_ptr(), weights.data_ptr(), torch.get_num_threads())
    return weights.to(router.dtype), experts


def takes(weight: Tensor) -> bool:
    """Whether the kernels take a router's matrix (E, H), or its parts."""
    return plain(weight) and weight.shape[-1] % COLUMNS == 0 and available()


def in_parts(weight: Tensor) -> Tensor:
    """weight float32 (E, H) as the sum of three matrices in bfloat16 (3, E, H): each has 8 of its 24 bits."""
    parts, rest = [], weight
    for _ in range(3):
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1].float()
    return torch.stack(parts)


def products_of(weight: Tensor, x: Tensor) -> Tensor:
    """weight (E, H) or its parts (3, E, H), and tokens x (..., H) in bfloat16, both contiguous → float32 (T, E)."""
    experts, columns = weight.shape[-2:]
    tokens, parts = x.numel() // columns, weight[..., 0, 0].numel()
    products = torch.empty((tokens, experts), dtype=torch.float32)
    threads = torch.get_num_threads()
    _native.logits(weight.data_ptr(), parts, x.data_ptr(), tokens, experts, columns, products.data_ptr(), threads)
    return products


def choose(logits: Tensor, k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Of logits (T, E) in bfloat16: weights float32 (T, k) and experts int64 (T, k), of each token the largest first,
    of equal ones the first first. normalise: a token's weights sum to 1."""
    tokens = logits.shape[0]
    weights = torch.empty((tokens, k), dtype=torch.float32)
    experts = torch.empty((tokens, k), dtype=torch.int64)
    _native.choose(logits.data_ptr(), tokens, logits.shape[1], k, normalise, experts.data_ptr(), weights.data_ptr())
    return weights, experts
