"""How often experts are used, what that says of caches of other sizes, and what a run leaves to the next one: against a
cache of that size; no token depends on it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiermoe
from commands import Command
from fake_link import FakeLink, Said, scheduler_with
from patience import until
from tiermoe import native
from tiermoe.engine.expectation import other_budgets
from tiermoe.engine.generate import generate
from tiermoe.engine.memory_plan import MemoryPlan, PlannedSlots
from tiermoe.engine.sampling import Sampling
from tiermoe.engine.service import History
from tiermoe.formats.store import Source, Store
from tiermoe.metrics import ExpertCounts, PhaseMetrics
from tiermoe.offload.assembly import ModelShape, PrecisionSlots, assemble
from tiermoe.offload.policies.prefetch_trial import PAIRS
from tiermoe.offload.presets import compose
from tiermoe.offload.scheduler import Scheduler
from tiermoe.offload.usage import (
    WATCHED,
    WINDOW,
    Reuse,
    RunRecord,
    SizeCurve,
    Uses,
    merged,
    missed,
    most_used,
    read_record,
    record_path,
    shares_of,
    write_record,
)
from tiermoe.types import Demand, ExpertKey, MoeLayer, Routed
from tiny import write

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
EXPERTS = 6
CHOICES = st.lists(st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=2), max_size=40)


# uses


def place(layer: int, expert: int) -> ExpertKey:
    return ExpertKey(layer, expert, 4)


def test_the_most_used_come_first_and_unused_ones_only_where_all_fit() -> None:
    uses = [[0.0, 5.0, 1.0], [7.0, 5.0, 0.0]]
    used = [place(1, 0), place(0, 1), place(1, 1), place(0, 2)]
    assert most_used([3, 3], 4, uses, everything=False) == used
    assert most_used([3, 3], 4, uses, everything=True) == [*used, place(0, 0), place(1, 2)]
    assert most_used([2, 1], 4, [], everything=True) == [place(0, 0), place(0, 1), place(1, 0)]
    assert most_used([2, 1], 4, [], everything=False) == []


def test_uses_fade_as_others_are_counted() -> None:
    uses = Uses([2, 1])
    uses.record(0, [Demand(1, 3, 4), Demand(0, 1, 4)])
    uses.record(0, [Demand(1, 2, 4)])
    assert uses.counts == [[1, 5], [0]]
    assert merged([], uses.counts) == [[1, 5], [0]]
    assert merged([[8, 0], [4]], uses.counts) == [[pytest.approx(8 * (1 - 6 / WINDOW) + 1), 5], [4]]
    assert merged([[8.0]], [[2 * WINDOW]]) == [[2 * WINDOW]]


def test_a_share_is_of_the_tokens_that_a_layer_served() -> None:
    uses = [[3.0, 1.0, 0.0], [2.0, 2.0, 4.0], [0.0, 0.0, 0.0]]  # 4 tokens of 1 expert, 4 of 2, none
    assert shares_of(uses, [1, 2, 2]) == [[0.75, 0.25, 0.0], [0.5, 0.5, 1.0], [0.0, 0.0, 0.0]]


def test_eviction_begins_with_the_uses_of_earlier_runs() -> None:
    """Each layer has two slots; expert 0 of layer 0 was used most in earlier runs, 1 and 2 never."""
    scheduler, _ = scheduler_with("default", slots=6, prefetch="none")
    scheduler.fills = False
    scheduler.fill([[9.0, 0.0, 0.0, 1.0]] * 3)
    for expert in (0, 1, 2):
        scheduler.begin_pass(1, Said(), "decode")
        for layer in range(3):
            for _ in scheduler.run_layer(Routed(layer, "decode", [[expert]], [[1.0]]), Said()):
                pass
    cache = scheduler.loader.cache
    for layer in range(3):
        assert [cache.find(layer, expert, 4) is not None for expert in (0, 1, 2)] == [True, False, True]


# distances


def noted(tokens: Sequence[Sequence[int]], layers: int = 1, phase: str = "decode") -> Reuse:
    reuse = Reuse([EXPERTS] * layers)
    for chosen in tokens:
        for layer in range(layers):
            reuse.record(layer, [Demand(expert, 1, 4) for expert in chosen], phase)
    return reuse


def lru_misses(tokens: Sequence[Sequence[int]], slots: int) -> int:
    """Of a cache that keeps what was used last, a token's experts together."""
    recent: list[int] = []
    misses = 0
    for chosen in tokens:
        misses += sum(expert not in recent[:slots] for expert in chosen)
        for expert in chosen:
            recent = [expert, *(other for other in recent if other != expert)]
    return misses


@given(CHOICES, st.integers(2, EXPERTS))
def test_it_counts_what_an_lru_cache_of_that_size_misses(choices: list[set[int]], slots: int) -> None:
    tokens = [sorted(chosen) for chosen in choices]
    uses = sum(map(len, tokens))
    expected = lru_misses(tokens, slots) / uses if uses else 0.0
    found = noted(tokens)
    assert missed(found.distances, found.first, slots) == pytest.approx(expected)


def test_a_prompt_is_used_and_not_counted() -> None:
    reuse = noted([[0, 1, 2]], phase="prefill")
    assert (sum(reuse.distances), reuse.first) == (0, 0)
    reuse.record(0, [Demand(0, 1, 4), Demand(5, 1, 4)], "decode")
    assert (reuse.distances[2], reuse.first) == (1, 1)


def test_between_two_sizes_in_proportion() -> None:
    assert missed([4, 2, 1], 1, 1) == pytest.approx(4 / 8)
    assert missed([4, 2, 1], 1, 1.5) == pytest.approx(3 / 8)
    assert missed([4, 2, 1], 1, 99) == pytest.approx(1 / 8)
    assert missed([0, 0], 0, 1) == 0


@pytest.mark.parametrize("layers", [1, 3, WATCHED, 48])
def test_few_layers_are_watched_spread_evenly(layers: int) -> None:
    reuse = noted([[0], [0]], layers)
    watched = reuse.first
    assert watched == min(layers, WATCHED)
    assert sum(reuse.distances) == watched


def test_the_scheduler_tells_it_of_exact_compositions() -> None:
    for name, changes, counted in (("lru", {}, 2), ("frugal", {}, 0)):
        scheduler, _ = scheduler_with(name, **changes)
        for _ in range(2):
            scheduler.begin_pass(1, Said(), "decode")
            list(scheduler.run_layer(Routed(1, "decode", [[2]], [[1.0]]), Said()))
        assert sum(scheduler.reuse.distances) + scheduler.reuse.first == counted


# the curve


CURVE = SizeCurve((10.0, 20.0, 30.0, 20.0), 20.0, 4, 2, 0.5, 0.01, 0.02)
"""Two slots a layer: an LRU cache misses .7, this one .5 of what was asked for."""


def test_waiting_goes_as_misses_do() -> None:
    rate, tok_s = CURVE.at(4)
    assert rate == pytest.approx(0.5)
    assert tok_s == pytest.approx(1 / 0.03)
    rate, tok_s = CURVE.at(6)
    left = 0.5 / 0.7 * 0.4
    assert rate == pytest.approx(1 - left)
    assert tok_s == pytest.approx(1 / (0.01 + 0.02 * left / 0.5))
    assert CURVE.at(0)[0] == pytest.approx(1 - 0.5 / 0.7)


def test_a_run_that_was_short_or_missed_nothing_says_nothing() -> None:
    scheduler, _ = scheduler_with("lru")
    decode = PhaseMetrics(2.0, 1.5, 0.5, 100, 20, ExpertCounts(hits=30, misses=10))
    curve = scheduler.size_curve(6, decode)
    assert curve is not None
    assert (curve.slots, curve.layers, curve.miss_rate) == (6, 3, 0.25)
    assert (curve.compute_s, curve.wait_s) == (pytest.approx(0.075), pytest.approx(0.025))
    assert scheduler.size_curve(6, replace(decode, tokens=15)) is None
    assert scheduler.size_curve(6, replace(decode, counts=ExpertCounts(hits=40))) is None
    assert scheduler.size_curve(6, replace(decode, counts=ExpertCounts())) is None
    lossy, _ = scheduler_with("frugal")
    assert lossy.size_curve(6, decode) is None


PLAN = MemoryPlan(1000, "asked for", (), 10, 4, 8, 2, 4, 64, pools=(PlannedSlots((4,), 4, 10),))


def test_other_budgets_rise_and_hold_a_token_s_experts() -> None:
    rows = other_budgets(PLAN, CURVE)
    assert [row.slots for row in rows] == [4, 5, 6, 7, 8]  # tenths of eight, and not less than a token uses
    assert [row.memory_bytes for row in rows] == [row.slots * 10 for row in rows]
    assert [row.hit_rate for row in rows] == sorted(row.hit_rate for row in rows)
    assert [row.decode_tok_s for row in rows] == sorted(row.decode_tok_s for row in rows)
    assert rows[0].decode_tok_s == pytest.approx(1 / 0.03)


# the record


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The file of a record."""
    path = record_path(tmp_path, "4-hqq")
    write_record(path, "abc", RECORD)
    return path


RECORD = RunRecord([[1.5, 0.0], [2.0, 7.0]], {"here": True}, CURVE)


def test_it_is_read_as_it_was_written(written: Path) -> None:
    assert read_record(written, "abc", [2, 2]) == RECORD
    assert [file.name for file in written.parent.iterdir()] == [written.name]
    document = json.loads(written.read_text())
    del document["curve"]  # of an earlier tiermoe
    written.write_text(json.dumps(document))
    assert read_record(written, "abc", [2, 2]) == replace(RECORD, curve=None)
    written.unlink()
    assert read_record(written, "abc", [2, 2]) == RunRecord()


@pytest.mark.parametrize(
    "change",
    [
        {"format": "another"}, {"version": 2}, {"fingerprint": "another"}, {"uses": [[1.0, 2.0]]}, {"uses": 3},
        {"uses": [[1.0, 2.0], [1.0, -1.0]]}, {"uses": [[1.0, 2.0], [1.0, float("inf")]]}, {"uses": [[1, 2], [1, "x"]]},
        {"prefetching": []},
        *({"curve": wrong} for wrong in (
            {"slots": 0}, {"layers": 0}, {"miss_rate": 0}, {"miss_rate": 2}, {"compute_s": 0}, {"wait_s": -1},
            {"distances": [math.nan]}, {"distances": 3}, {"first": "x"},
        )),
    ],
)  # fmt: skip
def test_a_foreign_or_damaged_one_is_passed_over(written: Path, change: dict[str, Any]) -> None:
    document = json.loads(written.read_text())
    if "curve" in change:
        change = {"curve": document["curve"] | change["curve"]}
    written.write_text(json.dumps(document | change))
    assert read_record(written, "abc", [2, 2]) == RunRecord()


def test_a_torn_one_is_passed_over(written: Path) -> None:
    whole = written.read_bytes()
    for end in range(0, len(whole), 3):
        written.write_bytes(whole[:end])
        assert read_record(written, "abc", [2, 2]) == RunRecord()
    written.write_bytes(b"\xff\xfe" + whole)
    assert read_record(written, "abc", [2, 2]) == RunRecord()


def test_where_it_cannot_be_written_nothing_happens(tmp_path: Path) -> None:
    write_record(tmp_path / "missing" / "runs.json", "abc", RunRecord())
    (tmp_path / "runs.json").mkdir()
    write_record(tmp_path / "runs.json", "abc", RunRecord())
    assert [file.name for file in tmp_path.iterdir()] == ["runs.json"]


# what is written


def store_in(root: Path) -> Store:
    layers = [MoeLayer(f"layers.{index}", 4, 2, ()) for index in range(3)]
    return Store(root, Source("tiny", "abc", "qwen3_moe", "bfloat16"), layers)


def scheduler() -> Scheduler:
    shape = ModelShape([4, 4, 4], [2, 2, 2])
    return assemble(compose("default"), shape, [PrecisionSlots((4,), 6)], FakeLink(), 4)


def test_it_is_written_once_when_its_owner_ends(tmp_path: Path) -> None:
    class Owner: ...

    running, owner = scheduler(), Owner()
    history = History(store_in(tmp_path), "4-hqq", "here")
    history.keep(owner, running)
    list(running.run_layer(Routed(1, "prefill", [[0, 2], [2, 3]], [[], []]), Said()))
    assert list(tmp_path.iterdir()) == []
    del owner
    assert History(store_in(tmp_path), "4-hqq", "here").uses == [[0, 0, 0, 0], [1, 0, 2, 1], [0, 0, 0, 0]]
    assert History(store_in(tmp_path), "8", "here").uses == []


def test_a_run_that_used_nothing_writes_nothing(tmp_path: Path) -> None:
    running = scheduler()
    History(store_in(tmp_path), "4-hqq", "here").keep(running.uses, running)()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("pays", [True, False])
def test_what_the_trial_found_is_where_the_next_begins(tmp_path: Path, pays: bool) -> None:
    running, history = scheduler(), History(store_in(tmp_path), "4-hqq", "here")
    leave = history.keep(running.uses, running)
    running.uses.counts[0][1] = 3
    assert running.trial is not None
    running.trial._pairs.extend([(1.0, 2.0) if pays else (2.0, 1.0)] * PAIRS)
    leave()
    leave()
    later = History(store_in(tmp_path), "4-hqq", "here")
    assert later.uses[0] == [0, 3, 0, 0]
    assert later.trial(lambda layer_s: not pays).on is pays
    assert History(store_in(tmp_path), "4-hqq", "elsewhere").trial(lambda layer_s: True).on is False


# the engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 32}  # which the kernels take
    return write(tmp_path_factory.mktemp("recorded"), "qwen3_moe", torch.bfloat16, **sizes)


class Run:
    """One loading of the checkpoint, in a store of its own, and what it answers."""

    def __init__(self, checkpoint: Path, store: Path, wait: bool = True, **options: Any) -> None:
        options = {"memory": "4GiB", "device": "cpu", "bits": 4, "lanes": 2, "store": store, **options}
        self.model, _ = tiermoe.load(checkpoint, **options)
        self.engine = self.model.tiermoe
        if wait:
            until(lambda: self.engine.loader.collect() or not self.engine.loader.filling)

    def answer(self, tokens: int = 12) -> torch.Tensor:
        mask = torch.ones_like(IDS)
        found = self.model.generate(IDS, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
        assert isinstance(found, torch.Tensor)
        return found

    def here(self) -> set[ExpertKey]:
        keys = (ExpertKey(layer, expert, 4) for layer in range(3) for expert in range(8))
        return {key for key in keys if self.engine.loader.cache.slot(key) is not None}


@pytest.fixture
def cold(checkpoint: Path, tmp_path: Path) -> Iterator[torch.Tensor]:
    run = Run(checkpoint, tmp_path, warm=False)
    assert run.here() == set()
    yield run.answer()
    run.engine.close()


def test_all_that_fits_is_there_before_anything_runs(checkpoint: Path, tmp_path: Path, cold: torch.Tensor) -> None:
    for dense_bits in (16, 4):  # through the layers' forwards, and through those that know what has settled
        run = Run(checkpoint, tmp_path, dense_bits=dense_bits)
        assert len(run.here()) == 24
        answer, stats = run.answer(), run.engine.stats()
        assert (stats["expert_misses"], stats["warmed_experts"], stats["speculative_loads"]) == (0, 24, 0)
        assert stats["expert_hits"] > 0
        assert stats["bytes_read"] == 24 * stats["slot_bytes"]
        if dense_bits == 4:
            assert torch.equal(answer, cold)
        run.engine.close()


@pytest.mark.skipif(not native.available(), reason="no native kernels here")
def test_nothing_is_decided_of_what_has_come_by_itself(checkpoint: Path, tmp_path: Path) -> None:
    run = Run(checkpoint, tmp_path, dense_bits=4)
    run.engine.loader.report_warmed(24)
    uses = [list(row) for row in run.engine.scheduler.uses.counts]
    run.answer()
    assert run.engine.scheduler.uses.counts == uses
    assert run.engine.stats()["expert_hits"] > 0
    run.engine.close()


def test_the_next_run_begins_with_the_most_used(checkpoint: Path, tmp_path: Path, cold: torch.Tensor) -> None:
    first = Run(checkpoint, tmp_path, cache="50%")
    assert first.here() == set()
    assert torch.equal(first.answer(), cold)
    first.engine.close()
    (path,) = tmp_path.glob("runs-4-*.json")
    uses = json.loads(path.read_text())["uses"]
    assert all(sum(row) == (8 + 11) * 3 for row in uses)  # eight tokens of the prompt, eleven more, three experts each
    second = Run(checkpoint, tmp_path, cache="50%")
    most = {(layer, e) for layer, row in enumerate(uses) for e in sorted(range(8), key=lambda e: -row[e])[:4]}
    assert {(key.layer, key.expert) for key in second.here()} == {(at, e) for at, e in most if uses[at][e]}
    assert torch.equal(second.answer(), cold)
    stats = second.engine.stats()
    second.engine.close()
    assert stats["warmed_experts"] == len(most)
    assert json.loads(path.read_text())["uses"] != uses


def test_a_cold_run_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    run = Run(checkpoint, tmp_path, warm=False)
    run.answer()
    run.engine.close()
    assert list(tmp_path.glob("runs-*")) == []


def test_warm_is_yes_or_no(checkpoint: Path) -> None:
    with pytest.raises(tiermoe.ConfigError, match="warm must be True or False, got 'yes'"):
        tiermoe.load(checkpoint, warm="yes")


# the commands


def test_a_run_says_it_and_the_next_plan_too(tiermoe_: Command, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "model", "qwen3_moe", torch.bfloat16)
    common = ("--memory", "4GiB", "--device", "cpu", "--bits", 4, "--cache", "50%", "--store", tmp_path / "store")
    before = json.loads(tiermoe_("plan", checkpoint, *common, "--json").out)
    assert (before["found"], before["other_budgets"]) == (None, [])
    _run(checkpoint, tmp_path / "store")
    plan = json.loads(tiermoe_("plan", checkpoint, *common, "--json").out)
    rows = plan["other_budgets"]
    assert [row["slots"] for row in rows] == sorted({*range(9, 25, 1)} & {row["slots"] for row in rows})
    assert rows[-1]["slots"] == 24
    assert rows[-1]["hit_rate"] > plan["found"]["hit_rate"] > 0
    said = tiermoe_("plan", checkpoint, *common).out
    assert "with more memory:" in said
    expected, found = plan["expectation"], plan["found"]
    assert (before["expectation"]["measured"], expected["measured"]) == (False, True)
    assert expected["decode_tok_s"]["low"] * 1.2 == pytest.approx(found["decode_tok_s"])
    assert expected["decode_tok_s"]["high"] / 1.2 == pytest.approx(found["decode_tok_s"])
    assert expected["hit_rate"] == {"low": found["hit_rate"], "high": found["hit_rate"]}
    drive = json.loads(tiermoe_("plan", checkpoint, *common, "--machine", "sata", "--json").out)
    assert (drive["found"], drive["expectation"]["measured"]) == (None, False)
    everything = ("--memory", "4GiB", "--device", "cpu", "--bits", 4, "--store", tmp_path / "store")
    assert not json.loads(tiermoe_("plan", checkpoint, *everything, "--json").out)["expectation"]["measured"]
    lossy = json.loads(tiermoe_("plan", checkpoint, *common, "--preset", "frugal", "--json").out)
    assert lossy["found"] is None


def _run(checkpoint: Path, store: Path) -> None:
    """Decodes enough, and checks what the report says."""
    model, _ = tiermoe.load(checkpoint, memory="4GiB", device="cpu", bits=4, cache="50%", store=store)
    ids = torch.randint(3, 128, (1, 8), generator=torch.Generator().manual_seed(0))
    report = generate(model.tiermoe, _Words(), ids, Sampling(max_tokens=30, temperature=1.0, seed=1))
    model.tiermoe.close()
    rows = report.other_budgets
    assert report.as_dict()["other_budgets"][-1]["slots"] == 24
    own = next(row for row in rows if row.slots == 12)
    assert own.decode_tok_s == pytest.approx(report.decode_tok_s, rel=0.05)
    assert rows[-1].hit_rate > own.hit_rate


class _Words:
    """A tokenizer that says nothing."""

    def decode(self, ids: Any, **_: Any) -> str:
        return "x" * len(ids)
