"""Native kernels called by several threads and processes; a model on them: what it leaves to transformers, and that
an observer changes no bit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import tiermoe
from native_experts import checkpoint
from small_engines import OnRoute, logits_of_steps
from tiermoe import native
from tiermoe.formats.int4 import Int4
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.kernels.linear import linear, matrix_form

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native kernels")
by_set = pytest.mark.usefixtures("instruction_set")


def product(out: int, in_: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The native product with a random matrix."""
    encoding = Int4(64)
    weight = torch.randn(out, in_, generator=torch.Generator().manual_seed(0)) * 0.05
    fields = encoding.encode(weight.bfloat16(), QUANTIZERS["linear"], torch.bfloat16)
    form = matrix_form(encoding, out, in_, torch.bfloat16)
    assert form is not None
    return lambda x: linear(x, form, fields)


def token(width: int) -> torch.Tensor:
    return torch.randn(1, width, generator=torch.Generator().manual_seed(1)).bfloat16()


@by_set
def test_calls_from_several_threads_at_once(one_thread: None) -> None:
    multiply, x = product(512, 256), token(256)
    want = multiply(x)

    def many(_: int) -> bool:
        torch.set_num_threads(3)
        return all(torch.equal(multiply(x), want) for _ in range(300))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(many, range(4)))


@by_set
def test_a_forked_process_computes_too(one_thread: None) -> None:
    multiply, x = product(256, 128), token(128)
    torch.set_num_threads(2)
    want = multiply(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(multiply(x), want) else 1)
    assert os.waitpid(child, 0)[1] == 0


@by_set
def test_threads_that_slept_come_back(one_thread: None) -> None:
    multiply, x = product(256, 128), token(128)
    torch.set_num_threads(4)
    want = multiply(x)
    for pause in (0.0, 0.001, 0.01, 0.05):
        time.sleep(pause)
        assert torch.equal(multiply(x), want)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
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
        assert matrix_form(Int4(64), 64, 64, torch.bfloat16) is None
    finally:
        monkeypatch.undo()
        native.available.cache_clear()
    assert native.available()
