"""A MoE layer whose experts are resident: one native call, after which policies know what they would know otherwise."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import tiermoe
from tiermoe.batch import Batch, Kind, Row
from tiermoe.engine.observer import Observer
from tiermoe.native import available

pytestmark = pytest.mark.skipif(not available(), reason="needs the native kernels")
WARMED_UP = 24


class Decoded:
    """An engine over the shipped model that decodes greedily, several sequences at a time."""

    def __init__(self, shipped: Path, observed: bool = False, sequences: int = 1, **options: Any) -> None:
        options = {"cache": "45%", "warm": False, "lanes": 1, "set": {"prefetch": "none"}} | options
        self.model, tokenizer = tiermoe.load(shipped, memory="4GiB", device="cpu", bits=4, context=256, **options)
        self.engine = self.model.tiermoe
        if observed:
            self.engine.observe(Observer())
        self.cache = self.engine.new_cache(sequences, 256)
        prompts = [tokenizer(text).input_ids for text in ("The king looked", "A cat", "Three men")[:sequences]]
        self.rows = [Row(self.cache.open(), 0, tuple(ids), Kind.PROMPT) for ids in prompts]
        self.tokens: list[list[int]] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            logits = self.engine.step(Batch(tuple(self.rows)), self.cache)
            self.tokens.append(logits.argmax(-1).tolist())
            self.rows = [
                Row(row.slab, row.end, (token,), Kind.DECODE)
                for row, token in zip(self.rows, self.tokens[-1], strict=True)
            ]

    def counts(self) -> dict[str, Any]:
        names = ("expert_hits", "expert_misses", "expert_evictions", "bytes_read", "prefetched_hits")
        stats = self.engine.stats()
        scheduler = self.engine.scheduler
        scheduler.record_hits()
        return {name: stats[name] for name in names} | {
            "uses": scheduler.uses.counts, "distances": scheduler.reuse.distances, "first": scheduler.reuse.first,
        }  # fmt: skip

    def close(self) -> None:
        self.engine.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sequences": 3},
        {"set": {"prefetch": "none", "cache": "lru"}},
        {"set": {"prefetch": "none", "cache": "lhu", "records": "sequence"}},
        {"set": {"prefetch": "none", "cache": "arc", "allotment": "pool"}},
        {"set": {"prefetch": "none", "cache": "fld"}},
        {"cache": "10%"},
        {"preset": "nimble"},  # whose choices are known before the layer computes
    ],
)
def test_policies_decide_as_if_every_layer_had_asked_them(shipped: Path, options: dict[str, Any]) -> None:
    """An observer has every layer ask the scheduler before it computes. With one lane experts come in the order in
    which they are asked for."""
    asked, at_once = Decoded(shipped, observed=True, **options), Decoded(shipped, **options)
    for each in (asked, at_once):
        each.run(WARMED_UP)
    assert at_once.tokens == asked.tokens
    assert at_once.counts() == asked.counts()
    assert at_once.counts()["expert_misses"] > 0
    for each in (asked, at_once):
        each.close()


def calls(work: Any) -> Counter[str]:
    """How often each function of the engine and the scheduler is called while `work` runs."""
    found = Counter[str]()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and "tiermoe" in frame.f_code.co_filename:
            found[frame.f_code.co_qualname] += 1

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def test_a_layer_that_misses_nothing_asks_nobody(shipped: Path) -> None:
    decoded = Decoded(shipped, cache="90%")
    decoded.run(WARMED_UP)
    begin = decoded.rows
    decoded.run(4)
    decoded.rows = begin  # the same positions again: all that they use has come
    misses = decoded.engine.loader.counts.misses
    found = calls(lambda: decoded.run(4))
    assert decoded.engine.loader.counts.misses == misses
    assert decoded.tokens[-4:] == decoded.tokens[-8:-4]
    assert found["MoELayer.block"] == 4 * 8
    assert found["Scheduler.run_layer"] == found["ExpertLoader.run_layer"] == 0
    decoded.close()


def test_a_layer_that_hits_asks_what_is_read_ahead(shipped: Path) -> None:
    decoded = Decoded(shipped, cache="90%", set={"speculate": "always"})
    decoded.run(WARMED_UP)
    hits = decoded.engine.loader.counts.hits
    assert calls(lambda: decoded.run(4))["ExpertLoader.run_layer"] == 4 * 8
    assert decoded.engine.loader.counts.hits > hits
    decoded.close()


def test_an_expert_that_has_left_is_read_again(shipped: Path) -> None:
    """With as many slots as one layer's token needs, every layer overwrites what the one before used."""
    small, whole = (
        Decoded(shipped, cache="1.6%", set={"prefetch": "none", "allotment": "pool"}),
        Decoded(shipped, cache="100%"),
    )
    for each in (small, whole):
        each.run(WARMED_UP)
    assert small.tokens == whole.tokens
    assert small.counts()["expert_evictions"] > WARMED_UP * 8
    for each in (small, whole):
        each.close()
