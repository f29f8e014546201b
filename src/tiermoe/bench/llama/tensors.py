"""Which tensors of a checkpoint make which tensor of a GGUF file, one tensor in memory at a time.

llama.cpp names tensors ``blk.N.*`` and stacks a layer's experts into one (experts, rows, columns) tensor per matrix;
the names are the gguf package's. Values are moved, never computed: MXFP4 alone may be turned into what bfloat16 holds
exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

from tiermoe.bench.llama.checkpoint import Checkpoint, expert_count
from tiermoe.bench.llama.mxfp4 import BLOCK, dequantise, ggml_blocks

Array = npt.NDArray[Any]
Cut = Callable[[Array], Array]
"""A part of a tensor, or its values in another order."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight")
_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(|_bias|_blocks|_scales)")


@dataclass(frozen=True)
class Plain:
    """`parts` of the checkpoint, each cut, stacked. `kept`: its type where that is not the file's."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    cut: Cut = lambda array: array

    @property
    def kept(self) -> Kind | None:
        """Norms, routers, sinks and biases are float32, as in llama.cpp's own converter."""
        exact = len(self.shape) == 1 or not self.name.endswith(".weight") or self.name.endswith("ffn_gate_inp.weight")
        return Kind.F32 if exact else None

    def array(self, checkpoint: Checkpoint, kind: Kind) -> Array:
        """Its values in `kind`, as they lie in the file."""
        read = checkpoint.float32 if kind is Kind.F32 else checkpoint.bfloat16_bits
        return np.stack([self.cut(read(part)) for part in self.parts]).reshape(self.shape)


@dataclass(frozen=True)
class Packed:
    """Experts in MXFP4: `cut` of `blocks` and of `scales`. keep: they stay so."""

    name: str
    shape: tuple[int, ...]
    blocks: str
    scales: str
    cut: Cut
    keep: bool

    @property
    def kept(self) -> Kind | None:
        return Kind.MXFP4 if self.keep else None

    def array(self, checkpoint: Checkpoint, kind: Kind) -> Array:
        """Its values in `kind`, as they lie in the file."""
        blocks, scales = self.cut(checkpoint.raw(self.blocks)), self.cut(checkpoint.raw(self.scales))
        if kind is Kind.MXFP4:
            return ggml_blocks(blocks, scales)
        if kind is Kind.F32:
            return dequantise(blocks, scales)
        made = np.empty(self.shape, np.uint16)
        for expert in range(len(made)):
            made[expert] = dequantise(blocks[expert], scales[expert]).view(np.uint32) >> 16
        return made


Tensor = Plain | Packed


def tensors(checkpoint: Checkpoint, arch: gguf.MODEL_ARCH, keep_mxfp4: bool = False) -> Iterator[Tensor]:
    """Every tensor of the file. keep_mxfp4: experts that are stored in MXFP4 stay so. ValueError for a tensor that
    llama.cpp has no place for. Layers for predicting several tokens are left out."""
    layers = checkpoint.config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(arch, layers)

    def place(name: str) -> str:
        found = names.get_name(name, (".weight", ".bias"))
        if found is None:
            raise ValueError(f"llama.cpp's {gguf.MODEL_ARCH_NAMES[arch]} has no place for {name}")
        return str(found)

    for name in checkpoint.names():
        layer = _LAYER.match(name)
        if (layer and int(layer[1]) >= layers) or (
            name == "lm_head.weight" and checkpoint.config.get("tie_word_embeddings")
        ):
            continue
        if expert := _EXPERT.fullmatch(name):
            if int(expert[2]) == 0:
                yield _stacked(checkpoint, expert[1], expert[3], place)
        elif fused := _FUSED.fullmatch(name):
            yield from _fused(checkpoint, fused, place, keep_mxfp4)
        elif name.endswith(".self_attn.kv_b_proj.weight"):
            yield from _latent(checkpoint, name, place)
        else:
            known = name.replace("e_score_correction_bias", "e_score_correction.bias")
            known = known + ".weight" if known.endswith(".sinks") else known
            yield Plain(place(known), checkpoint.shape(name), (name,))


def _stacked(checkpoint: Checkpoint, prefix: str, matrix: str, place: Callable[[str], str]) -> Plain:
    parts = tuple(f"{prefix}.{expert}.{matrix}.weight" for expert in range(expert_count(checkpoint.config)))
    return Plain(place(f"{prefix}.{matrix}.weight"), (len(parts), *checkpoint.shape(parts[0])), parts)


def _fused(
    checkpoint: Checkpoint, found: re.Match[str], place: Callable[[str], str], keep_mxfp4: bool
) -> Iterator[Tensor]:
    """gpt-oss: gate and up are rows in turn of one matrix, and bfloat16 weights are transposed."""
    prefix, matrix, suffix = found.groups()
    stem = f"{prefix}.{matrix}_proj"
    halves = {"gate": slice(0, None, 2), "up": slice(1, None, 2)} if matrix == "gate_up" else {"down": slice(None)}
    for half, rows in halves.items():
        name = f"{prefix}.{half}_proj"
        if suffix == "_bias":
            yield _cut(checkpoint, place(f"{name}.bias"), f"{stem}_bias", _rows(rows))
        elif suffix == "":
            yield _cut(checkpoint, place(f"{name}.weight"), stem, _transposed_rows(rows))
        elif suffix == "_blocks":
            experts, every, groups, _ = checkpoint.shape(found[0])
            shape = (experts, len(range(every)[rows]), groups * BLOCK)
            yield Packed(place(f"{name}.weight"), shape, found[0], f"{stem}_scales", _rows(rows), keep_mxfp4)


def _rows(rows: slice) -> Cut:
    return lambda array: array[:, rows]


def _transposed_rows(rows: slice) -> Cut:
    return lambda array: array[..., rows].swapaxes(1, 2)


def _latent(checkpoint: Checkpoint, name: str, place: Callable[[str], str]) -> Iterator[Plain]:
    """DeepSeek: what turns the latent into keys, transposed, and into values."""
    config = checkpoint.config
    keys, values = config["qk_nope_head_dim"], config["v_head_dim"]

    def heads(array: Array) -> Array:
        return array.reshape(-1, keys + values, array.shape[-1])

    to_keys = place(name.replace("kv_b_proj", "k_b_proj"))
    to_values = place(name.replace("kv_b_proj", "v_b_proj"))
    yield _cut(checkpoint, to_keys, name, lambda array: heads(array)[:, :keys].swapaxes(1, 2))
    yield _cut(checkpoint, to_values, name, lambda array: heads(array)[:, keys:])


def _cut(checkpoint: Checkpoint, name: str, part: str, cut: Cut) -> Plain:
    """`part` after `cut`, whose shape is that of the cut of nothing's bytes."""
    shape = cut(np.broadcast_to(np.uint8(0), checkpoint.shape(part))).shape
    return Plain(name, shape, (part,), cut)
