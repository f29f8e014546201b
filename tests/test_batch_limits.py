"""How many requests a server runs at once, and what they share, where nobody says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tiermoe.config import Settings, settings
from tiermoe.engine.load import plan_for
from tiermoe.engine.needs import longest_request
from tiermoe.errors import BudgetError, ConfigError
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.platform import process_memory
from tiermoe.serve.batch_limits import MOST_AT_ONCE, requests_at_once, use_of_server, with_room
from tiermoe.serve.intake import Intake
from tiermoe.types import USUAL, Use
from tiny import write


class _Plan:
    """A budget of 1000 bytes, of which a request's keys and values take `each`; 600 bytes hold all experts."""

    def __init__(self, requests: int, each: int) -> None:
        self.kv_cache = requests * each
        self.experts = min(1000 - self.kv_cache, 600)
        self.slots, self.all_slots = self.experts, 600
        if self.experts <= 0:
            raise BudgetError("too little")


@pytest.mark.parametrize(
    ("each", "count"),
    [(10, 16), (25, 16), (26, 8), (50, 8), (51, 4), (100, 4), (101, 2), (200, 2), (201, 1), (2000, 1)],
)
def test_keys_and_values_take_no_more_than_experts(each: int, count: int) -> None:
    asked: list[int] = []

    def plan_for(requests: int) -> Any:
        asked.append(requests)
        return _Plan(requests, each)

    assert requests_at_once(plan_for) == count
    assert asked == [number for number in (16, 8, 4, 2) if number >= count]


def test_where_all_experts_fit_keys_and_values_may_take_more() -> None:
    plan = _Plan(16, 5)
    plan.kv_cache = 1000
    assert requests_at_once(lambda _: plan) == 16  # type: ignore[arg-type,return-value]


@pytest.fixture(scope="module")
def blueprint(tmp_path_factory: pytest.TempPathFactory) -> Blueprint:
    return inspect_model(write(tmp_path_factory.mktemp("room"), "qwen3_moe", torch.bfloat16), "room")


def asked(memory: int, **options: Any) -> Settings:
    return settings(memory=memory, device="cpu", context=256, chunk=16, threads=1, **options)


def test_a_server_shares_what_experts_can_do_without(blueprint: Blueprint) -> None:
    said: list[str] = []
    longest = longest_request(blueprint, asked(1 << 32), 256, "cpu")
    assert longest
    chosen, use = with_room(blueprint, asked(1 << 32), USUAL, said.append)
    whole = plan_for(blueprint, chosen, use)
    assert (chosen.batch, use.kv_memory, whole.kv_memory, said) == (16, 16 * longest, 16 * longest, [])
    little = asked(whole.total - whole.idle_activations - 15 * longest - whole.experts // 2)
    chosen, use = with_room(blueprint, little, USUAL, said.append)
    plan = plan_for(blueprint, chosen, use)
    assert chosen.batch == MOST_AT_ONCE
    assert use.kv_memory in [count * longest for count in (1, 2, 4)]
    assert plan.slots < plan.all_slots
    assert len(said) == 1
    assert "--kv-memory names another size" in said[0]
    none, use = with_room(blueprint, asked(1 << 20), USUAL, said.append)
    assert (none.batch, use.kv_memory) == (1, None)  # the plan says what is missing


def test_requests_in_flight_are_in_the_plan(blueprint: Blueprint) -> None:
    little = asked(1 << 32)
    use = use_of_server(blueprint, little)
    plan, without = plan_for(blueprint, little, use), plan_for(blueprint, little, replace(use, requests=0))
    assert plan.requests == plan.fixed - without.fixed == {w: n for w, n, _ in plan.rows()}["requests in flight"]
    assert plan.total == sum(nbytes for _, nbytes, _ in plan.rows())
    assert Intake(plan.context, lambda: None).most < plan.requests  # the tokenizer takes some


def test_what_the_process_holds_is_measured_once(blueprint: Blueprint, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many plans are looked at: giving memory back takes longer than all of them."""
    measured: list[int] = []
    monkeypatch.setattr(process_memory, "settle", lambda: measured.append(1))
    with_room(blueprint, asked(1 << 20), USUAL, lambda _: None)
    assert len(measured) == 1


def test_transformers_code_shares_nothing(blueprint: Blueprint) -> None:
    chosen, use = with_room(blueprint, asked(1 << 32, decoder="generic"), USUAL, lambda _: None)
    assert (chosen.batch, use.kv_memory) == (16, None)
    with pytest.raises(ConfigError, match=r"--kv-memory 1 MiB is for tiermoe's own decoders.*leave --kv-memory out"):
        plan_for(blueprint, chosen, Use(kv_memory=1 << 20))


def test_memory_that_holds_no_request_is_refused(blueprint: Blueprint) -> None:
    longest = longest_request(blueprint, asked(1 << 32), 256, "cpu") or 0
    with pytest.raises(ConfigError, match=rf"holds no request of 256 tokens.*raise it to {longest // 1024}KiB"):
        plan_for(blueprint, asked(1 << 32), Use(kv_memory=longest - 1))
    plan = plan_for(blueprint, replace(asked(1 << 32), batch=16), Use(kv_memory=longest))
    assert plan.kv_cache == longest
    assert "shared by requests of up to 256 tokens" in str(plan.rows())
