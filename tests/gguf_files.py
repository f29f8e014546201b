"""Small random models as GGUF files, written with the gguf package by golden headers (`gguf_golden`).

`write` returns the file, and transformers' eager model has the weights that the gguf package dequantises of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType
from gguf.quants import dequantize, quantize

import gguf_blocks
from gguf_cases import CASES, case_of, random_model
from gguf_golden import CONSTANT, HELD, Golden, Tensor, golden, typed
from tiermoe.formats.gguf_types import ENCODINGS

BLOCKS = {**{each.type: each.columns for each in ENCODINGS}, "nvfp4": 64}
WITHOUT_FACTORS = ("token_embd", "attn_v", "blk.1.ffn_down_exps")
"""Tensors that have no factors in NVFP4, as llama-quantize writes them."""
_WRITABLE = {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4"}
"""Types that the gguf package quantises to."""
_WIDE = ("ffn_gate_inp", "sinks", "conv1d", "ssm_norm", "shortconv.conv", "_fn.", "_ape", "indexer.q", "indexer.k")
"""Parts of names of matrices that llama-quantize leaves as they are."""
_PLAIN = {"f32": "f4", "f16": "f2"}
"""Types of numbers that are values of their own → numpy's."""
_FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "": (lambda value: value, lambda value: value),
    "1+": (lambda value: 1 + value, lambda value: value - 1),
    "exp": (torch.exp, torch.log),
    "-exp": (lambda value: -torch.exp(value), lambda value: torch.log(-value)),
}
"""What the converter does to values, and its inverse."""

Kinds = Callable[[str], str]
Entries = Mapping[str, Any]
"""Entry without its architecture → value, or (type, value); None: the file does not have it."""


def kinds(experts: str, down: str | None = None, dense: str | None = None) -> Kinds:
    """A type for matrices by their name: of experts, of experts' second matrix, of all others."""

    def kind(name: str) -> str:
        if "ffn_down_exps" in name:
            return down or experts
        return experts if "_exps" in name else dense or experts

    return kind


def architectures() -> dict[str, str]:
    """Family → the architecture of its files."""
    return {case.family: golden(case.family, name).architecture for name, case in CASES.items()}


def model_of(name: str, **changes: Any) -> Any:
    """transformers' eager model of a case. changes: of its config, for a model that is not written."""
    return random_model(case_of(name), **changes)


def golden_of(name: str) -> Golden:
    return golden(case_of(name).family, name)


def values_of(model: Any) -> dict[str, torch.Tensor]:
    """Parameters, and the buffers that a file holds."""
    held = {name: buffer for name, buffer in model.named_buffers() if name.endswith(HELD)}
    return {**dict(model.named_parameters()), **held}


def write(
    out: Path,
    model: Any,
    name: str,
    kind: Kinds,
    shards: int = 0,
    vocabulary: Path | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any] | None] | None = None,
    **entries: Any,
) -> Path:
    """Writes `model` as a case's golden header says and puts what the file stands for into its weights. tensors,
    entries: in place of the header's own (see `Entries`)."""
    header, state = golden_of(name), values_of(model)
    writer = gguf.GGUFWriter(out, header.architecture, split_max_tensors=shards)
    _add_entries(writer, header.architecture, {**header.entries, **entries})
    if vocabulary is not None:
        add_vocabulary(writer, vocabulary, model.config.get_text_config().vocab_size)
    given = tensors or {}
    with torch.no_grad():
        for called, tensor in header.tensors.items():
            if called in given:
                continue
            if tensor.function == CONSTANT:
                writer.add_tensor(called, np.array(tensor.sources, dtype=np.float32))
            else:
                _add(writer, called, tensor, state, _kind_of(called, tensor, kind))
    for called, values in given.items():
        if values is not None:
            writer.add_tensor(called, values)
    return _finish(writer, out)


def altered(
    file: Path, out: Path, tensors: Mapping[str, np.ndarray[Any, Any] | None] | None = None, **entries: Any
) -> Path:
    """A copy of a file with other tensors or entries (see `write`)."""
    reader, given = gguf.GGUFReader(file), tensors or {}
    architecture = reader.fields["general.architecture"].contents()
    found = {
        field.name.removeprefix(f"{architecture}."): (
            field.types[0].name if len(field.types) == 1 else f"{field.types[-1].name}[]", field.contents(),
        )
        for field in reader.fields.values()
        if not field.name.startswith(("GGUF.", "general."))
    }  # fmt: skip
    writer = gguf.GGUFWriter(out, architecture)
    _add_entries(writer, architecture, {**found, **entries})
    for tensor in reader.tensors:
        if tensor.name not in given:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for called, values in given.items():
        if values is not None:
            writer.add_tensor(called, values)
    return _finish(writer, out)


def _add_entries(writer: gguf.GGUFWriter, architecture: str, entries: Entries) -> None:
    for key, value in entries.items():
        if value is not None:
            kind, value = typed(value)
            name = key if key.startswith("tokenizer.") else f"{architecture}.{key}"
            if kind.endswith("[]"):
                writer.add_key_value(name, value, GGUFValueType.ARRAY, sub_type=GGUFValueType[kind[:-2]])
            else:
                writer.add_key_value(name, value, GGUFValueType[kind])


def _finish(writer: gguf.GGUFWriter, out: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _kind_of(name: str, tensor: Tensor, kind: Kinds) -> str:
    """Norms, routers, biases and sinks are float32; rows that are no whole blocks are float16."""
    one = len(tensor.shape) == 1 or not name.endswith(".weight")
    if tensor.type != "F32" or one or any(each in name for each in _WIDE):
        return tensor.type.lower()
    chosen = kind(name)
    return chosen if tensor.shape[-1] % BLOCKS.get(chosen, 1) == 0 else "f16"


def _views(tensor: Tensor, state: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    for source in tensor.sources:
        path, first, sizes, strides = (source, 0, None, None) if isinstance(source, str) else source
        flat = state[path].data.view(-1)
        yield flat if sizes is None else flat.as_strided(sizes, strides, flat.storage_offset() + first)


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, state: dict[str, torch.Tensor], kind: str) -> None:
    views, (function, inverse) = list(_views(tensor, state)), _FUNCTIONS[tensor.function]
    values = function(torch.cat([view.flatten() for view in views])).view(tensor.shape).numpy()
    if kind == "i32":
        writer.add_tensor(name, values.astype("i4"))
        return
    type, columns = Kind[kind.upper()], tensor.shape[-1]
    if kind in _PLAIN:
        raw = values.astype(_PLAIN[kind])
        wide = raw.astype(np.float32)
    elif kind in _WRITABLE:
        raw = quantize(values, type)
        wide = dequantize(raw, type)
    else:
        blocks = gguf_blocks.random_blocks(kind, values.size // columns, columns, seed=len(name))["blocks"].numpy()
        wide = dequantize(blocks, type) * np.float32(1)
        raw = blocks.reshape(*tensor.shape[:-1], -1)
    writer.add_tensor(name, raw, raw_dtype=type)
    if kind == "nvfp4" and not any(each in name for each in WITHOUT_FACTORS):
        count = tensor.shape[0] if len(tensor.shape) == 3 else 1
        factors = np.linspace(0.5, 2, count, dtype=np.float32)
        writer.add_tensor(name.replace("weight", "scale"), factors)
        writer.add_tensor(name.replace("weight", "input_scale"), np.ones(count, dtype=np.float32))
        wide = wide.reshape(tensor.shape) * factors.reshape(-1, *[1] * (len(tensor.shape) - 1))
    found = inverse(torch.from_numpy(np.ascontiguousarray(wide)).flatten())
    for view, part in zip(views, found.split([view.numel() for view in views]), strict=True):
        view.copy_(part.view(view.shape))


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Path, size: int) -> None:
    """The byte-level BPE of a tokenizer.json, cut or padded to `size` tokens."""
    document = json.loads(tokenizer.read_text())
    special = {added["id"]: added["content"] for added in document["added_tokens"] if added["special"]}
    by_id = {index: token for token, index in document["model"]["vocab"].items()} | special
    types = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id.get(index, f"[PAD{index}]") for index in range(size)])
    writer.add_token_types(
        [types.CONTROL if i in special else types.NORMAL if i in by_id else types.UNUSED for i in range(size)]
    )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]]
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
