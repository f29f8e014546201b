"""How far decoded weights lie from the original ones."""

import math

import torch
from torch import Tensor


def relative_error(weight: Tensor, decoded: Tensor) -> float:
    """Root mean square of the difference / root mean square of `weight`; 0 for a matrix of zeros kept so."""
    difference = float(torch.linalg.vector_norm(decoded.float() - weight.float()))
    size = float(torch.linalg.vector_norm(weight.float()))
    if difference == 0:
        return 0.0
    return difference / size if size else math.inf
