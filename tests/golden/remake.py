"""Golden headers of GGUF files: what llama.cpp's converter writes of the tests' small models.

    PYTHONPATH=src:tests .venv/bin/python tests/golden/remake.py LLAMA_CPP [FAMILY…]

LLAMA_CPP: a checkout of llama.cpp, or `vendor/llama.cpp` of llama-cpp-python's source archive. Every element of a
model's parameters is a number of its own, so that the converter's file tells where each element of each tensor comes
from, and by which function: that is what `tests/golden/gguf/FAMILY.json` holds beside names, shapes and entries."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

LLAMA_CPP = Path(sys.argv[1])
sys.path[:0] = [str(LLAMA_CPP), str(LLAMA_CPP / "gguf-py")]

import gguf  # noqa: E402
from conversion import ModelType, get_model_architecture, get_model_class  # noqa: E402
from conversion.base import LazyTorchTensor  # noqa: E402

import gguf_golden  # noqa: E402
import mtp_models  # noqa: E402
from gguf_cases import CASES, OTHERS, Case, random_model  # noqa: E402
from gguf_files import values_of  # noqa: E402
from gguf_golden import CONSTANT, Golden, Tensor, typed  # noqa: E402
from published import published  # noqa: E402
from tiny import write_tokenizer  # noqa: E402

VERSION = "llama-cpp-python 0.3.36"
IDS = 20
"""Bits of a number that are written in one pass: as many as float32 has behind those of 1 and of rounding."""

FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "": (lambda value: value, lambda value: value),
    "1+": (lambda value: value - 1, lambda value: 1 + value),
    "-exp": (lambda value: np.log(np.maximum(-value, 1e-30)), lambda value: -np.exp(value)),
    "exp": (lambda value: np.log(np.maximum(value, 1e-30)), np.exp),
}
"""What the converter does to a value → its inverse, and itself."""


def converted(model: Any, folder: Path, case: Case) -> Path:
    """The converter's file of a model."""
    model.save_pretrained(folder)
    write_tokenizer(folder)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    published(case, config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    cls = get_model_class(get_model_architecture(config, ModelType.TEXT))
    cls = getattr(cls, "Mistral4Model", cls)
    changes = {
        "set_vocab": lambda self: None,
        "model_arch": cls.model_arch,
        "no_mtp": not case.head,
        "_n_nextn": int(case.head),
    }
    if case.family == "deepseek_v4":
        changes["_write_mxfp4_expert_tensor"] = stacked_experts
    with torch.inference_mode():
        cls = type(cls.__name__, (cls,), changes)
        cls(folder, gguf.LlamaFileType.ALL_F32, folder / "model.gguf", hparams=config).write()
    return folder / "model.gguf"


def stacked_experts(self: Any, bid: int, proj: str, tensor_key: Any) -> list[str]:
    """`DeepseekV4Model._write_mxfp4_expert_tensor`, of matrices that are not in MXFP4."""
    names = [f"layers.{bid}.ffn.experts.{at}.{proj}.weight" for at in range(self.hparams["n_routed_experts"])]
    matrices = [LazyTorchTensor.to_eager(self.model_tensors[name]()) for name in names]
    self.gguf_writer.add_tensor(self.format_tensor_name(tensor_key, bid), torch.stack(matrices).numpy())
    return names


def numbered(model: Any, shift: int) -> None:
    """Gives every element the `IDS` bits of its number above `shift`, as a share of 1."""
    first = 0
    with torch.no_grad():
        for value in values_of(model).values():
            ids = torch.arange(first, first + value.numel()).view(value.shape)
            first += value.numel() if value.is_floating_point() else 0
            if value.is_floating_point():
                value.copy_(((ids >> shift) & ((1 << IDS) - 1)).double() / (1 << IDS))
            else:
                value.copy_(torch.arange(value.numel()).view(value.shape))


def source_of(passes: list[np.ndarray]) -> tuple[str, np.ndarray]:
    """The function of a tensor, and the number of each of its elements."""
    for name, (inverse, _) in FUNCTIONS.items():
        found = np.zeros(passes[0].size, np.int64)
        for at, raw in enumerate(passes):
            ids = inverse(raw.astype(np.float64).ravel()) * (1 << IDS)
            whole = np.rint(ids)
            if np.abs(ids - whole).max() > 0.3 or whole.min() < 0 or whole.max() >= 1 << IDS:
                break
            found |= whole.astype(np.int64) << at * IDS
        else:
            if len(np.unique(found)) == found.size:
                return name, found
    raise AssertionError("values of a tensor are no function of parameters that is known here")


def pieces_of(ids: np.ndarray, starts: np.ndarray, names: list[str], sizes: list[int]) -> Iterator[Any]:
    """The parts of parameters that follow each other: a path where it is whole and in its order, else (path, first
    element, sizes, strides)."""
    owner = np.searchsorted(starts, ids, side="right") - 1
    cuts = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(ids)]
    for first, last in pairwise(cuts):
        at = int(owner[first])
        offsets = ids[first:last] - starts[at]
        while len(offsets):
            counts, strides = affine(offsets)
            taken = math.prod(counts)
            start = int(offsets[0])
            whole = start == 0 and taken == sizes[at] and strides in ([1], [])
            yield names[at] if whole else [names[at], start, counts, strides]
            offsets = offsets[taken:]


def affine(offsets: np.ndarray) -> tuple[list[int], list[int]]:
    """Counts and strides, outermost first, of the longest beginning that nested loops make."""
    counts: list[int] = []
    strides: list[int] = []
    block = 1
    while True:
        blocks = len(offsets) // block
        if blocks < 2:
            break
        stride = int(offsets[block] - offsets[0])
        if stride < 0:
            break
        table = offsets[: blocks * block].reshape(blocks, block)
        wanted = table[0] + stride * np.arange(blocks)[:, None]
        same = (table == wanted).all(axis=1)
        count = blocks if same.all() else int(np.argmin(same))
        if count < 2:
            break
        if strides and stride == strides[0] * counts[0]:
            counts[0] *= count
        else:
            counts.insert(0, count)
            strides.insert(0, stride)
        block *= count
    return counts, strides


def entry_of(field: gguf.ReaderField) -> tuple[str, Any]:
    value = field.contents()
    kind = field.types[0].name if len(field.types) == 1 else f"{field.types[-1].name}[]"
    if "FLOAT" in kind:
        value = [_short(each) for each in value] if isinstance(value, list) else _short(value)
    return kind, value


def _short(value: float) -> float:
    """The shortest number that is the same in float32."""
    return float(str(np.float32(value)))


def header(case: Case) -> Golden:
    """The golden header of a case."""
    model = random_model(case)
    if case.head:
        mtp_models.attach_head(model)
    state = values_of(model)
    floats = {name: value for name, value in state.items() if value.is_floating_point()}
    names, sizes = list(floats), [value.numel() for value in floats.values()]
    starts = np.cumsum([0, *sizes[:-1]])
    passes: list[dict[str, np.ndarray]] = []
    for shift in range(0, sum(sizes).bit_length(), IDS):
        numbered(model, shift)
        with tempfile.TemporaryDirectory() as folder:
            reader = gguf.GGUFReader(converted(model, Path(folder), case))
            passes.append({each.name: np.array(each.data) for each in reader.tensors})
    architecture = reader.fields["general.architecture"].contents()
    entries = {
        name.removeprefix(f"{architecture}."): entry_of(field)
        for name, field in reader.fields.items()
        if name.startswith(f"{architecture}.")
    }
    tensors = {}
    for each in reader.tensors:
        found = Tensor(list(reversed(each.shape.tolist())), [], type=each.tensor_type.name)
        first = passes[0][each.name]
        if found.type == "I32":
            found.sources = [name for name in state if name not in floats and f".{each.name.split('.')[1]}." in name]
            assert (first.ravel() == np.arange(first.size)).all(), each.name
        elif each.name.startswith("rope_"):
            found.function, found.sources = CONSTANT, [_short(value) for value in first.ravel()]
        else:
            source = source_of([one[each.name] for one in passes])
            found.function, found.sources = source[0], list(pieces_of(source[1], starts, names, sizes))
        tensors[each.name] = found
    entries |= {name: typed(value) for name, value in BY_HAND.get(case.family, {}).items()}
    return Golden(architecture, entries, tensors)


BY_HAND: dict[str, dict[str, Any]] = {"mistral4": {"attention.temperature_scale": 0.5}}
"""Entries that the converter writes of checkpoints in another form alone (Mistral's own)."""


def main() -> None:
    logging.disable(logging.WARNING)
    cases = {**CASES, **OTHERS}
    context = multiprocessing.get_context("fork")  # the converter's tables change with what it has converted
    for family in dict.fromkeys(case.family for case in cases.values()):
        if family in (sys.argv[2:] or [family]):
            names = [name for name, case in cases.items() if case.family == family]
            with context.Pool(1, maxtasksperchild=1) as pool:
                found = pool.map(header, [cases[name] for name in names], 1)
            gguf_golden.save(family, VERSION, dict(zip(names, found, strict=True)))
            print(family, names, flush=True)


if __name__ == "__main__":
    main()
