"""What the tests of eviction policies share."""

from __future__ import annotations

import math
from typing import Any

from tiermoe.decide.eviction import EVICTIONS, Eviction, EvictionContext
from tiermoe.decide.eviction.protocol import Clock
from tiermoe.types import Demand, ExpertKey

LAYERS = 4


def key(layer: int, expert: int, bits: int = 4) -> ExpertKey:
    return ExpertKey(layer, expert, bits)


def context(clock: Clock | None = None, **given: Any) -> EvictionContext:
    values: dict[str, Any] = {"slots": 4, "layers": LAYERS, "next_use": lambda _: math.inf}
    return EvictionContext(clock or Clock(), **(values | given))


def made(name: str, weights: tuple[float, ...], clock: Clock, **given: Any) -> Eviction:
    """A policy by its name, with `weights` where it has any."""
    settings = {"weights": weights} if name == "weighted" else {}
    return EVICTIONS[name](context(clock, **given), **settings)


def use(policy: Eviction, who: ExpertKey, tokens: int = 1, bits: int = 4) -> None:
    policy.used(who, Demand(who.expert, tokens, bits))


def any_key(_: ExpertKey) -> bool:
    return True


def order_of_leaving(policy: Eviction) -> list[ExpertKey]:
    """Empties the policy: everything it knows, in the order in which it gives it up now."""
    leaving = []
    while (victim := policy.victim(key(0, 99), any_key)) is not None:
        policy.removed(victim)
        leaving.append(victim)
    return leaving
