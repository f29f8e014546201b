"""Our own decoders on native kernels against transformers' code on the same packed weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from native_experts import checkpoint
from small_engines import logits_of_steps
from tiermoe import native
from tiermoe.model.attention.linear import GatedDelta

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native kernels")

_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {}, "olmoe": {}, "glm4_moe": {}, "hunyuan_v1_moe": {}, "minimax_m3_vl_text": {},
    "gpt_oss": {"sliding_window": 12},
    "mimo_v2_flash": {"num_key_value_heads": 2, "head_dim": 64, "v_head_dim": 32, "sliding_window": 12},
    "deepseek_v2": {**_LATENT, "head_dim": 64, "q_lora_rank": None},
    "deepseek_v32": {**_LATENT, "q_lora_rank": 64, "index_head_dim": 128, "index_topk": 12},
    "granitemoehybrid": {"mamba_n_heads": 16}, "nemotron_h": {"moe_latent_size": 64},
    "kimi_linear": {**_LATENT, "linear_head_dim": 32},
}  # fmt: skip
"""Families whose attention or experts the kernels take, with what their configs differ in: biases, norms of heads and
of whole rows, before and after a part of the columns is turned; blocks that are chosen; sinks and windows; values
narrower than keys; latents, all and chosen; Mamba, linear attention. The other families call the same kernels."""

WITH_MAMBA = ("granitemoehybrid", "nemotron_h")

KINDS = ("qwen2_moe", "gpt_oss", "deepseek_v2")
"""Under every instruction set: grouped heads, sinks and windows, latents."""

SETS = native.instruction_sets()
CASES = [(name, family) for name in SETS for family in FAMILIES if name == SETS[0] or family in KINDS]


@pytest.fixture(params=CASES, ids="-".join)
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every family under the best instruction set of this machine, one of each attention under the others."""
    name, family = request.param
    before = native.instruction_set()
    assert before is not None
    native.use(name)
    yield family
    native.use(before)


def test_decoding_agrees_with_transformers_code_on_the_same_packed_weights(family: str, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, family, **FAMILIES[family])
    ids = torch.randint(3, 128, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    for decoder in ("auto", "generic"):
        model, _ = tiermoe.load(directory, memory="4GiB", bits=4, dense_bits=4, decoder=decoder)
        engine = model.tiermoe
        if decoder == "auto" and family not in WITH_MAMBA:
            layers = engine.decoder.layers
            assert all(each.fused_attention or isinstance(each.attention, GatedDelta) for each in layers)
        found.append(logits_of_steps(engine, ids, 6).float())
        engine.close()
    fast, own = found
    error = (fast - own).norm(dim=-1) / own.norm(dim=-1)
    # activations of 8 bits, and a router may decide a near tie otherwise: single tokens may differ more
    assert error.median() < 0.1
