"""Tensors of a GGUF file by which the frequencies of a rotary embedding are divided: their values are the config's."""

from __future__ import annotations

from contextlib import closing

import torch
from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.formats.safetensors import FileReader
from tiermoe.model.gguf.shapes import AGAIN

FREQUENCIES = "rope_freqs.weight"
LONG_FACTORS = tuple(f"rope_factors_{reach}.weight" for reach in ("short", "long"))
"""Of models that were made for longer texts than they were first trained for (LongRoPE)."""


def divisors(file: GgufFile, name: str, columns: int) -> Tensor | None:
    """The tensor `name`: float32 (columns / 2), of heads of so many rotated columns; None where the file has none.
    ModelError where it is another type or shape."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.kind.name != "F32" or tensor.shape != (columns // 2,):
        raise ModelError(
            f"{file.path}: {name} is {tensor.kind.name} of shape {tensor.shape}, not F32 of {columns // 2} factors; "
            f"{AGAIN}"
        )
    with closing(FileReader()) as reader:
        return reader.read(tensor.file, tensor.offset, tensor.nbytes, name).view(torch.float32)
