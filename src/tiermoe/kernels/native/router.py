"""Routers for a few tokens: a matrix, scores of its products, the K best."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from tiermoe.native import _native, available

COLUMNS = 32  # a hidden size is a multiple of it


class Scoring(IntEnum):
    """How logits become the scores that experts are chosen by; the order is that of route.h."""

    SOFTMAX = 0
    """The softmax of all logits."""
    CHOSEN = 1
    """The logits; the weights are the softmax of the chosen ones."""
    SIGMOID = 2
    """The sigmoid of each logit."""


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """A layer's router. weight (E, H) and bias (E) of the logits are bfloat16; correction (E), float32, is added to the
    scores for choosing, not to the weights. All contiguous.

    groups: consecutive experts form so many; a token's experts come from the best `kept` ones, each as good as the sum
    of its `judges` (1 or 2) best scores. exact_logits: in float32, else rounded to bfloat16. normalise: weights are
    divided by their sum plus epsilon. scale: of the weights in the end. dtype: what weights are rounded to."""

    weight: Tensor
    k: int
    scoring: Scoring = Scoring.SOFTMAX
    bias: Tensor | None = None
    correction: Tensor | None = None
    groups: int = 1
    kept: int = 1
    judges: int = 1
    exact_logits: bool = False
    normalise: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    dtype: torch.dtype = torch.float32

    def pack(self) -> bytes:
        """What the kernels are told of it; valid as long as the tensors live. ValueError where the numbers of experts
        and groups do not go together."""
        experts, columns = self.weight.shape
        return _native.router(
            self.weight.data_ptr(), _address(self.bias), _address(self.correction), experts, columns, self.k,
            self.groups, self.kept, self.judges, self.scoring, self.exact_logits, self.dtype != torch.float32,
            self.normalise, self.epsilon, self.scale,
        )  # fmt: skip

    def suits(self) -> bool:
        """Whether the kernels take its tensors."""
        if not takes(self.weight) or self.dtype not in (torch.float32, torch.bfloat16):
            return False
        vectors = ((self.bias, torch.bfloat16), (self.correction, torch.float32))
        return all(each is None or (each.dtype == dtype and each.is_contiguous()) for each, dtype in vectors)


def router_of(experts: int, columns: int, k: int) -> bytes:
    """What kernels are told of a router that has chosen already: its sizes."""
    return _native.router(0, 0, 0, experts, columns, k, 1, 1, 1, Scoring.SOFTMAX, False, False, False, 0.0, 1.0)


def route(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., H) in bfloat16, contiguous, T tokens → weights (T, k) and experts int64 (T, k), of each token the best
    first, of equal ones the first first."""
    tokens = x.numel() // router.weight.shape[1]
    weights = torch.empty((tokens, router.k), dtype=torch.float32)
    experts = torch.empty((tokens, router.k), dtype=torch.int64)
    _native.route(router.pack(), x.data_ptr(), tokens, experts.data_ptr(), weights.data_ptr())
    return weights.to(router.dtype), experts


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def takes(weight: Tensor) -> bool:
    """Whether the kernels take a router's matrix (E, H)."""
    plain = weight.dtype == torch.bfloat16 and weight.is_contiguous() and weight.device.type == "cpu"
    return plain and weight.ndim == 2 and weight.shape[1] % COLUMNS == 0 and available()


def logits_of(weight: Tensor, x: Tensor) -> Tensor:
    """weight (E, H) and tokens x (..., H) in bfloat16, both contiguous → (T, E)."""
    experts, columns = weight.shape
    tokens = x.numel() // columns
    logits = torch.empty((tokens, experts), dtype=torch.bfloat16)
    _native.logits(weight.data_ptr(), x.data_ptr(), tokens, experts, columns, logits.data_ptr())
    return logits


def choose(logits: Tensor, k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Of logits (T, E) in bfloat16: weights float32 (T, k) and experts int64 (T, k), of each token the largest first,
    of equal ones the first first. normalise: a token's weights sum to 1."""
    tokens = logits.shape[0]
    weights = torch.empty((tokens, k), dtype=torch.float32)
    experts = torch.empty((tokens, k), dtype=torch.int64)
    _native.choose(logits.data_ptr(), tokens, logits.shape[1], k, normalise, experts.data_ptr(), weights.data_ptr())
    return weights, experts
