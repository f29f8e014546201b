"""How many requests a server runs at once where nobody says."""

from __future__ import annotations

from typing import Any

import pytest

from tiermoe.errors import BudgetError
from tiermoe.serve.room import requests_at_once


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
