"""Hunyuan 4 in GGUF files (`HYV4Model` of the converter): its config, what its tensors are called, and how its heads'
columns are rotated.

The converter writes the published matrices as they are. llama.cpp rotates neighbouring columns of them, as vLLM does;
transformers rotates those of both halves of the same matrices. A file is read as llama.cpp runs it."""

from __future__ import annotations

import torch
from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.gguf.config import SIGMOID, Config, latent
from tiermoe.model.gguf.deepseek4 import CONNECTIONS, gate_limit
from tiermoe.model.gguf.latent_indexers import INDEXER, full_layers, indexer_sizes, indexer_types
from tiermoe.model.gguf.shapes import AGAIN, blocks

NAMES = {
    "attn_sinks": "self_attn.sinks",
    "attn_gate": "self_attn.gate_proj",
    **INDEXER,
    **CONNECTIONS,
}
"""Tensors of a block → modules or parameters of a layer, beside the usual ones."""

_HEADS = {"attn_q_b": "attention.key_length_mla", "indexer.attn_q_b": "attention.indexer.key_length"}
"""Tensors of several heads whose last columns are rotated → the entry that has a head's columns."""
_ONE_HEAD = ("attn_kv_a_mqa", "indexer.attn_k", "indexer.k_norm")


def hy4(file: GgufFile) -> Config:
    config = latent(file)
    if file.count("expert_gating_func", SIGMOID) != SIGMOID:
        raise ModelError(f"{file.path} has routers that score by no sigmoid, which every Hunyuan 4 does; {AGAIN}")
    dense, full = config.pop("first_k_dense_replace"), full_layers(file)
    if not full[0]:
        raise ModelError(f"{file.path} has no indexer in its first layer, which every Hunyuan 4 has; {AGAIN}")
    return {
        **config,
        "model_type": "hy_v4",
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (blocks(file) - dense),
        **indexer_sizes(file),
        "indexer_types": indexer_types(full),
        "swiglu_limit": gate_limit(file),
        "hc_mult": file.count("hyper_connection.count", least=1),
        "hc_eps": file.decimal("hyper_connection.epsilon"),
        "hc_magnitude": file.decimal("hyper_connection.magnitude"),
    }


def rotated_rows(file: GgufFile, stem: str, rows: int) -> Tensor | None:
    """Where each row of a parameter is in a tensor whose heads' last columns are rotated: the first of each pair of
    neighbours, then the second ones. None for other tensors."""
    if stem not in _HEADS and stem not in _ONE_HEAD:
        return None
    rotary = file.count("rope.dimension_count", least=2)
    columns = file.count(_HEADS[stem], least=1) if stem in _HEADS else rows
    if rows % columns or rotary % 2 or rotary > columns:
        raise ModelError(
            f"{file.path}: {stem} of {rows} rows has no heads of {columns}, of which {rotary} are rotated; {AGAIN}"
        )
    heads = torch.arange(rows).view(-1, columns)
    first, second = heads[:, -rotary::2], heads[:, columns - rotary + 1 :: 2]
    return torch.cat((heads[:, : columns - rotary], first, second), dim=1).flatten()
