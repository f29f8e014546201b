"""Codes and scales as checkpoints publish them, for tests of kernels, and what they stand for."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tiermoe.quant.published import Published
from tiermoe.quant.transposed4 import Transposed4

ENCODINGS: list[Published | Transposed4] = [
    Transposed4("gptq", "f16", 32, 2),
    Transposed4("awq", "bf16", 64),
    Published("e2m1", "e8m0", 1, 32),
    Published("e2m1", "e4m3-over", 1, 16, 2),
    Published("e2m1", "e4m3-times", 1, 16, 1),
    Published("s4", "bf16", 1, 32),
    Published("s4", "f16", 1, 128),
    Published("e4m3", "f32", 128, 128),
    Published("e4m3", "bf16", 32, 32),
    Published("e4m3", "f32", 1, 1 << 15),
    Published("e4m3", "e8m0", 1 << 15, 1 << 15),
]


def random_slot(encoding: Published | Transposed4, out: int, in_: int, seed: int = 0) -> dict[str, Tensor]:
    """The slot's fields of a matrix (out, in_): all codes that are defined occur, weights are around 0.1 large."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(encoding, Transposed4):
        codes, scales, zeros = encoding.slot_fields(out, in_, torch.bfloat16)
        return {
            "codes": torch.randint(0, 256, codes.shape, dtype=torch.uint8, generator=generator),
            "scales": (torch.rand(scales.shape, generator=generator) * 0.02 + 0.001).to(scales.dtype),
            "zeros": torch.randint(0, 17, zeros.shape, dtype=torch.uint8, generator=generator),
        }
    codes, scales, *factors = encoding.stored_fields(out, in_, torch.bfloat16)
    found = torch.randint(0, 256, codes.shape, dtype=torch.uint8, generator=generator)
    if encoding.codes == "e4m3":
        found[(found & 0x7F) == 0x7F] = 0
    if encoding.scale == "e8m0":
        return {"codes": found, "scales": torch.randint(110, 125, scales.shape, dtype=torch.uint8, generator=generator)}
    if factors:
        bytes_ = torch.randint(1, 0x7F, scales.shape, dtype=torch.uint8, generator=generator)
        factor = torch.rand(factors[0].shape, generator=generator) * 1e-3 + 1e-4
        factor = factor if encoding.scale == "e4m3-times" else factor.reciprocal()
        return {"codes": found, "scales": bytes_, "factors": factor}
    size = torch.rand(scales.shape, generator=generator) * 0.02 + 0.001
    return {"codes": found, "scales": size.to(scales.dtype)}


def weights(encoding: Published | Transposed4, slot: dict[str, Tensor], in_: int) -> Tensor:
    """What a slot stands for, float32 (out, in_): MXFP4 by transformers, the others by their definition."""
    codes, scales = slot["codes"], slot["scales"]
    out = codes.shape[0]
    if isinstance(encoding, Transposed4):
        values = torch.stack([(codes >> shift & 15).float() for shift in (0, 4)], dim=-1).flatten(1)
        zeros, wide = (slot[name].float().repeat_interleave(encoding.group, 1) for name in ("zeros", "scales"))
        return (values - zeros) * wide
    if encoding.matrices:
        ones = torch.full((1, out, in_ // 32), 127, dtype=torch.uint8)
        values = convert_moe_packed_tensors(codes.view(1, out, -1, 16), ones, dtype=torch.float32)[0].t()
        factor = slot["factors"].repeat_interleave(out // encoding.matrices)[:, None]
        sizes = scales.view(torch.float8_e4m3fn).float()
        sizes = sizes * factor if encoding.scale == "e4m3-times" else sizes / factor
        return values * sizes.repeat_interleave(16, 1)
    if encoding.codes == "e2m1":
        blocks = codes.view(1, out, -1, 16)
        return convert_moe_packed_tensors(blocks, scales[None], dtype=torch.float32)[0].t().contiguous()
    if encoding.codes == "s4":
        values = torch.stack([(codes >> shift & 15).float() - 8 for shift in (0, 4)], dim=-1).flatten(1)
    else:
        values = codes.view(torch.float8_e4m3fn).float()
    if encoding.scale == "e8m0":
        scales = scales.view(torch.float8_e8m0fnu)
    wide = scales.float().repeat_interleave(min(encoding.rows, out), 0)[:out]
    return values * wide.repeat_interleave(min(encoding.columns, in_), 1)[:, :in_]
