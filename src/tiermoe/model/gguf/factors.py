"""What frequencies of a rotary embedding are divided by, of GGUF files that have a tensor of it."""

from __future__ import annotations

from contextlib import closing

import torch
from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.formats.safetensors import FileReader
from tiermoe.model.gguf.shapes import AGAIN

FACTORS = "rope_freqs.weight"
"""The tensor's name."""


def rotary_factors(file: GgufFile, columns: int) -> Tensor | None:
    """The factors of heads of so many columns, float32 (columns / 2); None where the file has none. ModelError for
    others."""
    tensor = file.tensors.get(FACTORS)
    if tensor is None:
        return None
    if tensor.kind.name != "F32" or tensor.shape != (columns // 2,):
        raise ModelError(
            f"{file.path}: {FACTORS} is {tensor.kind.name} of shape {tensor.shape}, "
            f"not F32 of {columns // 2} factors; {AGAIN}"
        )
    with closing(FileReader()) as reader:
        return reader.read(tensor.file, tensor.offset, tensor.nbytes, FACTORS).view(torch.float32)
