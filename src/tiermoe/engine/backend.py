"""What computes the experts: native kernels of an instruction set, torch's operators, or Triton's kernels on a GPU."""

from __future__ import annotations

import torch

from tiermoe import native
from tiermoe.engine.needs import formats_of
from tiermoe.kernels.linear import matrix_form
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.offload.presets import Resolved


def kernels_of(blueprint: Blueprint, resolved: Resolved, device: str) -> str:
    """The name in reports: 'native avx2', 'torch', or 'triton'. device: its type. ConfigError as `native.available`."""
    if device != "cpu":
        return "triton"
    used = native.instruction_set() if blueprint.dtype == torch.bfloat16 else None
    return "torch" if used is None or left_to_torch(blueprint, resolved) else f"native {used}"


def left_to_torch(blueprint: Blueprint, resolved: Resolved) -> str:
    """The first matrix of an expert that the native kernels do not compute, as '96 x 64 at 4 bits'; empty if they
    compute all."""
    for bits, forms in formats_of(blueprint, resolved).items():
        for form in forms:
            for part in form.layer.parts:
                encoding = form.encodings.get(part.name)
                if encoding is not None and matrix_form(encoding, *part.out_in, form.dtype) is None:
                    return "{} x {} at {} bits".format(*part.out_in, bits)
    return ""
