"""A row's bits depend on nothing but the row: the same logits in each of `engine.ways`, for all kinds of weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gguf_engines
import gguf_files
from gguf_files import Kinds, kinds
from native_experts import checkpoint
from small_engines import engine_of, tokens
from tiermoe import native
from tiermoe.engine.ways import Ways
from tiermoe.model.parts import RootMeanSquare
from tiermoe.model.streams import BalancedConnection, StreamProducts

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native kernels")

GIVEN, AFTER = 150, 8  # tokens of the prompt, and of what comes after them one by one
SHIPPED = Path(__file__).parent.parent / "models" / "stories-7m"
LATENT = {
    "kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 64,
    "num_key_value_heads": 4, "index_head_dim": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {}, "gpt_oss": {"sliding_window": 12}, "glm4_moe": {}, "llama4_text": {}, "ernie4_5_moe": {},
    "qwen3_next": {}, "lfm2_moe": {}, "kimi_linear": {**LATENT, "linear_head_dim": 32}, "deepseek_v3": LATENT,
    "deepseek_v32": {**LATENT, "index_topk": 64}, "mistral4": LATENT, "minimax_m3_vl_text": {"index_topk_blocks": 4},
    "kolibri1": {}, "phimoe": {}, "gemma4_text": {"intermediate_size": 192},
    "glm5_next_text": {**LATENT, "qk_rope_head_dim": 0, "index_topk": 64, "hc_mult": 4, "linear_head_dim": 32},
    "hy_v4": {**LATENT, "index_topk": 64, "index_n_heads": 64},
    "deepseek_v4": {**LATENT, "head_dim": 64, "o_lora_rank": 64, "index_n_heads": 64, "index_topk": 8},
    "granitemoehybrid": {"mamba_n_heads": 16, "shared_intermediate_size": 64},
    "nemotron_h": {"moe_latent_size": 64, "moe_shared_expert_intermediate_size": 64},
    "jamba": {"mamba_dt_rank": 64},
}  # fmt: skip
"""Norms of heads; sinks and windows; a dense layer and a shared expert; chunks and rotation in float32; a router in
float32; linear attention and Mamba of two kinds each, short convolutions; latents, of positions that an indexer chooses
too; temperatures; blocks of positions; routers with rules of their own; GELU; entries and pools of positions; streams
that are weighed in float32, with mixtures and without."""
FILES: dict[str, Kinds] = {
    "a file of Q4_K and Q6_K": kinds("q4_k", "q6_k", "q5_k"),
    "a file of IQ2_S and IQ3_S": kinds("iq2_s", "iq3_s", "iq4_xs"),
    "a file of MXFP4 and Q8_0": kinds("mxfp4", "q5_0", "q8_0"),
}
"""Types of experts' first matrices, of the second ones, and of dense layers."""
CASES = ["shipped, 4 bits", "shipped, 2 bits", "shipped, 8 bits", "shipped, 16 bits", *FAMILIES, *FILES]


def engine_for(name: str, folder: Path) -> Any:
    if name in FILES:
        file = gguf_files.write(
            folder / "m.gguf",
            gguf_files.model_of("qwen3_moe, wide"),
            "qwen3_moe, wide",
            FILES[name],
            context_length=512,
        )
        return gguf_engines.engine_of(file, torch.bfloat16, store=folder / "store", context=200, batch=3)
    directory, bits = SHIPPED, 4
    if name in FAMILIES:
        directory = checkpoint(folder, name, max_position_embeddings=512, **FAMILIES[name])
    else:
        bits = int(name.split()[1])
    return engine_of(directory, context=200, batch=3, bits=bits, dense_bits=max(bits, 4))


@pytest.fixture(params=CASES)
def ways(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ways]:
    engine = engine_for(request.param, tmp_path)
    yield Ways(engine, tokens(GIVEN + AFTER), GIVEN)
    engine.close()


def test_logits_have_the_same_bits_however_the_tokens_come(ways: Ways) -> None:
    whole, each = ways.whole(), ways.all()
    assert len(each) >= 15
    assert len(whole) == GIVEN + AFTER
    assert not {way.name: found for way in each if not way.left_out and (found := way.differing(whole))}
    assert {way.name for way in each if way.left_out} <= {"on another instruction set"}


@pytest.mark.parametrize("iterations", [0, 3], ids=["independent", "mixed"])
@pytest.mark.parametrize("streams", [3, 4])
def test_what_a_part_reads_of_streams_does_not_depend_on_other_tokens(streams: int, iterations: int) -> None:
    random = torch.Generator().manual_seed(streams)
    rows, norm = streams * (2 + streams if iterations else 2), RootMeanSquare(torch.ones(64).bfloat16(), 1e-5)
    weight = torch.randn(rows, streams * 64, generator=random)
    products = StreamProducts(weight, 1e-5, torch.bfloat16)
    bias, scales = torch.randn(rows, generator=random), torch.randn(3 if iterations else 2, generator=random)
    connection = BalancedConnection(products, bias, scales, 1e-6, iterations, 2.0, norm)
    x = torch.randn(301, streams, 64, generator=random).bfloat16()
    assert connection.batch_invariant
    for some in (1, 2, 7, 64):
        parts = zip(*(connection(each) for each in torch.split(x, some)), strict=True)
        for found, whole in zip(parts, connection(x), strict=True):
            assert torch.equal(torch.cat(found), whole)
    normed = torch.nn.functional.rms_norm(x.flatten(1).double(), (streams * 64,), eps=1e-5)
    assert torch.allclose(products(x).double(), normed @ weight.double().t(), rtol=1e-5, atol=1e-4)
