"""Attention to positions that an indexer chooses, against transformers' eager code and in other company."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from native_experts import checkpoint
from small_engines import alone, engine_of, tokens
from tiermoe import native
from tiermoe.batch import Batch, decode, prompt, verify
from tiermoe.model.attention.latent import PIECE
from tiermoe.model.decoder import decoder_for
from tiermoe.model.families import not_computed
from tiermoe.model.hf.configs import Configs
from tiermoe.model.rotary import rotary_of
from tiermoe.model.step import Step
from tiermoe.model.weights import ModuleWeights
from tiny import auto_class, config_of, make_random, oracle, write

MOST = 12
NATIVE = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
    "q_lora_rank": 64, "index_head_dim": 128, "index_topk": MOST, "intermediate_size": 128,
}  # fmt: skip
"""Sizes that the native kernels take."""
ONE = {"num_hidden_layers": 1, "indexer_types": ["full"], "mlp_layer_types": ["dense"]}
"""Of a model of one layer."""


GROUPS = "minimax_m3_vl_text"
CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v32", {"index_topk": 6}),
    ("deepseek_v32", {"index_topk": 64}),
    ("glm_moe_dsa", {"index_topk": 6}),
    ("hy_v4", {"index_topk": 6}),
    ("hy_v4", {"index_topk": 64, "indexer_types": ["full", "full", "shared"]}),
    ("glm5_next_text", {"index_topk": 6, "index_kpool": 3}),
    ("glm5_next_text", {"index_topk": 64, "linear_lower_bound": None}),
    (GROUPS, {}),
    (GROUPS, {"index_block_size": 3, "index_topk_blocks": 3, "index_local_blocks": 2}),
    (GROUPS, {"index_topk_blocks": 64}),
]


@pytest.mark.parametrize(("family", "changes"), CHOICES)
def test_chunks_and_tokens_alone_agree_with_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A prompt in chunks of 5, tokens that are verified and decoded after it; in a context that is longer than what is
    chosen, and in one that is not."""
    directory = write(tmp_path, family, torch.float32, **changes)
    engine = engine_of(directory, bits=16, dense_bits=16, chunk=5, context=32)
    ids = tokens(18)
    cache = engine.new_cache()
    slab = cache.open()
    rows = [prompt(slab, ids[:12]), verify(slab, 12, ids[12:15]), *(decode(slab, at, ids[at]) for at in range(15, 18))]
    mine = torch.cat([engine.step(Batch((row,)), cache, every=True) for row in rows])
    engine.close()
    with torch.no_grad():
        theirs = oracle(tmp_path, family, torch.float32)(torch.tensor([ids])).logits[0]
    assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("chunk", [5, 32])
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "hy_v4"])
def test_a_prompt_with_equal_scores_is_what_transformers_gives_one_by_one(
    family: str, chunk: int, tmp_path: Path
) -> None:
    """With two heads a quarter of the scores are 0. Which of them `torch.topk` finds depends on a row's length, and in
    a prompt transformers' rows have all its positions: its own logits differ between a prompt and its tokens."""
    directory = write(tmp_path, family, torch.float32, index_topk=8, index_n_heads=2)
    plain, ids = oracle(directory, family, torch.float32), tokens(24)
    kept, one_by_one = DynamicCache(config=plain.config), []
    with torch.no_grad():
        whole = plain(torch.tensor([ids])).logits[0]
        for each in ids:
            one_by_one.append(plain(torch.tensor([[each]]), past_key_values=kept, use_cache=True).logits[0])
    want = torch.cat(one_by_one)
    assert (whole[:8] - want[:8]).abs().max() <= 1e-5 * want.abs().max()
    assert (whole - want).abs().max() > 1e-2 * want.abs().max()
    engine = engine_of(directory, bits=16, dense_bits=16, chunk=chunk, context=32)
    cache = engine.new_cache()
    mine = engine.step(Batch((prompt(cache.open(), ids),)), cache, every=True)
    engine.close()
    assert (mine - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "hy_v4"])
def test_of_equal_scores_the_same_are_chosen_as_where_transformers_decodes(family: str) -> None:
    """With one head, half of a token's scores are 0, and where its weight is negative those are the largest."""
    config = config_of(family, **{**ONE, "index_n_heads": 1, "index_topk": 5})
    plain = Configs(config, config, False).plain()
    torch.manual_seed(0)
    model = auto_class(family).from_config(config, dtype=torch.float32).eval()
    make_random(model)
    attention, length = model.model.layers[0].self_attn, 40
    x, kept, chosen = torch.randn(length, config.hidden_size), DynamicCache(config=config), []
    with torch.no_grad():
        narrow = attention.q_a_layernorm(attention.q_a_proj(x))
        for at in range(length):
            turns = model.model.rotary_emb(x[None], position_ids=torch.tensor([[at]]))
            its = slice(at, at + 1)
            mask = torch.zeros(1, 1, at + 1)
            found = attention.indexer(x[None, its], narrow[None, its], turns, mask, None, past_key_values=kept)
            chosen.append(sorted(found[0, 0].tolist()))
        decoder = decoder_for(plain, ModuleWeights(model), torch.float32)
        rotary = rotary_of(plain, config.qk_rope_head_dim, torch.float32)
        assert decoder is not None
        assert rotary is not None
        cache = decoder.new_cache(1, length, length)
        step = Step(Batch((prompt(cache.open(), range(length)),)), cache, rotary)
        indexer = decoder.layers[0].indexer
        assert indexer is not None
        indexer(x, 0, step)
    assert step.chosen is not None
    assert [each[: at + 1].tolist() for at, each in enumerate(step.chosen)] == chosen


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """At 4 bits, on native kernels."""
    if not native.available():
        pytest.skip("needs the native kernels")
    directory = checkpoint(tmp_path_factory.mktemp("sparse"), request.param, **NATIVE)
    made = engine_of(directory, bits=4, dense_bits=4, context=128)
    assert made.decoder.batch_invariant
    yield made
    made.close()


def test_tokens_have_the_bits_that_each_has_alone(engine: Any, tmp_path: Path) -> None:
    """Verified at once, beside a sequence that is shorter than what is chosen, in a fork and in a sequence that was
    saved."""
    ids, short = tokens(50), tokens(MOST - 2, seed=2)
    want, theirs = alone(engine, ids, 8), alone(engine, short, len(short) - 1)
    cache = engine.new_cache(4)
    slab, other = cache.open(), cache.open()
    engine.step(Batch((prompt(slab, ids[:8]),)), cache)
    assert torch.equal(engine.step(Batch((verify(slab, 8, ids[8:]),)), cache, every=True), want)
    engine.step(Batch((prompt(other, short[:-1]),)), cache)
    cache.crop(slab, 40)
    fork = cache.fork(slab)
    cache.save(slab, tmp_path / "sequence")
    both = Batch((decode(slab, 40, ids[40]), decode(other, len(short) - 1, short[-1])))
    assert torch.equal(engine.step(both, cache), torch.cat((want[32:33], theirs)))
    for each in (fork, cache.load(tmp_path / "sequence")):
        assert torch.equal(engine.step(Batch((decode(each, 40, ids[40]),)), cache), want[32:33])


def test_a_long_prompt_is_near_its_tokens_read_one_by_one(engine: Any) -> None:
    """More tokens than the kernel for few takes, of which some attend to all before them."""
    ids = tokens(100)
    cache = engine.new_cache()
    found = engine.step(Batch((prompt(cache.open(), ids),)), cache, every=True)
    want = alone(engine, ids, 1)
    error = (found[1:] - want).float().norm(dim=-1) / want.float().norm(dim=-1)
    assert error.median() < 0.1  # routers and indexers may decide near ties otherwise


@pytest.mark.parametrize(
    ("family", "sizes"), [(GROUPS, {"index_block_size": 4, "index_topk_blocks": 2}), ("hy_v4", {"index_topk": 8})]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_choose_beside_shorter_sequences(
    dtype: torch.dtype, family: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """A long sequence, a fork of it, and one that attends to all of its positions."""
    engine = engine_of(write(tmp_path, family, dtype, **sizes), bits=16, dense_bits=16, context=64)
    long, short = tokens(30, seed=6), tokens(6, seed=7)  # of which no router decides a near tie
    cache = engine.new_cache(3)
    one = cache.open()
    engine.step(Batch((prompt(one, long[:28]),)), cache)
    two, three = cache.fork(one), cache.open()
    engine.step(Batch((decode(one, 28, long[28]), decode(two, 28, 5), prompt(three, short[:5]))), cache)
    found = engine.step(Batch((decode(one, 29, long[29]), decode(two, 29, 6), decode(three, 5, short[5]))), cache)
    engine.close()
    plain = oracle(tmp_path, family, dtype)
    for logits, ids in zip(found, (long, [*long[:28], 5, 6], short), strict=True):
        with torch.no_grad():
            want = plain(torch.tensor([ids])).logits[0, -1]
        assert (logits - want).norm() < (1e-5 if dtype == torch.float32 else 0.1) * want.norm()


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
@torch.no_grad()
def test_sinks_join_latents_in_the_native_kernel() -> None:
    """Of a prompt longer than a piece and of tokens behind it, against transformers' attention in float32."""
    count, prompts = PIECE + 40, PIECE + 30
    config = config_of("hy_v4", **{**NATIVE, **ONE, "index_topk": count, "hidden_size": 128})
    torch.manual_seed(0)
    model = auto_class("hy_v4").from_config(config, dtype=torch.float32).eval()
    make_random(model)
    theirs = model.model.layers[0].self_attn
    theirs.sinks.copy_(torch.tensor([8.0, 6.3, -2.0, 1.1]))  # among a thousand keys they count
    x = torch.randn(count, config.hidden_size)
    turns = model.model.rotary_emb(x[None], position_ids=torch.arange(count)[None])
    mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
    want = theirs(x[None], turns, mask)[0][0]
    plain = Configs(config, config, False).plain()
    decoder = decoder_for(plain, ModuleWeights(model.bfloat16()), torch.bfloat16)
    assert decoder is not None
    cache, found = decoder.new_cache(1, count, count), []
    slab, rotary = cache.open(), rotary_of(plain, config.qk_rope_head_dim, torch.bfloat16)
    assert rotary is not None
    for begin, end in ((0, prompts), (prompts, count)):
        cache.begin_write(slab, end)
        step = Step(Batch((prompt(slab, range(end - begin), begin),)), cache, rotary)
        found.append(decoder.layers[0].attention(x[begin:end].bfloat16(), 0, step))
        cache.end_write(slab, end)
    assert (torch.cat(found) - want).norm() < 0.02 * want.norm()


def test_indexers_of_other_groups_are_left_to_transformers_code() -> None:
    written = config_of(GROUPS, index_n_heads=4)
    config = Configs(written, written, False).plain()
    assert not_computed(config) == "an indexer of other groups of heads than share keys and values"
