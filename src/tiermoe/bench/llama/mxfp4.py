"""MXFP4 weights as gpt-oss publishes them: in float32, and in the order that GGUF stores.

A block is 32 weights of a row: 16 bytes of 4-bit codes (weight 2i in the low half of byte i, 2i + 1 in the high one)
and one exponent of two with a bias of 127. GGUF puts the exponent first, and byte i holds weights i and i + 16.
"""

import numpy as np
import numpy.typing as npt

BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=np.float32)
_BIAS = 127


def codes(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(..., 16) bytes to the (..., 32) codes of a block's weights in their order."""
    return np.stack((blocks & 0x0F, blocks >> 4), axis=-1).reshape(*blocks.shape[:-1], BLOCK)


def dequantise(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """(..., G, 16) bytes and (..., G) exponents to (..., 32 G) weights. bfloat16 holds them exactly."""
    exponents = scales.astype(np.int32)[..., None] - _BIAS
    weights: npt.NDArray[np.float32] = np.ldexp(_VALUES[codes(blocks)], exponents)
    return weights.reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK)


def ggml_blocks(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(..., G, 16) bytes and (..., G) exponents to (..., 17 G) bytes: the same weights as GGUF stores them."""
    each = codes(blocks)
    halves = each[..., : BLOCK // 2] | each[..., BLOCK // 2 :] << 4
    packed = np.concatenate((scales[..., None], halves), axis=-1)
    return packed.reshape(*scales.shape[:-1], -1)
