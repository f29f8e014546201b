"""A composition's decisions, layer by layer, against a link that finishes one load a step: no weights, no files."""

from __future__ import annotations

import pytest

from fake_link import HOBBIT, SHAPE, FakeLink, Said, each, keys, run, scheduler_with
from tiermoe.errors import ConfigError, ProfileError
from tiermoe.offload.assembly import PrecisionSlots, assemble
from tiermoe.offload.presets import PRESETS, compose
from tiermoe.offload.profiles import Tables
from tiermoe.types import Demand, ExpertKey, Routed


def test_hobbit_loads_high_low_or_nothing_on_a_miss() -> None:
    scheduler, _ = scheduler_with("hobbit", bits=(4, 2), **HOBBIT)
    scheduler.begin_pass(1, Said(), "decode")
    ready = run(scheduler, 0, [3, 1, 2], [0.65, 0.3, 0.05])  # s = 0, .65, .95
    assert [(one.expert, one.bits) for one in ready] == [(1, 2), (3, 4)]
    assert (scheduler.loader.counts.misses, scheduler.loader.counts.skipped) == (2, 1)
    assert scheduler.loader.counts.low_loads == 1


def test_frugal_fetches_four_fifths_of_the_weight_and_uses_the_rest_where_it_is() -> None:
    scheduler, link = scheduler_with("frugal")
    run(scheduler, 0, [1, 2], [0.85, 0.15])
    assert keys(link, urgent=True) == [ExpertKey(0, 1, 4)]
    run(scheduler, 0, [3, 2], [0.7, 0.3])  # 0.7 of the weight before it: wanted
    assert [ready.expert for ready in run(scheduler, 0, [1, 2], [0.85, 0.15])] == [1, 2]
    assert scheduler.loader.counts.skipped == 1


def test_hobbit_uses_a_cached_copy_of_what_a_miss_would_skip() -> None:
    scheduler, _ = scheduler_with("hobbit", bits=(4, 2), **HOBBIT)
    scheduler.begin_pass(1, Said(), "decode")
    run(scheduler, 0, [2], [1.0])
    scheduler.begin_pass(1, Said(), "decode")
    ready = run(scheduler, 0, [3, 1, 2], [0.65, 0.3, 0.05])
    assert (2, 4) in [(one.expert, one.bits) for one in ready]
    assert scheduler.loader.counts.skipped == 0
    assert scheduler.loader.counts.hits == 1


def test_hobbit_goes_on_to_the_first_layer_with_a_missing_expert() -> None:
    scheduler, link = scheduler_with("hobbit", bits=(4, 2), **{**HOBBIT, "prefetch": "stacked-gates", "ahead": 2})
    scheduler.begin_pass(1, Said(), "decode")
    run(scheduler, 1, [0, 1], [0.9, 0.1])
    scheduler.loader.drain()
    said = Said({1: [(0, 0.9), (1, 0.1)], 2: [(3, 0.8), (2, 0.2)]})
    scheduler.begin_pass(1, Said(), "decode")
    run(scheduler, 0, [0, 1], [0.9, 0.1], said)
    assert keys(link, urgent=False) == [ExpertKey(2, 3, 4), ExpertKey(2, 2, 2)]  # .8 lies before the second: low


def test_a_prefetch_begins_before_what_is_here_is_computed() -> None:
    scheduler, link = scheduler_with("mixtral-offload", slots=9)
    scheduler.begin_pass(1, Said(), "decode")
    run(scheduler, 0, [0, 1], [0.5, 0.5])
    scheduler.begin_pass(1, Said(), "decode")
    steps = each(scheduler.run_layer(Routed(0, "decode", [[0, 1]], [[0.5, 0.5]]), Said({1: [(2, 0.7), (3, 0.3)]})))
    next(steps)
    assert keys(link, urgent=False) == [ExpertKey(1, 2, 4), ExpertKey(1, 3, 4)]
    list(steps)


def test_hits_that_are_recorded_late_count_for_their_own_layer() -> None:
    scheduler, _ = scheduler_with("default", prefetch="none")
    scheduler.begin_pass(1, Said(), "decode")
    for layer in range(3):
        run(scheduler, layer, [0, 1], [0.5, 0.5])
    scheduler.begin_pass(1, Said(), "decode")
    run(scheduler, 0, [0, 1], [0.5, 0.5])
    for layer in (1, 2):
        scheduler.all_hit(layer, 2, [[0, 1]])
        scheduler.record_hits()
        assert scheduler.uses.counts[layer] == [2, 2, 0, 0]
        assert scheduler.clock.layer == layer  # as policies have seen it


def test_a_discarded_pass_is_counted_apart_and_its_token_once() -> None:
    scheduler, _ = scheduler_with("mobile")
    scheduler.begin_pass(1, Said(), "decode")
    run(scheduler, 0, [0], [1.0])
    scheduler.discard_pass()
    assert (scheduler.loader.counts.misses, scheduler.discarded.misses) == (0, 1)
    assert scheduler.clock.token == 0
    scheduler.begin_pass(1, Said(), "decode")
    run(scheduler, 0, [0, 1], [0.5, 0.5])
    assert (scheduler.loader.counts.hits, scheduler.loader.counts.misses) == (1, 1)
    assert scheduler.clock.token == 1


@pytest.mark.parametrize(
    "cache", ["lru", "lfu", "lhu", "weighted", "distance", "arc", "random", "fifo", "fld", "next-use"]
)
def test_a_discarded_pass_leaves_no_use_behind(cache: str) -> None:
    """Who leaves after a discarded pass, whose expert was here, is who leaves without one."""
    weights = {"weights": "0.4,0.3,0.2,0.1"} if cache == "weighted" else {}

    def leaving(discarded: bool) -> list[ExpertKey]:
        scheduler, link = scheduler_with("mobile", slots=4, cache=cache, prefetch="none", **weights)
        for expert in (0, 1, 2, 3, 1, 2, 2, 3, 3):
            scheduler.begin_pass(1, Said(), "decode")
            run(scheduler, 0, [expert], [1.0])
        if discarded:
            scheduler.begin_pass(1, Said(), "decode")
            run(scheduler, 0, [0, 1], [0.5, 0.5])
            scheduler.discard_pass()
        before = set(link.contents.values())
        left = []
        for number in range(4):
            scheduler.begin_pass(1, Said(), "decode")
            run(scheduler, 1, [number], [1.0])
            now = set(link.contents.values())
            left += sorted(before - now)
            before = now
        return left

    assert leaving(True) == leaving(False)
    assert len(leaving(False)) == 4


def test_what_came_in_a_discarded_pass_is_here_and_was_not_used() -> None:
    scheduler, _ = scheduler_with("mobile", slots=3, cache="lfu", prefetch="none")
    for layer in range(3):
        scheduler.begin_pass(1, Said(), "decode")
        run(scheduler, layer, [0], [1.0])
    scheduler.begin_pass(1, Said(), "decode")
    run(scheduler, 0, [1], [1.0])
    scheduler.discard_pass()
    cache = scheduler.loader.cache
    assert cache.find(0, 1, 4) is not None
    assert scheduler.uses.counts[0] == [1, 0, 0, 0]
    scheduler.begin_pass(1, Said(), "decode")
    run(scheduler, 0, [2], [1.0])
    assert cache.find(0, 1, 4) is None, "of no use so far, it leaves first"


def test_the_big_pass_is_prefetched_from_before_its_first_layer() -> None:
    scheduler, link = scheduler_with("mobile")
    scheduler.begin_pass(1, Said(recalled={0: [(3, 0.6), (2, 0.4)], 1: [(1, 1.0)]}), "decode")
    assert keys(link, urgent=False)[:2] == [ExpertKey(0, 3, 4), ExpertKey(0, 2, 4)]


def test_sti_fetches_the_whole_layer_and_asks_for_the_routed_alone() -> None:
    scheduler, link = scheduler_with("sti", prefetch="none")
    scheduler.begin_pass(1, Said(), "decode")
    run(scheduler, 0, [2, 1], [0.5, 0.5])
    assert {key.expert for key in keys(link, urgent=True)} == {0, 1, 2, 3}
    assert scheduler.loader.counts.misses == 2


CORM = {"prefetch": "next-gate", "on_mispredict": "proceed"}


def test_corm_proceeds_with_what_was_predicted() -> None:
    scheduler, _ = scheduler_with("lru", slots=9, **CORM)
    scheduler.begin_pass(1, Said(), "decode")
    run(scheduler, 0, [0, 1], [0.5, 0.5], Said({1: [(2, 0.7), (3, 0.3)]}))
    assert [one.expert for one in run(scheduler, 1, [2, 0], [0.5, 0.5])] == [2]
    assert scheduler.loader.counts.skipped == 1
    scheduler.begin_pass(1, Said(), "decode")
    run(scheduler, 0, [0, 1], [0.5, 0.5], Said({1: [(1, 0.7), (0, 0.3)]}))
    assert [one.expert for one in run(scheduler, 1, [1, 2], [0.5, 0.5])] == [1, 2], "one is here, though not predicted"


def test_corm_loads_everything_where_nothing_was_predicted() -> None:
    """Layer 0, a layer that no forecast names, one whose experts are all others: nothing was mispredicted there."""
    scheduler, _ = scheduler_with("lru", slots=11, **CORM)
    for _ in range(2):  # some are here in the second pass, which is no prediction
        scheduler.begin_pass(1, Said(), "decode")
        run(scheduler, 0, [0, 1], [0.5, 0.5])
        run(scheduler, 1, [0, 1], [0.5, 0.5], Said({2: [(2, 1.0)]}))
        run(scheduler, 2, [0, 1], [0.5, 0.5])
    scheduler.begin_pass(1, Said(), "decode")
    assert [one.expert for one in run(scheduler, 0, [1, 2], [0.5, 0.5])] == [1, 2]
    assert [one.expert for one in run(scheduler, 1, [1, 2], [0.5, 0.5])] == [1, 2]
    assert [one.expert for one in run(scheduler, 2, [1, 3], [0.5, 0.5])] == [1, 3], "a prediction of an earlier pass"
    assert scheduler.loader.counts.skipped == 0


def test_corm_loads_what_was_predicted_and_has_not_begun() -> None:
    scheduler, link = scheduler_with("lru", slots=9, **CORM)
    scheduler.begin_pass(1, Said(), "decode")
    run(scheduler, 0, [0, 1], [0.5, 0.5], Said({1: [(2, 0.7), (3, 0.3)]}))
    assert [load.key.expert for load in link.speculative] == [2, 3]
    assert [one.expert for one in run(scheduler, 1, [2, 3], [0.5, 0.5])] == [2, 3]


def test_corm_loads_everything_where_its_prefetch_was_not_issued() -> None:
    scheduler, link = scheduler_with("lru", slots=9, **CORM)
    link.poll = lambda: None  # type: ignore[method-assign]
    scheduler.begin_pass(1, Said(), "decode")
    scheduler.loader.run_layer(0, [Demand(3, 1, 4)])  # of a request that has ended with an error
    run(scheduler, 1, [], [], Said({2: [(2, 0.7), (3, 0.3)]}))
    assert keys(link, urgent=False) == []
    assert {one.expert for one in run(scheduler, 2, [2, 0], [0.5, 0.5])} == {0, 2}
    assert scheduler.loader.counts.skipped == 0


def test_load_on_demand_never_hits() -> None:
    scheduler, _ = scheduler_with("load-on-demand", slots=2)
    for _ in range(3):
        scheduler.begin_pass(1, Said(), "decode")
        for layer in range(3):
            run(scheduler, layer, [0, 1], [0.5, 0.5])
    assert scheduler.loader.counts.hits == 0


def test_together_waits_for_all_loads() -> None:
    scheduler, link = scheduler_with("lru", start="together")
    scheduler.begin_pass(1, Said(), "decode")
    run(scheduler, 0, [0], [1.0])
    steps = each(scheduler.run_layer(Routed(0, "decode", [[0, 1, 2]], [[]]), Said()))
    next(steps)
    assert {ExpertKey(0, 1, 4), ExpertKey(0, 2, 4)} <= set(link.contents.values())
    list(steps)


def test_a_new_sequence_forgets_what_is_recorded_per_sequence() -> None:
    scheduler, _ = scheduler_with("lru", slots=2, cache="lfu", records="sequence")
    for _ in range(3):
        scheduler.begin_pass(1, Said(), "decode")
        run(scheduler, 0, [0], [1.0])
    run(scheduler, 0, [1], [1.0])
    scheduler.new_sequence()
    run(scheduler, 0, [1], [1.0])
    run(scheduler, 0, [2], [1.0])
    cache = scheduler.loader.cache
    assert cache.find(0, 1, 4) is not None
    assert cache.find(0, 0, 4) is None


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.missing()])
def test_open_settings_are_refused_with_the_command_that_fills_them(name: str) -> None:
    with pytest.raises(ProfileError, match=f"tiermoe calibrate .* --for {PRESETS[name].profile}"):
        assemble(PRESETS[name], SHAPE, [PrecisionSlots((4,), 12)], FakeLink(), 4)


def test_tables_are_asked_for_by_name() -> None:
    with pytest.raises(ConfigError, match="calibrate"):
        assemble(compose("lru", {"precision": "table"}), SHAPE, [PrecisionSlots((4, 2), 6)], FakeLink(), 4, Tables())
