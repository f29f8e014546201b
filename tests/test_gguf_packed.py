"""Experts of a GGUF file packed in fewer bits beside it: what they compute, what stays in the file, what a second run
and an interrupted one pack, and what the plan says first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gguf_files
from gguf_engines import engine_of, logits_of
from gguf_files import kinds
from parity import tokens
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_for
from tiermoe.kernels.linear import machine_layout

SMALL = {"hidden_size": 64, "moe_intermediate_size": 64}
"""Rows and columns that 3 and 2 bits take."""


def write(folder: Path, **changes: Any) -> tuple[Path, Any]:
    """A file with experts in Q4_0 and other layers in Q8_0, and transformers' eager model with its weights."""
    model = gguf_files.model_of("qwen3_moe", **SMALL, **changes)
    file = gguf_files.write(folder / "m.gguf", model, "qwen3_moe", kinds("q4_0", dense="q8_0"))
    return file, model


def quantized(model: Any, bits: int, quantizer: str) -> Any:
    """The model with each of its experts' matrices as `bits` have it: the file's own values, quantised once."""
    with torch.no_grad():
        for layer in model.model.layers:
            for stacked in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                for matrix in stacked:
                    out, in_ = matrix.shape
                    encoding = encoding_for(bits, out, in_, torch.float32, machine_layout("cpu"), quantizer)
                    fields = encoding.encode(matrix, QUANTIZERS[quantizer], torch.float32)
                    matrix.copy_(encoding.decode(fields, out, in_, torch.float32))
    return model


@pytest.mark.parametrize(("bits", "quantizer"), [(3, "nonlinear"), (2, "hqq")])
@pytest.mark.parametrize("cache", ["100%", "50%"])
def test_experts_are_quantised_and_other_layers_stay(bits: int, quantizer: str, cache: str, tmp_path: Path) -> None:
    file, model = write(tmp_path)
    ids = tokens(1, 30)[0].tolist()
    with torch.no_grad():
        plain = model(torch.tensor([ids])).logits[0]
        wanted = quantized(model, bits, quantizer)(torch.tensor([ids])).logits[0]
    engine = engine_of(file, torch.float32, store=tmp_path / "store", bits=bits, cache=cache)
    found = logits_of(engine, ids)
    assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max() < (plain - wanted).abs().max()
    assert engine.settings.dense_bits_used == 16
    assert not engine.store.dense
    assert not list((tmp_path / "store").glob("dense-*"))
    engine.close()


def test_dense_bits_that_are_asked_for_are_packed(tmp_path: Path) -> None:
    file, _ = write(tmp_path)
    engine = engine_of(file, torch.float32, store=tmp_path / "store", bits=3, dense_bits=4)
    assert engine.settings.dense_bits_used == 4
    assert len(engine.store.dense) == 1
    engine.close()
