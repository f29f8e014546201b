"""NVFP4 in GGUF files: blocks and factors, which llama.cpp's converter writes as tensors of their own."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import gguf_blocks
import gguf_files
from commands import Command
from gguf_engines import eager_greedy, engine_of, greedy, logits_of
from gguf_files import kinds
from parity import close, tokens
from test_gguf_runs import WIDE, eager
from tiermoe.errors import ModelError
from tiermoe.formats.gguf_types import Nvfp4, gguf_encoding
from tiermoe.formats.registry import encoding_named
from tiermoe.kernels.linear import linear_for
from tiermoe.model.hf.blueprint import inspect_model


@pytest.mark.parametrize("matrices", [0, 1, 2])
def test_a_slot_stands_for_what_the_gguf_package_dequantises(matrices: int) -> None:
    stored = gguf_blocks.random_blocks("nvfp4", 6, 128)
    factors = torch.tensor([0.5, 3.0])[:matrices]
    wanted = gguf_blocks.weights("nvfp4", stored)
    if matrices:
        stored, wanted = {**stored, "factors": factors}, wanted * factors.repeat_interleave(6 // matrices)[:, None]
    encoding = gguf_encoding("nvfp4").stacked(0) if not matrices else Nvfp4(matrices)
    assert encoding_named(encoding.name) == encoding
    assert [each.name for each in encoding.stored_fields(6, 128, torch.bfloat16)] == list(stored)
    slot = encoding.slot_of(stored, 6, 128)
    assert [(name, value.shape) for name, value in slot.items()] == [
        (each.name, each.shape) for each in encoding.slot_fields(6, 128, torch.bfloat16)
    ]
    assert torch.equal(encoding.decode(slot, 6, 128, torch.float32), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products(dtype: torch.dtype) -> None:
    encoding = Nvfp4(2)
    stored = {**gguf_blocks.random_blocks("nvfp4", 64, 256), "factors": torch.tensor([0.5, 3.0])}
    slot = encoding.slot_of(stored, 64, 256)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = x.double() @ encoding.decode(slot, 64, 256, torch.float32).double().t()
    found = linear_for(encoding.name, "cpu", dtype)(x, slot, 64, 256)
    assert (found - wanted).abs().max() <= (1e-6 if dtype == torch.float32 else 4e-3) * wanted.abs().max()


@pytest.fixture(scope="module", params=["qwen3_moe, wide", "deepseek_v3 of 64 columns", "qwen3_next"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Of the second model each head has rows of whole blocks."""
    model = gguf_files.model_of(request.param)
    file = tmp_path_factory.mktemp("nvfp4") / "model.gguf"
    return gguf_files.write(file, model, request.param, kinds("nvfp4")), model


def test_logits_and_tokens_are_those_of_the_dequantised_weights(written: tuple[Path, Any], tmp_path: Path) -> None:
    file, model = written
    ids = tokens(1, 40)[0].tolist()
    engine = engine_of(file, store=tmp_path / "store")
    assert (logits_of(engine, ids) - eager(model, ids)).abs().max() <= 1e-3 * eager(model, ids).abs().max()
    assert greedy(engine, ids[:16], 48) == eager_greedy(model, ids[:16], 48)
    engine.close()
    engine = engine_of(file, torch.bfloat16, store=tmp_path / "narrow")
    assert close(logits_of(engine, ids), eager(model, ids))
    assert inspect_model(file, str(file), tmp_path / "narrow").own_types().startswith("NVFP4")
    engine.close()


def test_a_small_cache_changes_no_bit(written: tuple[Path, Any], tmp_path: Path) -> None:
    ids, found = tokens(1, 30)[0].tolist(), []
    for cache in ("100%", "40%"):
        engine = engine_of(written[0], torch.bfloat16, store=tmp_path / "store", cache=cache, lanes=2)
        found.append(logits_of(engine, ids))
        engine.close()
    assert torch.equal(*found)


def test_other_bits_are_packed_from_it(written: tuple[Path, Any], tmp_path: Path) -> None:
    file, model = written
    ids = tokens(1, 30)[0].tolist()
    engine = engine_of(file, torch.bfloat16, store=tmp_path / "store", bits=8)
    assert "8" in engine.store.precisions
    assert close(logits_of(engine, ids), eager(model, ids))
    engine.close()


def test_a_matrix_of_two_types_is_packed(tmp_path: Path) -> None:
    model = gguf_files.model_of(WIDE)
    file = gguf_files.write(tmp_path / "m.gguf", model, WIDE, lambda name: "q8_0" if "ffn_up_exps" in name else "nvfp4")
    with pytest.raises(ModelError, match=r"as NVFP4 and Q8_0, which kernels .* do not take in place; --bits 4 packs"):
        engine_of(file, store=tmp_path / "store")
    ids = tokens(1, 30)[0].tolist()
    engine = engine_of(file, torch.bfloat16, store=tmp_path / "store", bits=8)
    assert close(logits_of(engine, ids), eager(model, ids))
    engine.close()


def test_factors_that_are_not_one_for_each_expert(tmp_path: Path, tiermoe_: Command) -> None:
    model = gguf_files.model_of(WIDE)
    file = gguf_files.write(tmp_path / "m.gguf", model, WIDE, kinds("nvfp4"))
    content, name = bytearray(file.read_bytes()), b"blk.0.ffn_up_exps.scale"
    at = content.index(name) + len(name) + 4  # behind the number of dimensions
    content[at : at + 8] = struct.pack("<Q", 3)
    file.write_bytes(content)
    failed = tiermoe_("run", file, "Once")
    assert "blk.0.ffn_up_exps.scale is F32 of shape (3,), not F32 of (8,); convert the model again" in failed.cause


def test_experts_of_gemma_4_have_their_scales_in_their_factors(tmp_path: Path) -> None:
    """llama.cpp's converter multiplies an expert's scale into the factor of its last matrix."""
    name = "gemma4 of 64 columns"
    model = gguf_files.model_of(name)
    folded = {f"blk.{layer}.ffn_down_exps.scale": None for layer in (0, 2)}  # the writer gives the second no factors
    file = gguf_files.write(tmp_path / "model.gguf", model, name, kinds("nvfp4", "nvfp4", "q8_0"), tensors=folded)
    for layer in (0, 2):
        torch.nn.init.ones_(model.model.layers[layer].router.per_expert_scale)
    ids = tokens(1, 20)[0].tolist()
    wanted = eager(model, ids)
    engine = engine_of(file, store=tmp_path / "store")
    found = logits_of(engine, ids)
    engine.close()
    assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max()
