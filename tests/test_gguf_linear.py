"""Layers of linear attention in GGUF files: orders of rows and columns that `test_gguf_models` does not meet."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

import gguf_files
import tiny
from gguf_engines import engine_of, logits_of
from parity import close, tokens
from tiermoe.errors import ModelError
from tiermoe.formats.gguf_checkpoint import GgufCheckpoint
from tiermoe.formats.gguf_file import GgufFile, open_gguf
from tiermoe.model.families.rows import linear_rows
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.packing import own_linears

CONFIG = tiny.config_of("qwen3_next", linear_num_value_heads=6)
KEYS, HEADS, KEY, VALUE = 2, 6, 16, 32


def joined(out: Path, whole: torch.Tensor) -> GgufFile:
    """A file with one matrix of linear attention as older converters have it."""
    writer = gguf.GGUFWriter(out, "qwen3next")
    for key, value in {"conv_kernel": 4, "state_size": KEY, "group_count": KEYS, "time_step_rank": HEADS}.items():
        writer.add_uint32(f"qwen3next.ssm.{key}", value)
    writer.add_ssm_inner_size(HEADS * VALUE)
    writer.add_tensor("blk.0.ssm_in.weight", whole.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(out)


def test_older_files_have_the_projection_in_one(tmp_path: Path) -> None:
    whole = torch.randn(2 * KEYS * KEY + 2 * HEADS * VALUE, 8, generator=torch.Generator().manual_seed(0))
    file = joined(tmp_path / "m.gguf", whole)
    checkpoint = GgufCheckpoint(file, linear_rows(file, "ssm_in", file.tensors["blk.0.ssm_in.weight"]))
    layer = Qwen3NextGatedDeltaNet(CONFIG, 0)
    parts = layer.fix_query_key_value_ordering(whole.t()[None], torch.zeros(1, 8, 2 * HEADS))
    query, key, value, gate = (part.flatten(2)[0].t() for part in parts[:4])
    assert torch.equal(checkpoint.read("in_proj_qkv.weight"), torch.cat((query, key, value)))
    assert torch.equal(checkpoint.read("in_proj_z.weight"), gate)
    assert torch.equal(checkpoint.read_rows("in_proj_z.weight", 30, 41), gate[30:41])


def test_a_matrix_of_other_heads_is_refused(tmp_path: Path) -> None:
    file = joined(tmp_path / "m.gguf", torch.zeros(300, 8))
    with pytest.raises(ModelError, match=r"a layer's ssm_in has 300 rows, by the file's entries it has 448"):
        linear_rows(file, "ssm_in", file.tensors["blk.0.ssm_in.weight"])


def test_heads_in_another_order_within_a_block_stay_in_their_type(tmp_path: Path) -> None:
    """A block of 256 columns holds two heads of values, in another order than transformers'."""
    name = "qwen3_5_moe of wide heads"
    model = gguf_files.model_of(name)
    file = gguf_files.write(tmp_path / "m.gguf", model, name, gguf_files.kinds("q4_k", dense="q6_k"))
    ids = tokens(1, 40)[0].tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    for dtype in (torch.float32, torch.bfloat16):
        engine = engine_of(file, dtype, store=tmp_path / str(dtype))
        found = logits_of(engine, ids)
        engine.close()
        exact = (found - wanted).abs().max() <= 1e-3 * wanted.abs().max()
        assert exact if dtype == torch.float32 else close(found, wanted)
    kept = own_linears(inspect_model(file, str(file), tmp_path / str(torch.bfloat16)), "cpu")
    assert {"model.layers.0.linear_attn.out_proj", "model.layers.0.linear_attn.in_proj_qkv"} <= kept.keys()
