"""A widened checkpoint computes the function of the original."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.widen import widen
from tiny import oracle, write


def outputs(directory: Path, dtype: torch.dtype, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (T, vocabulary) and router logits (layers, T, experts), both float32."""
    model = oracle(directory, "qwen3_moe", dtype)
    with torch.inference_mode():
        out = model(ids, output_router_logits=True)
    return out.logits[0].float(), torch.stack(out.router_logits).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("m", "mi"), [(2, 2), (4, 1)])
def test_same_routing_and_logits(tmp_path: Path, dtype: torch.dtype, m: int, mi: int) -> None:
    source = write(tmp_path / "source", "qwen3_moe", torch.bfloat16, shard="200KB", norm_topk_prob=True)
    assert (source / "model.safetensors.index.json").exists()
    widen(source, tmp_path / "wide", m, mi)
    ids = torch.arange(40)[None] * 7 % 128
    logits, router = outputs(source, dtype, ids)
    wide_logits, wide_router = outputs(tmp_path / "wide", dtype, ids)
    tolerance = 1e-4 if dtype is torch.float32 else 0.06 * logits.abs().max().item()
    torch.testing.assert_close(wide_logits, logits, atol=tolerance, rtol=0)
    if dtype is torch.float32:
        assert torch.equal(wide_router.topk(3).indices, router.topk(3).indices)


def test_the_shipped_model_whose_output_layer_is_its_embedding(shipped: Path, tmp_path: Path) -> None:
    widen(shipped, tmp_path, 2, 2)
    ids = torch.arange(64)[None] * 61 % 4096
    logits, router = outputs(shipped, torch.float32, ids)
    wide_logits, wide_router = outputs(tmp_path, torch.float32, ids)
    torch.testing.assert_close(wide_logits, logits, atol=1e-3, rtol=0)
    assert torch.equal(wide_router.topk(4).indices, router.topk(4).indices)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["hidden_size"], config["moe_intermediate_size"]) == (256, 128)
    assert (tmp_path / "tokenizer.json").read_bytes() == (shipped / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("changes", "m", "message"),
    [
        ({}, 3, "not a power of two"),
        ({"model_type": "mixtral"}, 2, "'mixtral'"),
        ({"mlp_only_layers": [0]}, 2, "mixture of experts"),
        ({"attention_bias": True}, 2, "biases"),
    ],
)
def test_what_would_change_the_function_is_refused(
    shipped: Path, tmp_path: Path, changes: dict[str, object], m: int, message: str
) -> None:
    config = json.loads((shipped / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=message):
        widen(tmp_path, tmp_path / "wide", m, m)
    assert not (tmp_path / "wide").exists()
