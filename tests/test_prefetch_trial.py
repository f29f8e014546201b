"""Prefetching that is decided by measuring: the trial alone, in the scheduler, in a replay, in the engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiermoe
from fake_link import FakeLink, Said, each, keys, scheduler_with
from small_traces import decode, layer, replayed, trace_of
from tiermoe.cli.output import summary
from tiermoe.engine.generate import Report
from tiermoe.lab.simulate import Result
from tiermoe.offload.assembly import ModelShape, PrecisionSlots, assemble
from tiermoe.offload.policies import prefetch_trial
from tiermoe.offload.policies.prefetch_trial import PrefetchTrial, promising
from tiermoe.offload.presets import PRESETS, compose
from tiermoe.types import Routed
from tiny import write

ON, OFF = True, False
FIRST = [OFF] * 8 + [ON, ON, OFF, OFF, ON, ON, OFF]
TRIED = len(FIRST)


def stretches(
    trial: PrefetchTrial, count: int, seconds: Callable[[bool], float], first: float = 9e9, layer_s: float = 0.0
) -> list[bool]:
    """The ways of so many stretches of 8 passes, each a `seconds`; its first pass takes `first`."""
    ways = []
    for _ in range(count):
        ways.append(trial.on)
        for position in range(8):
            assert trial.on is ways[-1]
            trial.record(seconds(trial.on) if position else first, layer_s)
    return ways


# the trial


@pytest.mark.parametrize("found", [ON, OFF])
def test_what_an_earlier_run_found_comes_first(found: bool) -> None:
    trial = PrefetchTrial(found, promises=lambda layer_s: pytest.fail("it is known"))
    assert stretches(trial, TRIED, lambda on: 1.0) == [way is not found for way in FIRST]
    assert trial.on is OFF  # a tie


@pytest.mark.parametrize("promised", [ON, OFF])
def test_else_what_the_drive_promises_after_a_stretch_without(promised: bool) -> None:
    asked = []
    trial = PrefetchTrial(None, lambda layer_s: asked.append(layer_s) or promised)  # type: ignore[func-returns-value]
    assert stretches(trial, 8, lambda on: 1.0, layer_s=0.25) == [OFF] + [promised] * 7
    assert asked == [0.25]
    other = not promised
    found = stretches(trial, 6, lambda on: 2.0 if on is promised else 1.0)
    assert found[:5] == [other, other, promised, promised, other]
    stretches(trial, 1, lambda on: 2.0 if on is promised else 1.0)
    assert trial.pays is not promised


def test_what_names_the_wrong_experts_is_not_tried() -> None:
    trial = PrefetchTrial(None, lambda layer_s: True)
    ways, watched = [], []
    for number in range(40):
        ways.append(trial.on)
        watched.append(trial.watching)
        for _ in range(8):
            if trial.watching:
                trial.record_named(10, 6 if number == 34 else 4)
            trial.record(1.0)
        if number == 0:
            assert (trial.pays, str(trial)) == (False, "off (40% of what it names is needed)")
    assert [number for number, each in enumerate(watched) if each] == [0, 17, 34]
    assert ways[:35] == [OFF] * 35
    assert ON in ways[35:]  # more than half was needed: the trial begins


def test_reading_ahead_promises_something_where_it_is_in_time_and_costs_no_computing() -> None:
    assert promising(layer_s=2e-3, load_s=1e-3, spare=True)
    assert not promising(layer_s=2e-3, load_s=3e-3, spare=True)
    assert not promising(layer_s=2e-3, load_s=1e-3, spare=False)


def test_nothing_is_said_before_the_trial_has_ended() -> None:
    trial = PrefetchTrial()
    stretches(trial, TRIED - 1, lambda on: 0.048 if on else 0.0412)
    assert (trial.pays, trial.without_s, trial.with_s, str(trial)) == (None, None, None, "")
    stretches(trial, 1, lambda on: 0.048 if on else 0.0412)
    assert str(trial) == "off (41.2 ms a token without, 48.0 with)"


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(16, 200))
def test_the_slower_way_is_taken_once_in_seventeen(prefetching: int, without: int, count: int) -> None:
    trial = PrefetchTrial()
    ways = stretches(trial, count, lambda on: float(prefetching if on else without))
    pays = prefetching < without
    assert trial.pays is pays
    assert ways[:TRIED] == FIRST
    assert ways[TRIED:].count(not pays) == (count - TRIED) // 17
    assert (trial.without_s, trial.with_s) == (without, prefetching)


@pytest.mark.parametrize("change", [-5.0, 5.0])
def test_what_changes_steadily_favours_neither_way(change: float) -> None:
    """A cache that fills makes every stretch faster, a context that grows every one slower, by more than the ways
    differ."""
    for better in (ON, OFF):
        trial, time = PrefetchTrial(), [1000.0]

        def seconds(on: bool, time: list[float] = time, better: bool = better) -> float:
            time[0] += change / 7  # 7 of 8 passes ask
            return time[0] - (on is better)

        ways = stretches(trial, TRIED + 10 * 17, seconds)
        assert ways[TRIED:].count(better) == 160


def test_one_disturbed_stretch_decides_nothing() -> None:
    for disturbed in range(TRIED):
        trial = PrefetchTrial()
        stretches(trial, disturbed, lambda on: 1.0 if on else 1.1)
        stretches(trial, 1, lambda on: 70.0)
        stretches(trial, TRIED - 1 - disturbed, lambda on: 1.0 if on else 1.1)
        assert trial.pays


def test_it_follows_a_machine_that_changes() -> None:
    trial = PrefetchTrial()
    stretches(trial, TRIED + 5 * 17 + 3, lambda on: 1.0 if on else 2.0)
    assert trial.pays
    ways = stretches(trial, 17 * 2, lambda on: 2.0 if on else 1.0)
    assert trial.pays is False
    assert ways[-1] is OFF
    assert stretches(trial, 17, lambda on: 2.0 if on else 1.0).count(ON) == 1
    stretches(trial, 17 * 2, lambda on: 1.0 if on else 2.0)
    assert trial.pays


# the composition


def trial_of(name: str, slots: int, changes: dict[str, Any]) -> PrefetchTrial | None:
    shape = ModelShape([4, 4, 4], [2, 2, 2])
    return assemble(compose(name, changes), shape, [PrecisionSlots((4,), slots)], FakeLink(), 4).trial


def test_the_default_preset_measures_and_the_published_ones_do_not() -> None:
    assert {name for name, preset in PRESETS.items() if preset.speculate == "measured"} == {"default"}
    assert trial_of("default", 11, {}) is not None
    assert trial_of("default", 11, {"speculate": "always"}) is None
    assert trial_of("mixtral-offload", 11, {}) is None
    assert trial_of("mixtral-offload", 11, {"speculate": "measured"}) is not None


def test_nothing_is_tried_where_nothing_is_predicted() -> None:
    assert trial_of("default", 11, {"prefetch": "none"}) is None
    assert trial_of("default", 12, {}) is None  # all are held


# the scheduler


class Asked(Said):
    """Forecasts that count how often they are asked."""

    asked = 0

    def ranked(self, target: int) -> Sequence[tuple[int, float]]:
        self.asked += 1
        return super().ranked(target)


class Passes:
    """Decode passes over three layers of four experts, which alternate; the next layer is predicted rightly."""

    def __init__(self, cost: float = 1.0, **changes: Any) -> None:
        self.scheduler, self.link = scheduler_with("mixtral-offload", **{"speculate": "measured", **changes})
        self.cost = cost
        self.number = 0
        self.said = Asked()
        self.chosen: list[list[int]] = []

    @property
    def on(self) -> bool:
        assert self.scheduler.trial is not None
        return self.scheduler.trial.on

    def begin(self, phase: str = "decode", tokens: int = 1) -> None:
        self.predict()
        self.link.time += 50.0  # between the last layer and the next pass: sampling, a user who thinks
        self.scheduler.begin_pass(tokens, self.said, phase)

    def predict(self) -> None:
        self.number += 1
        self.said = Asked({layer: [(expert, 0.5) for expert in self.experts(layer)] for layer in range(3)})

    def experts(self, layer: int) -> list[int]:
        return [[0, 1], [2, 3]][(self.number + layer) % 2]

    def run(self, layers: Sequence[int] = (0, 1, 2), phase: str = "decode", tokens: int = 1) -> int:
        """Runs layers of the pass; → speculative loads that were submitted."""
        before = len(keys(self.link, urgent=False))
        for layer_ in layers:
            routed = Routed(layer_, phase, [self.experts(layer_)] * tokens, [[0.5, 0.5]] * tokens)
            ready = [one.expert for one in each(self.scheduler.run_layer(routed, self.said))]
            self.link.time += 0.5 if layer_ < 2 else 100.0  # what comes after the last layer does not count
            self.chosen.append(sorted(ready))
        return len(keys(self.link, urgent=False)) - before

    def decode(self, tokens: int = 1) -> tuple[bool, int]:
        """One pass: whether it may prefetch, and its speculative loads; what is prefetched costs time."""
        self.begin(tokens=tokens)
        way, first = self.on, self.run([0, 1], tokens=tokens)
        self.link.time += self.cost * first
        return way, first + self.run([2], tokens=tokens)


def test_nothing_is_predicted_or_loaded_ahead_while_it_is_off() -> None:
    passes, ways = Passes(), []
    for _ in range(8 * TRIED):
        way, loads = passes.decode()
        ways.append(way)
        assert (loads > 0) is way
        assert (passes.said.asked > 0) is (way or len(ways) <= 8)  # watched
    assert ways == [way for way in FIRST for _ in range(8)]


@pytest.mark.parametrize(("cost", "pays", "tokens"), [(1.0, False, 1), (-0.1, True, 1), (1.0, False, 4)])
def test_a_pass_is_timed_from_its_beginning_to_the_end_of_its_last_layer(cost: float, pays: bool, tokens: int) -> None:
    passes = Passes(cost)
    for _ in range(8 * TRIED + 1):
        passes.decode(tokens)
    trial = passes.scheduler.trial
    assert trial is not None
    assert trial.pays is pays
    # two layers of .5; what is between passes, and 100, does not count; tokens share the time
    assert trial.without_s == pytest.approx(1.0 / tokens)
    loads = 4  # two experts of each of two layers
    assert trial.with_s == pytest.approx((1.0 + loads * cost) / tokens)
    assert passes.scheduler.prefetching == str(trial) != ""


def test_prefill_prefetches_always_and_is_not_timed() -> None:
    passes = Passes()
    for _ in range(57):
        passes.decode()
    assert passes.on is OFF
    for _ in range(20):
        passes.begin("prefill", tokens=2)
        assert passes.run(phase="prefill", tokens=2) > 0
        assert passes.on is OFF
    assert [passes.decode()[0] for _ in range(8)] == [OFF] * 7 + [ON]  # one has been before


def test_neither_a_discarded_pass_counts_nor_one_that_broke_off() -> None:
    passes = Passes()
    for _ in range(63):
        passes.decode()
    for _ in range(20):
        passes.decode()
        passes.scheduler.discard_pass()
        passes.begin()
        passes.run([0, 1])
    assert [passes.decode()[0] for _ in range(2)] == [OFF, ON]


def test_a_decoder_behind_an_encoder_is_timed_to_its_last_layer() -> None:
    passes = Passes()
    for _ in range(64):
        passes.begin("prefill")
        passes.run([0], "prefill")  # the encoder
        passes.predict()
        passes.scheduler.begin_pass(1, passes.said, "decode", 1)
        passes.run([1, 2])
    passes.begin("prefill")
    assert passes.on is ON


# the simulator

MEASURED, NEVER = {"speculate": "measured"}, {"prefetch": "none"}


def ahead(offset: int, changes: dict[str, Any], **options: Any) -> Result:
    """200 tokens, each of two experts that no cache of 4 still has; layer 1 is predicted `offset` beside its choice."""
    passes = [
        decode(layer([token % 8], forecasts={1: [((token + offset) % 8, 1.0)]}), layer([token % 8]))
        for token in range(200)
    ]
    trace = trace_of(passes, experts=8, top_k=1)
    return replayed(trace, changes={"prefetch": "next-gate", **changes}, **options)


def test_a_replay_prefetches_where_it_saves_time_and_no_more_where_it_costs_some() -> None:
    # dense .25, layer 0 waits 1 and computes .4, dense .25, layer 1 waits .35 instead of 1, and computes .4
    said = {0: "on (3300.0 ms a token without, 2650.0 with)", 4: "off (0% of what it names is needed)"}
    for offset in (0, 4):
        measured, always, never = (ahead(offset, changes) for changes in (MEASURED, {}, NEVER))
        assert [each.metrics.prefetching for each in (measured, always, never)] == [said[offset], "", ""]
        speeds = [each.decode_tok_s or 0.0 for each in (never, measured, always)]
        assert speeds[0] < speeds[1] < speeds[2] if offset == 0 else speeds[2] < speeds[1] == speeds[0]
        loads = measured.counts.speculative_loads
        assert 0 < loads < always.counts.speculative_loads if offset == 0 else loads == 0  # before anything is read
        assert measured.counts.hits + measured.counts.misses == always.counts.hits + always.counts.misses == 400


# the engine


def test_the_engine_measures_and_its_tokens_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_trial, "STRETCH", 2)
    directory, answers = write(tmp_path, "qwen3_moe", torch.float32), []
    for preset in ("default", "lru"):
        model, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, cache="60%", preset=preset)
        ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
        options = {"max_new_tokens": 34, "min_new_tokens": 34, "do_sample": False}
        answers.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options))
        said = model.tiermoe.stats()["prefetching"]
        if preset == "default":
            assert re.fullmatch(r"(on|off) \([\d.]+ ms a token without, [\d.]+ with\)|off \(\d+% of .* needed\)", said)
        else:
            assert said == ""
        model.tiermoe.close()
    assert torch.equal(*answers)


def test_what_was_decided_is_said_under_the_answer() -> None:
    ours: dict[str, Any] = dict.fromkeys(("load_s", "memory_budget_bytes", "bits", "dense_bits"), 1)
    ours |= {"text": "a", "token_ids": [5], "preset": "", "other_budgets": []}
    said = summary(Report(**ours, prefetching="off (41.2 ms a token without, 48.0 with)"))
    assert said.endswith(", prefetching off (41.2 ms a token without, 48.0 with)]")
    assert "prefetching" not in summary(Report(**ours))
