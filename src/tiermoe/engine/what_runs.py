"""Which decoder and which kernels run a model here, and why not faster ones, in words."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from tiermoe import native
from tiermoe.kernels import cpu_kernels
from tiermoe.kernels.native.matrix import matrix_form
from tiermoe.memory.needs import formats_of
from tiermoe.model.architectures import ARCHITECTURES, not_computed
from tiermoe.model.blueprint import Blueprint
from tiermoe.quant.registry import cpu_layout
from tiermoe.systems.resolved import Resolved
from tiermoe.tiers.cuda import resolve_device

_LACKS = {
    "avx2": "this processor has no AVX-512 with BF16 and VBMI",
    "generic": "this processor has neither AVX2 nor NEON",
}


@dataclass(frozen=True, slots=True)
class Runs:
    """What computes, for people; `ours`: a decoder of our own; `torch`: its operators compute experts, on a CPU."""

    decoder: str
    kernels: str
    ours: bool
    torch: bool


def what_runs(blueprint: Blueprint, resolved: Resolved) -> Runs:
    """What an engine of this model with these settings computes with. ConfigError as `native.available`."""
    device = resolve_device(resolved.settings.device)
    why = _why_transformers(blueprint, resolved.settings.decoder, device)
    decoder = f"transformers' code ({why}): slower" if why else f"tiermoe's own, for {blueprint.config.model_type}"
    kernels, by_torch = _kernels(blueprint, resolved) if device == "cpu" else (f"Triton, on {device}", False)
    return Runs(decoder, kernels, not why, by_torch)


def missing_kernels(dtype: torch.dtype) -> str:
    """What to do where a model in `dtype` runs on a CPU and the compiled kernels are missing, in a line; empty where
    they are there, or would not compute it."""
    if native.available() or dtype != torch.bfloat16:
        return ""
    if _switched_off():
        return f"{native.SWITCH}=0 keeps the compiled kernels out: torch computes, slowly; unset it"
    return (
        "the compiled kernels are missing from this installation: torch computes, slowly; install a C compiler and "
        "reinstall tiermoe, or install one of its wheels"
    )


def _why_transformers(blueprint: Blueprint, asked: str, device: str) -> str:
    """Why our decoder does not run; empty where it does."""
    config = blueprint.config
    if asked == "generic":
        return "--decoder generic"
    if device != "cpu":
        return "tiermoe's own decoders compute on a CPU"
    if blueprint.family.encodes or config.model_type not in ARCHITECTURES:
        return f"tiermoe has no decoder of its own for {config.model_type}"
    lacking = not_computed(config)
    return f"tiermoe's decoder does not compute this config: {lacking}" if lacking else ""


def _kernels(blueprint: Blueprint, resolved: Resolved) -> tuple[str, bool]:
    """In words; whether torch's operators compute experts."""
    found = cpu_kernels()
    if not native.available():
        why = f"{native.SWITCH}=0" if _switched_off() else "this build has no native kernels"
        return f"{found}: {why}, slower", True
    if blueprint.dtype != torch.bfloat16:
        lacking = f"compute in bfloat16, the checkpoint is in {str(blueprint.dtype).removeprefix('torch.')}"
        return f"torch's operators: the native kernels ({found}) {lacking}", True
    left_out = _left_out(blueprint, resolved)
    if left_out:
        return f"{found}; torch's operators for experts' matrices of {left_out}, which it does not take: slower", True
    asked = os.environ.get(native.ISA)
    if asked:
        return f"{found}: {native.ISA}={asked}", False
    return (f"{found}: {_LACKS[found]}" if found in _LACKS else found), False


def _switched_off() -> bool:
    return os.environ.get(native.SWITCH) == "0"


def _left_out(blueprint: Blueprint, resolved: Resolved) -> str:
    """The first matrix of an expert that the native kernels do not take, as '96 x 64 at 4 bits'; empty where they take
    all."""
    for bits, forms in formats_of(blueprint, resolved, cpu_layout()).items():
        for form in forms:
            for part in form.layer.parts:
                encoding = form.encodings.get(part.name)
                if encoding is not None and matrix_form(encoding, *part.out_in, form.dtype) is None:
                    return "{} x {} at {} bits".format(*part.out_in, bits)
    return ""
