"""Writes a checkpoint as a GGUF file for llama.cpp: one tensor in memory at a time. Weights keep their values; the
quantised types go through a bf16 file, removed afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from tiermoe.bench.llama.architectures import add_metadata, architecture_of
from tiermoe.bench.llama.checkpoint import Checkpoint, is_mxfp4
from tiermoe.bench.llama.tensors import tensors

FILE_TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path, config: dict[str, Any]) -> None:
    """The byte-level BPE of tokenizer.json, which llama.cpp calls "gpt2" with pre-tokenizer "gpt-2". What the
    vocabulary has beyond it is padding. ValueError for another tokenizer."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    if "merges" not in tokenizer["model"]:
        raise ValueError(f"the tokenizer in {directory} is {tokenizer['model'].get('type')!r}; BPE ones are written")
    special = {added["id"]: added["content"] for added in tokenizer["added_tokens"] if added["special"]}
    by_id = {index: token for token, index in tokenizer["model"]["vocab"].items()} | special
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(config["vocab_size"])]
    kinds = [
        gguf.TokenType.CONTROL
        if index in special
        else gguf.TokenType.NORMAL
        if index in by_id
        else gguf.TokenType.UNUSED
        for index in range(config["vocab_size"])
    ]
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for name, add in (("bos_token_id", writer.add_bos_token_id), ("eos_token_id", writer.add_eos_token_id)):
        token = config.get(name)
        first = token[0] if isinstance(token, list) else token
        if first is not None:
            add(first)
    writer.add_add_bos_token(False)


def write_gguf(directory: Path, out: Path, file_type: str, keep_mxfp4: bool = False) -> None:
    """Write the checkpoint in ``directory`` to ``out`` as ``file_type`` "f32" or "bf16"; with ``keep_mxfp4`` experts
    that are stored in MXFP4 stay so.

    Memory: one stacked tensor, that is one matrix of all experts of one layer. Raises ValueError where llama.cpp could
    not compute the same function.
    """
    checkpoint = Checkpoint(directory)
    architecture = architecture_of(checkpoint.config)
    weight_type, llama_type = FILE_TYPES[file_type]
    planned = [
        (each, weight_type if each.kept is None else each.kept)
        for each in tensors(checkpoint, architecture.arch, keep_mxfp4)
    ]
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[architecture.arch])
    writer.add_file_type(llama_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_metadata(writer, checkpoint.config)
    add_tokenizer(writer, directory, checkpoint.config)
    for tensor, kind in planned:
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        size = int(np.prod(tensor.shape)) // block * nbytes
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, kind in planned:
        writer.write_tensor_data(np.ascontiguousarray(tensor.array(checkpoint, kind)))
    writer.close()


QUANTISED = {
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "mxfp4": llama_cpp.LLAMA_FTYPE_MOSTLY_MXFP4_MOE,
}
"""`mxfp4` keeps experts that are published so and puts the rest in 8 bits, as the files do that people download."""


def convert_to(model: Path, out: Path, kind: str, threads: int) -> None:
    """Writes `out`. ValueError for a checkpoint that llama.cpp would compute otherwise, RuntimeError where it fails."""
    if kind in FILE_TYPES:
        write_gguf(model, out, kind)
        return
    if kind == "mxfp4" and not is_mxfp4(model):
        raise ValueError(f"the experts of {model} are not stored in MXFP4; choose another type")
    whole = out.with_suffix(".bf16.gguf")
    try:
        write_gguf(model, whole, "bf16", keep_mxfp4=kind == "mxfp4")
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = QUANTISED[kind], threads
        if llama_cpp.llama_model_quantize(str(whole).encode(), str(out).encode(), params):
            raise RuntimeError(f"llama.cpp could not quantise {whole} to {kind}")
    finally:
        whole.unlink(missing_ok=True)
