"""Our own CPU kernels against decoded weights in float64, torch's operations and transformers' own forwards."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import tiermoe
from tests import tiny
from tiermoe import native
from tiermoe.kernels.expert import InOneCall, SeparateSteps, SlotViews, expert_kernel, silu_gate, weighted_sum
from tiermoe.kernels.native.linear import linear
from tiermoe.kernels.native.moe_block import MoeBlock
from tiermoe.kernels.native.router import choose, logits_of
from tiermoe.quant.encodings import cpu_layout
from tiermoe.quant.int4 import Int4
from tiermoe.quant.ladders import widen
from tiermoe.quant.quantizers import QUANTIZERS
from tiermoe.runtime.one_token import ROOM, take_over
from tiermoe.runtime.one_token.layer import OneTokenLayer
from tiermoe.runtime.one_token.router import OneTokenRouter
from tiermoe.store.layout import ExpertFormat
from tiermoe.types import MoeLayer, Part

pytestmark = pytest.mark.skipif(not native.available(), reason="needs AVX-512 with BF16 and VBMI, and a C compiler")

ROUNDING = 2.0**-8  # the most that rounding to bfloat16 changes a value, relative


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def packed(out: int, in_: int, group: int, seed: int = 0) -> tuple[Int4, dict[str, torch.Tensor]]:
    weight = torch.randn(out, in_, generator=torch.Generator().manual_seed(seed)) * 0.05
    encoding = Int4(cpu_layout(), group)
    return encoding, encoding.encode(weight.bfloat16(), QUANTIZERS["linear"], torch.bfloat16)


def tokens(count: int, width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


@settings(max_examples=40, deadline=None)
@given(
    blocks=st.integers(1, 5),
    group=st.sampled_from(native.GROUPS),
    groups=st.integers(1, 5),
    count=st.one_of(st.integers(1, 14), st.sampled_from([64, 100])),
    seed=st.integers(0, 100),
)
def test_a_product_is_the_decoded_weights_rounded_once(
    blocks: int, group: int, groups: int, count: int, seed: int
) -> None:
    out, in_ = 64 * blocks, group * groups
    encoding, fields = packed(out, in_, group, seed)
    x = tokens(count, in_, seed)
    exact = x.double() @ encoding.decode(fields, out, in_, torch.float32).double().t()
    # float32 sums: their error counts where a result is near 0
    allowed = exact.abs() * ROUNDING + 1e-5 * x.double().abs().sum(1, keepdim=True)
    assert (linear(x, fields, out, in_, group).double() - exact).abs().le(allowed).all()


def test_a_tokens_product_depends_on_no_other_token_and_no_thread(one_thread: None) -> None:
    _, fields = packed(256, 192, 64)
    x = tokens(23, 192)
    alone = torch.cat([linear(token[None], fields, 256, 192, 64) for token in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for count in range(1, len(x) + 1):
            assert torch.equal(linear(x[:count], fields, 256, 192, 64), alone[:count])


def test_calls_from_several_threads_at_once(one_thread: None) -> None:
    _, fields = packed(512, 256, 64)
    x = tokens(1, 256)
    want = linear(x, fields, 512, 256, 64)

    def many(_: int) -> bool:
        torch.set_num_threads(3)
        return all(torch.equal(linear(x, fields, 512, 256, 64), want) for _ in range(300))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(many, range(4)))


def test_a_forked_process_computes_too(one_thread: None) -> None:
    _, fields = packed(256, 128, 64)
    x = tokens(1, 128)
    torch.set_num_threads(2)
    want = linear(x, fields, 256, 128, 64)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(linear(x, fields, 256, 128, 64), want) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_threads_that_slept_come_back(one_thread: None) -> None:
    _, fields = packed(256, 128, 64)
    x = tokens(1, 128)
    torch.set_num_threads(4)
    want = linear(x, fields, 256, 128, 64)
    for pause in (0.0, 0.001, 0.01, 0.05):
        time.sleep(pause)
        assert torch.equal(linear(x, fields, 256, 128, 64), want)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 4), run=st.integers(1, 200), seed=st.integers(0, 1000))
def test_widening_gives_numpys_codes(count: int, run: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    pairs, ladders = (torch.randint(0, 256, (count, rows, run), generator=random).byte() for rows in (4, 1))
    targets = [torch.full((count + 1, 8, run), 77, dtype=torch.uint8) for _ in range(2)]
    widen(pairs, ladders, targets[0][:count])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiermoe.quant.ladders.native.available", lambda: False)
        widen(pairs, ladders, targets[1][:count])
    assert torch.equal(*targets)


def expert_format(hidden: int, inner: int) -> ExpertFormat:
    parts = (Part("gate_up", (2 * inner, hidden)), Part("down", (hidden, inner)))
    encoding = Int4(cpu_layout(), 64)
    return ExpertFormat(MoeLayer("experts", 4, 2, parts), 4, torch.bfloat16, {"gate_up": encoding, "down": encoding})


def expert_views(hidden: int, inner: int, seed: int) -> SlotViews:
    gate_up, down = packed(2 * inner, hidden, 64, seed)[1], packed(hidden, inner, 64, seed + 100)[1]
    return SlotViews({"gate_up": gate_up, "down": down})


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 70])
def test_an_expert_in_one_call_is_its_separate_steps(count: int) -> None:
    form = expert_format(128, 192)
    one_call, separate = expert_kernel(form, silu_gate, "cpu"), SeparateSteps(form, silu_gate, "cpu")
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
        got = expert_kernel(form, silu_gate, "cpu")(x, views)
        assert torch.allclose(
            got, SeparateSteps(form, silu_gate, "cpu")(x, views), rtol=0.05, atol=0.05 * scale * scale
        )
        assert got.isfinite().all()


def test_experts_computed_together_give_what_each_gives_alone() -> None:
    kernel = expert_kernel(expert_format(128, 64), silu_gate, "cpu")
    views, x = [expert_views(128, 64, seed) for seed in range(5)], tokens(1, 128)
    alone = torch.cat([kernel(x, each) for each in views])
    for order in ([0, 1, 2, 3, 4], [4, 2], [3]):
        assert torch.equal(kernel.together(x, [views[at] for at in order]), alone[order])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_in_one_call_is_its_separate_calls_and_waits_for_all_its_experts(dtype: torch.dtype) -> None:
    kernel = expert_kernel(expert_format(128, 64), silu_gate, "cpu")
    assert isinstance(kernel, InOneCall)
    views = [expert_views(128, 64, seed) for seed in range(5)]
    router, x, residual = tokens(5, 128, 3), tokens(1, 128)[None], tokens(1, 128, 2)[None]
    weights, chosen = choose(logits_of(router, x), 3, normalise=True)
    order = chosen[0].argsort().tolist()
    outputs = list(kernel.together(x[0], [views[chosen[0, at]] for at in order]))
    want = residual + weighted_sum(outputs, weights[0].to(dtype), order)
    block = MoeBlock(kernel.native, 5)
    for expert in chosen[0].tolist():
        assert block(router, 3, True, dtype, x, residual) == (None, 0)
        block.place(expert, kernel.packed(views[expert]))
    got, computed = block(router, 3, True, dtype, x, residual)
    assert got is not None
    assert computed == 3
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_weighted_sum_is_torchs_bit_for_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, weights = list(tokens(5, 96)), torch.rand(7).to(dtype)
    got = weighted_sum(outputs, weights, [6, 0, 3, 2, 1])
    monkeypatch.setattr("tiermoe.kernels.expert.combines", lambda _: False)
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


def checkpoint(directory: Path, family: str, **changes: Any) -> Path:
    """One whose shapes the kernels take."""
    heads = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    if "head_dim" in tiny.CONFIGS[family]:
        heads["head_dim"] = 32
    inner = "moe_intermediate_size" if "moe_intermediate_size" in tiny.CONFIGS[family] else "intermediate_size"
    heads[inner] = 64
    return tiny.write(directory, family, torch.bfloat16, **{**heads, **changes})


def logits_of_steps(model: Any, ids: torch.Tensor, prompt: int, cache: Any = None) -> torch.Tensor:
    """Logits of a prompt, then of each token alone."""
    cache = cache or DynamicCache(config=model.config)
    with torch.no_grad():
        steps = [model(ids[:, :prompt], past_key_values=cache).logits[:, -1]]
        steps += [model(ids[:, at : at + 1], past_key_values=cache).logits[:, -1] for at in range(prompt, ids.shape[1])]
    return torch.cat(steps)


FAMILIES = {
    # layers and routers that are taken over
    "mixtral": (3, 3), "qwen3_moe": (3, 3), "olmoe": (3, 3), "qwen2_moe": (3, 2), "granitemoe": (0, 3),
    "glm4_moe": (3, 0), "phimoe": (0, 0), "gpt_oss": (0, 0), "deepseek_v2": (0, 0),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_agrees_with_transformers_forward(family: str, tmp_path: Path) -> None:
    """The taken-over forwards against transformers' own on the same packed weights, for more tokens than a cache has
    room for at a time. glm4_moe rotates half of a head: its layers look alike, and keep transformers' forward."""
    changes = {"residual_multiplier": 0.3} if family == "granitemoe" else {}
    if family == "deepseek_v2":
        changes = {"num_key_value_heads": 4}
    model, _ = tiermoe.load(checkpoint(tmp_path, family, **changes), memory="4GiB", bits=4, dense_bits=4)
    taken = model.tiermoe.one_token
    kinds = [type(fast) for fast in taken]
    assert (kinds.count(OneTokenLayer), kinds.count(OneTokenRouter)) == FAMILIES[family]
    ids = torch.randint(3, 128, (1, ROOM + 12), generator=torch.Generator().manual_seed(0))
    fast = logits_of_steps(model, ids, 6)
    for each in taken:
        each.detach()
    own = logits_of_steps(model, ids, 6)
    for each in taken:
        each.attach()
    error = (fast.float() - own.float()).norm(dim=-1) / own.float().norm(dim=-1)
    assert error.median() < 0.03  # a router may decide a near tie otherwise: single tokens may differ more
    model.tiermoe.close()
    assert "forward" not in vars(model.model.layers[0])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = checkpoint(tmp_path_factory.mktemp("qwen"), "qwen3_moe")
    loaded, _ = tiermoe.load(directory, memory="4GiB", bits=4, dense_bits=4)
    yield loaded
    loaded.tiermoe.close()


IDS = torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(1))


def test_a_cropped_a_copied_and_a_reordered_cache_go_on_right(model: Any) -> None:
    want = logits_of_steps(model, IDS[:, :20], 6)
    cache = DynamicCache(config=model.config)
    logits_of_steps(model, torch.cat((IDS[:, :12], IDS[:, 30:36]), 1), 6, cache)
    held = cache.layers[0].keys
    before = held.clone()
    cache.crop(-6)
    copies = [copy.deepcopy(cache), copy.copy(cache)]
    copies[1].layers = [copy.copy(layer) for layer in cache.layers]
    cache.batch_select_indices(torch.tensor([0]))
    for each in (cache, *copies):
        with torch.no_grad():
            got = [model(IDS[:, at : at + 1], past_key_values=each).logits[:, -1] for at in range(12, 20)]
        assert torch.equal(torch.cat(got), want[7:])
    assert torch.equal(held, before)  # what somebody kept of a cache is not written to


def test_whatever_else_is_asked_for_goes_through_transformers(model: Any) -> None:
    called: list[int] = []
    layer = model.model.layers[0].self_attn
    want = logits_of_steps(model, IDS[:, :8], 6)
    handle = layer.register_forward_hook(lambda *_: called.append(1))
    hooked = logits_of_steps(model, IDS[:, :8], 6)
    handle.remove()
    assert len(called) == 3
    assert torch.allclose(hooked.float(), want.float(), rtol=0.1, atol=0.1)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(IDS[:, :6], past_key_values=cache)
        model(IDS[:, 6:7], past_key_values=cache, output_attentions=True)
    assert torch.equal(logits_of_steps(model, IDS[:, :8], 6), want)  # what was asked for once changes no later token


def test_batches_masks_and_beams_as_before(model: Any) -> None:
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
    got = logits_of_steps(smaller, IDS, 6)
    assert smaller.tiermoe.stats()["expert_misses"] > 24  # something was evicted and read again
    smaller.tiermoe.close()
    assert torch.equal(got, logits_of_steps(model, IDS, 6))


def test_settled_experts_count_as_hits_and_observers_see_them(model: Any) -> None:
    engine = model.tiermoe
    logits_of_steps(model, IDS, 6)
    seen: list[int] = []
    before = engine.snapshot()
    want = logits_of_steps(model, IDS, 6)
    middle = engine.snapshot()
    engine.observe(lambda routed, _: seen.append(routed.layer))
    observed = logits_of_steps(model, IDS, 6)
    engine.observe(None)
    after = engine.snapshot()
    assert (middle.hits - before.hits, middle.misses - before.misses) == (after.hits - middle.hits, 0)
    assert len(seen) == 3 * (1 + IDS.shape[1] - 6)
    assert torch.equal(observed, want)  # the observed way takes the separate calls


def test_plain_dense_layers_keep_transformers_forwards(tmp_path: Path) -> None:
    plain, _ = tiermoe.load(checkpoint(tmp_path, "qwen3_moe"), memory="4GiB", bits=4, dense_bits=16)
    assert plain.tiermoe.one_token == []
    assert take_over(plain) == []
    plain.tiermoe.close()


def test_the_switch_keeps_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    native.available.cache_clear()
    try:
        assert not native.takes(torch.bfloat16, 64, 64, 64)
        assert isinstance(expert_kernel(expert_format(64, 64), silu_gate, "cpu"), SeparateSteps)
    finally:
        monkeypatch.undo()
        native.available.cache_clear()
    assert native.available()
