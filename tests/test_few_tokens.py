"""Several sequences decoded together, in few calls: each sequence's values are what it has alone, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import tiermoe
from native_experts import checkpoint, expert_format, expert_views, tokens
from small_engines import OnRoute, logits_of_steps
from tiermoe import native
from tiermoe.batch import Batch, decode, prompt
from tiermoe.engine.expert_sums import Choices, FewSums, NativeSums, TorchSums
from tiermoe.kernels.experts import FusedExperts, combine_many, expert_kernel, weighted_sum
from tiermoe.kernels.gates import gate_named
from tiermoe.kernels.moe_block import MoeBlock
from tiermoe.kernels.norm import norm
from tiermoe.kernels.router import Router, choose, logits_of

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native kernels")

LENGTHS = (9, 4, 7)  # of the prompts
GENERATED = 6


@pytest.fixture
def kernel() -> FusedExperts:
    made = expert_kernel(expert_format(128, 64), gate_named("silu"), "cpu")
    assert isinstance(made, FusedExperts)
    return made


@pytest.mark.parametrize("counts", [[1], [3, 1, 2], [1, 9, 1], [7, 2]])
def test_rows_of_several_experts_are_those_of_a_call_for_each(counts: list[int], kernel: FusedExperts) -> None:
    views, x = [expert_views(128, 64, seed) for seed in range(len(counts))], tokens(sum(counts), 128)
    alone = [kernel(row[None], each) for rows, each in zip(x.split(counts), views, strict=True) for row in rows]
    assert torch.equal(kernel.forward_ragged(x, counts, views), torch.cat(alone))


def test_counts_that_do_not_fit_the_rows_are_refused(kernel: FusedExperts) -> None:
    views, x = [expert_views(128, 64, seed) for seed in range(2)], tokens(3, 128)
    for counts in ([1, 1], [3], [2, 2]):
        with pytest.raises(ValueError, match="counts"):
            kernel.forward_ragged(x, counts, views)


@pytest.mark.parametrize("count", [1, 70, 200])
def test_sums_of_many_tokens_are_each_token_s_sum(count: int) -> None:
    """Some choices have no output: they add nothing."""
    rows, weights = tokens(4 * count, 96), torch.rand(count, 4)
    there = torch.rand(count, 4) < 0.7
    there[0] = False
    addresses = torch.where(there, rows.data_ptr() + 192 * torch.arange(4 * count).view(count, 4), 0)
    got = combine_many(addresses, weights, 96)
    for token in range(count):
        chosen = there[token].nonzero()[:, 0].tolist()
        want = weighted_sum(list(rows[4 * token : 4 * token + 4][chosen]), weights[token], chosen) if chosen else 0
        assert torch.equal(got[token], torch.zeros(96).bfloat16() if isinstance(want, int) else want[0])


@pytest.mark.parametrize("tokens_of_first", [0, 3, 9])
def test_sums_in_lists_native_and_torchs_agree_bit_for_bit(tokens_of_first: int) -> None:
    """Choices that name no expert, an expert that is named twice, and one whose outputs never come."""
    generator = torch.Generator().manual_seed(5)
    index = torch.stack([torch.randperm(7, generator=generator)[:3] for _ in range(9)])  # 6 names none of the experts
    weights, hidden = torch.rand(9, 3, generator=generator), tokens(9, 96)
    index[:tokens_of_first][index[:tokens_of_first] == 6] = 5
    choices = Choices(index, weights)
    few = FewSums(hidden, index.tolist(), weights, native=True)
    sums = [few, NativeSums(choices, hidden), TorchSums(choices, hidden)]
    assert few.counts([99]) == choices.counts([99]) == [0]
    for some in ([5, 0], [3], [1, 4]):  # in any order, several at a time
        for each in sums:
            parts = torch.split(each.rows(some), each.counts(some))
            each.keep(some, torch.cat([part * (expert + 0.5) for expert, part in zip(some, parts, strict=True)]))
    totals = [each.total() for each in sums]
    assert torch.equal(totals[0], totals[2])
    assert torch.equal(totals[1], totals[2])
    assert totals[2].any()


@pytest.mark.parametrize("count", [2, 5, 12])
def test_a_block_of_several_tokens_is_each_token_s_block(count: int, kernel: FusedExperts) -> None:
    router, x, residual = tokens(5, 128, 3), tokens(count, 128)[:, None], tokens(count, 128, 2)[:, None]
    block, chooser = MoeBlock(kernel.native, 5), Router(router, 2, normalise=True)
    got, alone = torch.empty_like(x), torch.empty_like(x)
    views = [expert_views(128, 64, seed) for seed in range(5)]  # alive as long as the block
    for expert in range(4):
        block.place(expert, kernel.packed(views[expert]))
    _, chosen = choose(logits_of(router, x), 2, normalise=True)
    if 4 in chosen.tolist():
        assert not block(chooser, x, residual, got)
    block.place(4, kernel.packed(views[4]))
    assert block(chooser, x, residual, got) == len(set(chosen.flatten().tolist()))
    for at in range(count):
        block(chooser, x[at : at + 1], residual[at : at + 1], alone[at : at + 1])
    assert torch.equal(got, alone)


def test_routers_and_norms_take_tokens_one_by_one() -> None:
    x, weight = tokens(6, 96), tokens(9, 96, 5)
    logits = logits_of(weight, x)
    assert torch.equal(logits, torch.cat([logits_of(weight, row[None]) for row in x]))
    weights, experts = choose(logits, 4, True)
    alone = [choose(row[None], 4, True) for row in logits]
    assert torch.equal(weights, torch.cat([each for each, _ in alone]))
    assert torch.equal(experts, torch.cat([each for _, each in alone]))
    for rows in (x, x.repeat(300, 1)):  # in one task, and in several
        assert torch.equal(norm(rows, weight[0], 1e-6), torch.stack([norm(row, weight[0], 1e-6) for row in rows]))


@pytest.fixture(scope="module", params=["100%", "25%"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    # of sums of three and more the order shows
    directory = checkpoint(tmp_path_factory.mktemp("qwen"), "qwen3_moe", num_experts_per_tok=4)
    loaded, _ = tiermoe.load(
        directory, memory="4GiB", bits=4, dense_bits=4, cache=request.param, preset="lru", context=128
    )
    yield loaded
    loaded.tiermoe.close()


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 128, (1, length), generator=generator) for length in LENGTHS]


def test_a_sequence_has_the_same_logits_alone_and_beside_others(model: Any) -> None:
    engine = model.tiermoe
    coming = torch.randint(3, 128, (len(LENGTHS), GENERATED), generator=torch.Generator().manual_seed(3)).tolist()
    sequences = [[*ids[0].tolist(), *rest] for ids, rest in zip(prompts(), coming, strict=True)]
    alone = [logits_of_steps(engine, ids, length)[1:] for ids, length in zip(sequences, LENGTHS, strict=True)]
    cache = engine.new_cache(len(LENGTHS))
    slabs = [cache.open() for _ in LENGTHS]
    for slab, ids, length in zip(slabs, sequences, LENGTHS, strict=True):
        engine.step(Batch((prompt(slab, ids[:length]),)), cache)
    for step in range(GENERATED):
        rows = [
            decode(slab, length + step, ids[length + step])
            for slab, ids, length in zip(slabs, sequences, LENGTHS, strict=True)
        ]
        got = engine.step(Batch(tuple(rows)), cache)
        assert torch.equal(got, torch.stack([each[step] for each in alone]))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_padded_batch_agrees_with_transformers_code(family: str, tmp_path: Path) -> None:
    loaded, _ = tiermoe.load(checkpoint(tmp_path, family), memory="4GiB", bits=4, dense_bits=4)
    ids = torch.randint(3, 128, (3, 20), generator=torch.Generator().manual_seed(4))
    mask = (torch.arange(20)[None] >= torch.tensor([[0], [5], [2]])).long()

    def steps(cache: Any) -> torch.Tensor:
        at = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            first = loaded(
                ids[:, :8], attention_mask=mask[:, :8], position_ids=at[:, :8], past_key_values=cache, use_cache=True
            )
            cache = first.past_key_values
            rest = [
                loaded(
                    ids[:, end - 1 : end], attention_mask=mask[:, :end], position_ids=at[:, end - 1 : end],
                    past_key_values=cache,
                ).logits[:, -1]
                for end in range(9, 21)
            ]  # fmt: skip
        return torch.stack([first.logits[:, -1], *rest])

    fast, own = steps(None), steps(DynamicCache(config=loaded.config))
    loaded.tiermoe.close()
    error = (fast.float() - own.float()).norm(dim=-1) / own.float().norm(dim=-1)
    assert error.median() < 0.03  # a router may decide a near tie otherwise: single tokens may differ more


def test_few_tokens_are_computed_as_many_are(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short prompt's experts in few native calls, and in a call each."""
    ids = prompts()[0].repeat(3, 1)
    model.tiermoe.observe(OnRoute(lambda *_: None))  # a block whose experts have all come would be one call
    with torch.no_grad():
        few = model(ids).logits
        monkeypatch.setattr("tiermoe.engine.moe_layer.FEW_TOKENS", 1)
        monkeypatch.setattr("tiermoe.engine.expert_sums.FEW_TOKENS", 1)
        many = model(ids).logits
    model.tiermoe.observe(None)
    assert torch.equal(few, many)
