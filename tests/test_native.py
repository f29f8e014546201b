"""Our own CPU kernels against decoded weights in float64, torch's operations and transformers' own forwards."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import tiermoe
from native_experts import Block, checkpoint, expert_format, expert_views, packed, tokens
from small_engines import OnRoute, logits_of_steps
from tiermoe import native
from tiermoe.formats.encoding import Encoding
from tiermoe.kernels.experts import FusedExperts, UnfusedExperts, expert_kernel, weighted_sum
from tiermoe.kernels.gates import gate_named
from tiermoe.kernels.linear import linear
from tiermoe.kernels.matrix import matrix_form
from tiermoe.kernels.router import Router, choose, logits_of

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="needs the native kernels"),
    pytest.mark.usefixtures("instruction_set"),
]

ROUNDING = 2.0**-8  # the most that rounding to bfloat16 changes a value, relative


def product(x: torch.Tensor, encoding: Encoding, fields: dict[str, torch.Tensor], out: int) -> torch.Tensor:
    """The native product with a matrix (out, in_) in an encoding."""
    form = matrix_form(encoding, out, x.shape[1], torch.bfloat16)
    assert form is not None
    return linear(x, form, fields)


def test_calls_from_several_threads_at_once(one_thread: None) -> None:
    encoding, fields = packed(512, 256, 64)
    x = tokens(1, 256)
    want = product(x, encoding, fields, 512)

    def many(_: int) -> bool:
        torch.set_num_threads(3)
        return all(torch.equal(product(x, encoding, fields, 512), want) for _ in range(300))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(many, range(4)))


def test_a_forked_process_computes_too(one_thread: None) -> None:
    encoding, fields = packed(256, 128, 64)
    x = tokens(1, 128)
    torch.set_num_threads(2)
    want = product(x, encoding, fields, 256)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(product(x, encoding, fields, 256), want) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_threads_that_slept_come_back(one_thread: None) -> None:
    encoding, fields = packed(256, 128, 64)
    x = tokens(1, 128)
    torch.set_num_threads(4)
    want = product(x, encoding, fields, 256)
    for pause in (0.0, 0.001, 0.01, 0.05):
        time.sleep(pause)
        assert torch.equal(product(x, encoding, fields, 256), want)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 70])
def test_an_expert_in_one_call_is_its_separate_steps(count: int) -> None:
    form = expert_format(128, 192)
    one_call, separate = expert_kernel(form, gate_named("silu"), "cpu"), UnfusedExperts(form, gate_named("silu"), "cpu")
    assert type(one_call) is not type(separate)
    views, x = expert_views(128, 192, 0), tokens(count, 128) * 3
    got, want = one_call(x, views).float(), separate(x, views).float()
    # the inner values may differ in their last bit, where two ways to compute e^x do
    assert (got - want).norm() <= ROUNDING * want.norm()
    assert (got == want).float().mean() > 0.9


def test_large_and_small_gates() -> None:
    form = expert_format(64, 64)
    views = expert_views(64, 64, 0)
    for scale in (1e-3, 1e3, 1e18):
        x = tokens(3, 64) * scale
        got = expert_kernel(form, gate_named("silu"), "cpu")(x, views)
        assert torch.allclose(
            got, UnfusedExperts(form, gate_named("silu"), "cpu")(x, views), rtol=0.05, atol=0.05 * scale * scale
        )
        assert got.isfinite().all()


def test_experts_computed_together_give_what_each_gives_alone() -> None:
    kernel = expert_kernel(expert_format(128, 64), gate_named("silu"), "cpu")
    views, x = [expert_views(128, 64, seed) for seed in range(5)], tokens(1, 128)
    alone = torch.cat([kernel(x, each) for each in views])
    for order in ([0, 1, 2, 3, 4], [4, 2], [3]):
        assert torch.equal(kernel.forward_one(x, [views[at] for at in order]), alone[order])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_in_one_call_is_its_separate_calls_and_waits_for_all_its_experts(dtype: torch.dtype) -> None:
    kernel = expert_kernel(expert_format(128, 64), gate_named("silu"), "cpu")
    assert isinstance(kernel, FusedExperts)
    views = [expert_views(128, 64, seed) for seed in range(5)]
    router, x, residual = tokens(5, 128, 3), tokens(1, 128)[None], tokens(1, 128, 2)[None]
    weights, chosen = choose(logits_of(router, x), 3, normalise=True)
    order = chosen[0].argsort().tolist()
    outputs = list(kernel.forward_one(x[0], [views[chosen[0, at]] for at in order]))
    want = residual + weighted_sum(outputs, weights[0].to(dtype), order)
    block, got = Block(kernel, 5), torch.empty_like(x)
    for expert in chosen[0].tolist():
        assert not block(Router(router, 3, normalise=True, dtype=dtype), x, residual, got)
        block.place(expert, kernel.packed(views[expert]))
    assert block(Router(router, 3, normalise=True, dtype=dtype), x, residual, got) == 3
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_weighted_sum_is_torchs_bit_for_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, weights = list(tokens(5, 96)), torch.rand(7).to(dtype)
    got = weighted_sum(outputs, weights, [6, 0, 3, 2, 1])
    monkeypatch.setattr("tiermoe.kernels.experts.combines", lambda _: False)
    assert torch.equal(got, weighted_sum(outputs, weights, [6, 0, 3, 2, 1]))


def test_a_router_takes_the_largest_and_of_equal_ones_the_first() -> None:
    logits = torch.tensor([[0.5, 2.0, -1.0, 2.0, 2.0, 0.5]]).bfloat16()
    weights, experts = choose(logits, 4, normalise=False)
    assert experts.tolist() == [[1, 3, 4, 0]]
    assert torch.allclose(weights, logits.float().softmax(-1)[0, experts[0]][None])
    normalised, _ = choose(logits, 4, normalise=True)
    assert torch.allclose(normalised, weights / weights.sum())


def test_router_logits_are_the_product_rounded() -> None:
    weight, x = tokens(9, 96, 5), tokens(1, 96, 6)
    exact = x.double() @ weight.double().t()
    assert torch.allclose(logits_of(weight, x).double(), exact, rtol=ROUNDING, atol=1e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, instruction_set: str) -> Iterator[Any]:
    directory = checkpoint(tmp_path_factory.mktemp("qwen"), "qwen3_moe")
    loaded, _ = tiermoe.load(directory, memory="4GiB", bits=4, dense_bits=4)
    yield loaded
    loaded.tiermoe.close()


IDS = torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(1))
LISTED = IDS[0].tolist()


def test_whatever_else_is_asked_for_goes_through_transformers(model: Any) -> None:
    with torch.no_grad():
        own = model(IDS[:, :8]).logits
        cache = DynamicCache(config=model.config)
        grown = [model(IDS[:, :6], past_key_values=cache), model(IDS[:, 6:7], past_key_values=cache)]
        asked = model(IDS[:, 7:8], past_key_values=cache, output_hidden_states=True)
    assert len(asked.hidden_states) == model.config.num_hidden_layers + 1
    theirs = torch.cat([each.logits for each in (*grown, asked)], dim=1)
    assert torch.allclose(own.float(), theirs.float(), rtol=0.1, atol=0.1)


def test_a_decoders_cache_with_a_question_for_transformers_is_refused(model: Any) -> None:
    with torch.no_grad():
        cache = model(IDS[:, :6], use_cache=True).past_key_values
        with pytest.raises(tiermoe.ConfigError, match="DynamicCache"):
            model(IDS[:, 6:7], past_key_values=cache, output_attentions=True)


def test_batches_masks_and_beams_as_transformers_cache_gives_them(model: Any) -> None:
    rows = IDS.view(2, 20)[:, :10]
    for options in ({"num_beams": 3}, {"do_sample": False}, {"prompt_lookup_num_tokens": 3}):
        ids = rows[:1] if "prompt_lookup_num_tokens" in options else rows
        fast = model.generate(ids, max_new_tokens=12, **options)
        assert fast.shape[1] <= 22
        assert torch.equal(fast, model.generate(ids, max_new_tokens=12, **options))


@pytest.mark.parametrize("cache", ["13%", "30%", "60%"])
def test_bits_do_not_depend_on_the_cache(cache: str, tmp_path: Path, model: Any) -> None:
    smaller, _ = tiermoe.load(
        checkpoint(tmp_path, "qwen3_moe"), memory="4GiB", bits=4, dense_bits=4, cache=cache, preset="lru"
    )
    got = logits_of_steps(smaller.tiermoe, LISTED, 6)
    assert smaller.tiermoe.stats()["expert_misses"] > 24  # something was evicted and read again
    smaller.tiermoe.close()
    assert torch.equal(got, logits_of_steps(model.tiermoe, LISTED, 6))


def test_settled_experts_count_as_hits_and_observers_see_them(model: Any) -> None:
    engine = model.tiermoe
    logits_of_steps(engine, LISTED, 6)
    seen: list[int] = []
    before = engine.snapshot()
    want = logits_of_steps(engine, LISTED, 6)
    middle = engine.snapshot()
    engine.observe(OnRoute(lambda routed, _: seen.append(routed.layer)))
    observed = logits_of_steps(engine, LISTED, 6)
    engine.observe(None)
    first, second = middle.since(before).counts, engine.snapshot().since(middle).counts
    assert (first.hits, first.misses) == (second.hits, 0)
    assert len(seen) == 3 * (1 + len(LISTED) - 6)
    assert torch.equal(observed, want)  # the observed way takes the separate calls


def test_the_switch_keeps_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    monkeypatch.delenv(native.ISA, raising=False)
    native.available.cache_clear()
    try:
        assert not native.takes(torch.bfloat16, "INT4", 64, 64, 64)
        assert isinstance(expert_kernel(expert_format(64, 64), gate_named("silu"), "cpu"), UnfusedExperts)
    finally:
        monkeypatch.undo()
        native.available.cache_clear()
    assert native.available()
