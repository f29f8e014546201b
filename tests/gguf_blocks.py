"""Blocks of GGUF files for tests: random codes under scales of the size that weights have."""

from __future__ import annotations

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import GGMLQuantizationType, dequantize

from tiermoe.formats.gguf_types import gguf_encoding

# type -> bytes of a block at which its float16 scales and minima begin
_SCALES = {
    "q8_0": (0,),
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq1_s": (0,),
    "iq2_xxs": (0,),
    "iq2_xs": (0,),
    "iq2_s": (0,),
    "iq3_xxs": (0,),
    "iq3_s": (0,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
    "tq1_0": (52,),
    "tq2_0": (64,),
}


def random_blocks(type: str, out: int, in_: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """The slot's field of a matrix (out, in_) in blocks of `type`: all codes occur, weights are around 0.1 large."""
    columns, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[type.upper()]]
    encoding, random = gguf_encoding(type), np.random.default_rng(seed)
    blocks = random.integers(0, 256, (out, in_ // columns, nbytes), dtype=np.uint8)
    if type == "nvfp4":
        blocks[..., :4] = random.integers(16, 40, (*blocks.shape[:2], 4))
        blocks[0, 0, :2] = (0, 0x7F)  # which ggml takes for 0
    if type == "mxfp4":
        blocks[..., 0] = random.integers(118, 125, blocks.shape[:2])
    if type == "iq1_m":  # its float16 lies in four high nibbles; these two are its highest, of about 1/256
        blocks[..., 53] = blocks[..., 53] & 0x0F | 0xC0
        blocks[..., 55] = blocks[..., 55] & 0x0F | 0x10
    for at in _SCALES.get(type, ()):
        scales = random.uniform(0.5, 1.0, blocks.shape[:2]) * random.choice([-1, 1], blocks.shape[:2])
        size = 0.2 / (1 << encoding.bits) / (16 if columns == 256 else 1)
        blocks[..., at : at + 2] = (scales * size).astype(np.float16)[..., None].view(np.uint8)
    return {"blocks": torch.from_numpy(blocks.reshape(out, -1))}


def weights(type: str, slot: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the blocks stand for, float32 (out, in_), by the gguf package."""
    return torch.from_numpy(dequantize(slot["blocks"].numpy(), GGMLQuantizationType[type.upper()]))
