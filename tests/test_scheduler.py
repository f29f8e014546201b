"""A composition's decisions, layer by layer, against a link that finishes one load a step: no weights, no files."""

from __future__ import annotations

import pytest

from fake_link import HOBBIT, SHAPE, FakeLink, Said, each, keys, run, scheduler_with
from tiermoe.errors import ProfileError
from tiermoe.offload.assembly import PrecisionSlots, assemble
from tiermoe.offload.presets import PRESETS
from tiermoe.types import Demand, ExpertKey, Routed


def test_frugal_fetches_four_fifths_of_the_weight_and_uses_the_rest_where_it_is() -> None:
    scheduler, link = scheduler_with("frugal")
    run(scheduler, 0, [1, 2], [0.85, 0.15])
    assert keys(link, urgent=True) == [ExpertKey(0, 1, 4)]
    run(scheduler, 0, [3, 2], [0.7, 0.3])  # 0.7 of the weight before it: wanted
    assert [ready.expert for ready in run(scheduler, 0, [1, 2], [0.85, 0.15])] == [1, 2]
    assert scheduler.loader.counts.skipped == 1


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


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.missing()])
def test_open_settings_are_refused_with_the_command_that_fills_them(name: str) -> None:
    with pytest.raises(ProfileError, match=f"tiermoe calibrate .* --for {PRESETS[name].profile}"):
        assemble(PRESETS[name], SHAPE, [PrecisionSlots((4,), 12)], FakeLink(), 4)
