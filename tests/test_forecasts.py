"""What is forecast of later layers against their own routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from small_engines import engine_of
from tiermoe.batch import Batch, decode, prompt
from tiermoe.model.hf.experts import routers_of
from tiermoe.model.routers import Router
from tiny import write

ROUTED = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "phimoe"]


def load(tmp_path: Path, family: str, **options: Any) -> tuple[Any, list[Any]]:
    """(model after a first pass, its routers in the order of the MoE layers)."""
    directory = write(tmp_path, family, torch.float32, num_hidden_layers=4)
    model, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, cache="50%", **options)
    model(torch.tensor([[5, 6, 7]]))
    return model, [router for _, router in routers_of(model)]


def choice(router: Any, hidden: torch.Tensor) -> list[int]:
    """The experts that a layer's router chooses itself, likeliest first."""
    _, weights, index = router(hidden)
    return index[0, weights[0].argsort(descending=True, stable=True)].tolist()


def inputs_of(engine: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(what routers are given in their own layers, what later ones are asked about) from now on."""
    given: list[torch.Tensor] = []
    asked: list[torch.Tensor] = []
    route, said = Router.route, engine.forecaster._said

    def record(router: Router, hidden: torch.Tensor) -> Any:
        given.append(hidden)
        return route(router, hidden)

    def record_forecast(target: int, hidden: torch.Tensor) -> Any:
        before, found = len(given), said(target, hidden)
        del given[before:]
        asked.append(hidden)
        return found

    monkeypatch.setattr(Router, "route", record)
    monkeypatch.setattr(engine.forecaster, "_said", record_forecast)
    return given, asked


@pytest.mark.parametrize("family", ROUTED)
def test_the_next_two_routers_say_what_they_would_choose(family: str, tmp_path: Path) -> None:
    model, routers = load(tmp_path, family, preset="default")
    forecasts = model.tiermoe.forecaster
    for seed in range(5):
        hidden = torch.randn(1, 64, generator=torch.Generator().manual_seed(seed))
        for layer in range(len(routers) - 2):
            forecasts.at(hidden)
            for target in (layer + 1, layer + 2):
                ranked = forecasts.ranked(target)
                k = routers[target].top_k
                assert [expert for expert, _ in ranked[:k]] == choice(routers[target], hidden)
    model.tiermoe.close()


def test_what_routers_are_given_is_what_later_ones_are_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4's take the residual stream, its experts a norm of it."""
    directory = write(tmp_path, "gemma4_text", torch.float32)
    engine = engine_of(directory, bits=16, dense_bits=16, preset="mixtral-offload", cache="50%")
    given, asked = inputs_of(engine, monkeypatch)
    cache = engine.new_cache()
    slab = cache.open()
    engine.step(Batch((prompt(slab, [5, 6, 7]),)), cache)
    for at in range(3, 9):
        engine.step(Batch((decode(slab, at, 8),)), cache)
    assert asked
    assert all(any(its is other for other in given) for its in asked)
    engine.close()


def test_later_routers_are_asked_about_all_parts_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that run together are routed by themselves, each with what its router is given."""
    directory = write(tmp_path, "gemma4_text", torch.float32)
    engine = engine_of(directory, bits=16, dense_bits=16, preset="mixtral-offload", cache="50%")
    given, asked = inputs_of(engine, monkeypatch)
    cache = engine.new_cache(3)
    engine.step(Batch(tuple(prompt(cache.open(), [5, 6, 7, 8][:count]) for count in (3, 1, 4))), cache)
    assert [len(its) for its in asked] == [8] * (len(engine.layers) - 1)  # nothing follows the last layer
    assert torch.equal(torch.cat(asked), torch.cat(given[:-3]))
    engine.close()


def test_one_product_of_weights_that_take_no_memory_of_their_own_serves_two_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, routers = load(tmp_path, "qwen3_moe", preset="default")
    assert len({router.weight.untyped_storage().data_ptr() for router in routers}) == 1
    calls = []
    forecasts, linear = model.tiermoe.forecaster, torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *given: calls.append(given) or linear(*given))
    forecasts.at(torch.randn(1, 64))
    assert forecasts.ranked(1)
    assert forecasts.ranked(2)
    assert len(calls) == 1
    assert forecasts.ranked(9) == ()
    model.tiermoe.close()


def test_all_experts_are_ranked_where_a_percentile_asks(tmp_path: Path) -> None:
    model, routers = load(tmp_path, "qwen3_moe", preset="lru", set={"prefetch": "percentile", "window": 2})
    hidden = torch.randn(1, 64)
    ranked = model.tiermoe.forecaster.rank(1, hidden)
    probabilities = routers[1](hidden)[0].softmax(-1)[0]
    assert [expert for expert, _ in ranked] == probabilities.argsort(descending=True).tolist()
    assert sum(weight for _, weight in ranked) == pytest.approx(1)
    model.tiermoe.close()
