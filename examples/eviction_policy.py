"""An eviction policy of one's own beside three of tiermoe's: the shipped model with room for a quarter of its experts.

    python examples/eviction_policy.py

A policy is told which experts get a slot, are used and lose their slot, and names the expert that leaves. It cannot
change an answer, only what is read from the drive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import tiermoe
from tiermoe.offload.policies.eviction import EVICTIONS, EvictionContext
from tiermoe.offload.policies.settings import setting
from tiermoe.types import Demand, ExpertKey


@dataclass(eq=False)
class FewestUsesOfSome:
    """Of `drawn` cached experts, drawn at random, the one with the fewest uses leaves: nearly what a full order of all
    gives, without keeping one."""

    context: EvictionContext
    drawn: int = setting(2, read=int, low=1, high=64)

    def __post_init__(self) -> None:
        self._uses: Counter[ExpertKey] = Counter()
        self._cached: list[ExpertKey] = []
        self._random = Random(self.context.seed)

    def admitted(self, key: ExpertKey) -> None:
        self._cached.append(key)

    def used(self, key: ExpertKey, demand: Demand) -> None:
        self._uses[key] += demand.tokens

    def removed(self, key: ExpertKey) -> None:
        self._cached.remove(key)

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        free = [key for key in self._cached if evictable(key)]
        some = self._random.sample(free, min(self.drawn, len(free)))
        return min(some, key=self._uses.__getitem__, default=None)

    def new_sequence(self) -> None:
        """Uses count on from one sequence to the next."""


EVICTIONS["fewest-of-some"] = FewestUsesOfSome
"""From here on `--set cache=fewest-of-some` and `--set drawn=4` are settings like any other."""


def answer(**settings: str) -> tiermoe.Report:
    """A short answer of the shipped model under a policy. warm=False: what earlier runs used does not count."""
    options = {"memory": "2GiB", "cache": "25%", "preset": "lru", "warm": False}
    with tiermoe.load("stories-7m", **options, set=settings) as (model, tokenizer):
        prompt = tokenizer("Once upon a time", return_tensors="pt").input_ids
        return tiermoe.generate(model, tokenizer, prompt, tiermoe.Sampling(temperature=0, max_tokens=60))


def main() -> None:
    policies = [{"cache": "lru"}, {"cache": "lfu"}, {"cache": "random"}, {"cache": "fewest-of-some"}]
    for settings in [*policies, {"cache": "fewest-of-some", "drawn": "8"}]:
        report = answer(**settings)
        name = " ".join(f"{name}={value}" for name, value in settings.items())
        print(f"{name:32} hit rate {report.hit_rate:.1%}, {report.expert_misses} experts read")


if __name__ == "__main__":
    main()
