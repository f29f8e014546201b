"""Replays: time by hand, hits against references, what a trace lacks."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import Command
from small_traces import TIMES, decode, layer, replayed, trace_of, write_trace
from tiermoe.config import CacheSize
from tiermoe.errors import ConfigError, ProfileError, TraceError
from tiermoe.lab.bench.report import missing_plots
from tiermoe.lab.cli.simulate import simulate
from tiermoe.lab.papers import LADDERS
from tiermoe.lab.simulate import LINKS, all_evictions, compare_evictions, parse_link, spread
from tiermoe.lab.simulate.costs import expert_bytes, run_bits
from tiermoe.lab.simulate.evictions import hits_of
from tiermoe.lab.simulate.link import Move, VirtualClock, VirtualLink
from tiermoe.lab.trace import LayerTrace, Little, Pass, Times, Trace, read_trace
from tiermoe.metrics import ExpertCounts
from tiermoe.offload.presets import PRESETS, compose
from tiermoe.offload.profiles import Profile, to_json
from tiermoe.types import ExpertKey, Load

# the link


def test_transfers_share_the_bandwidth_after_a_latency_of_their_own() -> None:
    """An urgent load goes before one that is read ahead; one that has begun is not interrupted, nor recalled."""
    clock = VirtualClock()
    link = VirtualLink(clock, 100.0, lambda key: Move(100), latency=0.1, lanes=2)

    def submit(expert: int, urgent: bool) -> Load:
        link.submit(load := Load(ExpertKey(0, expert, 4), expert, urgent))
        return load

    first = submit(0, urgent=True)
    clock.compute(0.6)  # half of it has come, alone
    second, third, ahead = submit(1, urgent=False), submit(2, urgent=False), submit(3, urgent=False)
    urgent = submit(4, urgent=True)
    assert link.poll() is None
    assert link.wait().load == first
    assert clock.now == pytest.approx(0.6 + 0.1 + 2 * 0.4)  # .1 alone, then 40 bytes at 50 a second
    assert link.recall() == [third, ahead]
    assert link.wait().load == second
    assert clock.now == pytest.approx(1.5 + 0.1 + 2 * 0.5)  # 40 bytes until 1.5, 10 alone, 50 beside the urgent one
    assert link.wait().load == urgent
    assert clock.now == pytest.approx(2.6 + 0.5)
    assert link.poll() is None
    assert link.counters() == (300, pytest.approx(3.1), pytest.approx(2.5), 0, 0.0)


# time, by hand


def test_a_miss_is_overlapped_with_computing() -> None:
    result = replayed(trace_of([decode(layer([0, 1])), decode(layer([1, 2]))]))
    # dense .5 | 0 comes until 1.5 | 0 runs until 1.9 while 1 comes until 2.5 | 1 runs until 2.9
    # dense until 3.4 | 1 is here and runs until 3.8 while 2 comes until 4.4 | 2 runs until 4.8
    assert result.decode_tok_s == pytest.approx(2 / 4.8)
    assert result.metrics.wait_s == pytest.approx(1.0 + 0.6 + 0.6)
    assert (result.counts.hits, result.counts.misses, result.bytes_read) == (1, 3, 300)
    assert (result.hit_rate, result.bytes_per_token) == (0.25, 150)
    assert result.bound_tok_s == pytest.approx(2 / 3.0)  # 300 bytes are more than 2.6 s of computing
    assert result.bound_fraction == pytest.approx(3.0 / 4.8)


def test_a_prefetch_comes_while_the_layer_runs() -> None:
    trace = trace_of([decode(layer([0]), layer([1]))], top_k=1)
    # dense .25 | 0 until 1.25 | runs until 1.65, dense until 1.9 | 1, begun at 1.9 or at 1.25, runs .4
    assert replayed(trace).decode_tok_s == pytest.approx(1 / (1.9 + 1.0 + 0.4))
    ahead = replayed(trace, changes={"prefetch": "oracle"})
    assert ahead.decode_tok_s == pytest.approx(1 / (2.25 + 0.4))
    counts = ahead.counts
    assert (counts.hits, counts.misses, counts.speculative_loads) == (0, 2, 1)  # it was still on its way
    fast = replayed(trace, changes={"prefetch": "oracle"}, bandwidth=1000.0)
    assert (fast.counts.hits, fast.counts.prefetched, fast.counts.misses) == (1, 1, 1)


def test_what_a_layer_decides_overlaps_the_first_load() -> None:
    trace = trace_of([decode(layer([0]))], top_k=1)
    times = dataclasses.replace(TIMES, layers=0.3)
    # dense .2, 0 until 1.2 while .3 are decided, runs .4
    assert replayed(trace, times=times).decode_tok_s == pytest.approx(1 / 1.6)
    assert replayed(trace, times=times, bandwidth=1e9).decode_tok_s == pytest.approx(1 / 0.9)
    prompt_ = trace_of([Pass("prefill", 0, [1, 2], [layer([0], [0])])], top_k=1)
    times = dataclasses.replace(TIMES, prefill_layers=0.05)
    assert replayed(prompt_, times=times, bandwidth=1e9).prefill_tok_s == pytest.approx(2 / (0.2 + 0.45))


def test_a_prompt_is_charged_by_token() -> None:
    prompt = Pass("prefill", 0, [1, 2, 3], [layer([0, 1], [0, 2], [0, 3])])
    result = replayed(trace_of([prompt]), bandwidth=1e9)
    # dense 3 x .1, expert 0 on three tokens .4 + 2 x .05, the others .4
    assert result.prefill_tok_s == pytest.approx(3 / (0.3 + 0.5 + 3 * 0.4))
    assert (result.decode_tok_s, result.bytes_per_token, result.hit_rate) == (None, None, 0.0)


def test_the_bits_of_a_replay_are_those_that_ran() -> None:
    passes = [decode(layer([0, 1]))]
    sizes = {16: [400], 4: [100]}
    assert run_bits(dataclasses.replace(trace_of(passes).header, expert_bytes=sizes)) == 16
    assert run_bits(dataclasses.replace(trace_of(passes, times=TIMES).header, expert_bytes=sizes)) == 4


def test_times_are_spread_by_bytes() -> None:
    header = trace_of([decode(layer([0, 1]), layer([0, 1]))], dense_bytes=600).header
    # 600 bytes dense, 2 layers x 2 experts x 100 bytes
    assert spread(header, 1.0, 0.1) == Times(0.6, {4: 0.1}, pytest.approx(0.06), {4: pytest.approx(0.01)})


def test_a_forecast_is_of_the_layer_so_far_ahead() -> None:
    layers = [layer([0]), layer([0], forecasts={1: [(2, 0.9)], 2: [(3, 0.9)]}), layer([2]), layer([3])]
    trace = trace_of([decode(*layers)], top_k=1, forecast_distances=[1, 2])
    result = replayed(trace, changes={"prefetch": "next-gate", "ahead": 2}, bandwidth=1e4)
    assert (result.counts.prefetched, result.counts.misses) == (2, 2)


def test_a_pass_without_experts_is_passed_over() -> None:
    assert replayed(trace_of([decode(layer([0, 1])), decode(layer())])).decode_tok_s == pytest.approx(1 / 2.9)


def test_a_size_that_is_not_known_is_taken_in_proportion() -> None:
    header = dataclasses.replace(trace_of([decode(layer([0, 1]))]).header, expert_bytes={8: [100], 4: [60]})
    assert [expert_bytes(header, 0, bits) for bits in (16, 8, 4, 2)] == [200, 100, 60, 30]


def test_an_encoder_and_its_decoder_make_passes_of_their_own() -> None:
    begins = [Pass("prefill", 0, [1, 2, 3], [layer([0, 1], [0, 1], [0, 1]), layer([2, 3])])]
    goes_on = [decode(layer(), layer([2, 3]))]
    result = replayed(trace_of(begins + goes_on, encoder_layers=1), bandwidth=1e9)
    # dense 3 x .1, two experts for three tokens; then two decoded tokens: .5 + 2 x .4 each
    assert result.prefill_tok_s == pytest.approx(3 / (0.3 + 2 * (0.4 + 2 * 0.05)))
    assert result.decode_tok_s == pytest.approx(1 / (0.5 + 0.8))
    assert (result.counts.hits, result.counts.misses) == (2, 4)


# parts


def test_the_little_pass_is_kept_or_counted_apart() -> None:
    def token(confidence: float) -> Pass:
        return decode(layer([0, 1]), layer([2, 3]), little=Little(confidence, [layer([0, 1]), layer([2, 3])]))

    sure = replayed(trace_of([token(0.9), token(0.9)]), "mobile", slots=8)
    assert (sure.counts.hits, sure.counts.misses) == (2, 2)
    assert sure.metrics.total.discarded == ExpertCounts()
    unsure = replayed(trace_of([token(0.7)], experts=6), "mobile", slots=8, bandwidth=1e4, changes={"ahead": 1})
    # 0 and 2 come with the little pass; of 1 and 3, which its routers named too, 1 is on its way when layer 0 asks
    discarded = unsure.metrics.total.discarded
    assert (discarded.hits, discarded.misses) == (0, 2)
    assert (unsure.counts.hits, unsure.counts.misses, unsure.counts.prefetched) == (4, 0, 2)
    assert unsure.decode_tok_s == pytest.approx(1 / (2 * 0.5 + 2 * 0.4 + 4 * 0.4 + 2 * 0.01), rel=1e-3)


def test_a_little_pass_of_other_than_half() -> None:
    trace = trace_of([decode(layer([0, 1, 2]))], top_k=3)
    asked = [replayed(trace, changes={"routing": "half", **changes}).counts.misses for changes in ({}, {"little": 1})]
    assert asked == [2, 1]
    with pytest.raises(ConfigError, match="little=3 leaves no expert out"):
        replayed(trace, changes={"routing": "half", "little": 3})
    said = decode(layer([0, 1, 2]), little=Little(0.9, [layer([0, 1, 2])]))
    with pytest.raises(TraceError, match=r"of 1 experts.* of K/2 was"):
        replayed(trace_of([said], top_k=3), "mobile", changes={"little": 1})
    made = trace_of([said], top_k=3, made_from={"little": 1})
    assert replayed(made, "mobile", changes={"little": 1}).counts.misses == 1


def test_a_preset_s_quantiser_has_sizes_of_its_own() -> None:
    """IO-QEXP is load on demand with channel-wise codes, which have fewer scales."""
    trace = trace_of([decode(layer([0, 1]))])
    sizes = {bits: [nbytes // 2 for nbytes in row] for bits, row in trace.header.expert_bytes.items()}
    known = Trace(dataclasses.replace(trace.header, quantized_bytes={"linear": sizes}), trace.passes)
    plain, own = (replayed(each, "io-qexp") for each in (trace, known))
    assert own.bytes_read * 2 == plain.bytes_read == replayed(known, "load-on-demand").bytes_read


def test_low_precision_moves_fewer_bytes_and_skips_the_rest() -> None:
    changes = {"t1": 0.4, "t2": 0.8, "weights": "0.25,0.25,0.25,0.25", "prefetch": "none"}
    # weights .5, .33, .17: unimportance 0 (high), .5 (low), .83 (skipped)
    result = replayed(trace_of([decode(layer([0, 1, 2]))], top_k=3), "hobbit", slots=10, changes=changes)
    assert (result.counts.misses, result.counts.skipped, result.counts.low_loads, result.bytes_read) == (2, 1, 1, 150)


def test_only_active_neurons_move_and_their_union_stays() -> None:
    # W1 has 40 bytes, each of 6 neurons 10; above .75 the whole expert comes
    def token(active: int) -> Pass:
        return decode(layer([0], neurons={0: active}))

    trace = trace_of(
        [token(0b000011), token(0b000110), token(0b000111)], top_k=1, head_bytes=40, neuron_bytes=10, neurons=6
    )
    changes = {"unit": "neuron", "theta": 0.1, "store": "memory"}
    assert replayed(trace, changes=changes).bytes_read == 60 + 10
    whole = trace_of([token(0b011111)], top_k=1, head_bytes=40, neuron_bytes=10, neurons=6)
    assert replayed(whole, changes=changes).bytes_read == 100


def test_a_drive_reads_the_pages_of_active_neurons_and_through_gaps() -> None:
    """W1 of one page, eight neurons of half a page each: 0 and 6 lie in the second and the fifth page."""
    page = 4096
    passes = [decode(layer([0], neurons={0: 0b01000001}))]
    trace = trace_of(passes, top_k=1, nbytes=5 * page, head_bytes=page, neuron_bytes=page // 2, neurons=8)
    changes = {"unit": "neuron", "theta": 0.1}
    assert replayed(trace, changes={**changes, "gap": 0}).bytes_read == 3 * page
    assert replayed(trace, changes={**changes, "gap": 3 * page - 1}).bytes_read == 5 * page
    assert replayed(trace, changes=changes).bytes_read == 5 * page  # the drive's own gap is larger
    assert replayed(trace, changes={**changes, "store": "memory"}).bytes_read == 2 * page


def test_a_whole_layer_is_fetched_routed_or_not() -> None:
    result = replayed(trace_of([decode(layer([0, 1]))]), "sti", changes={"prefetch": "none"})
    assert (result.bytes_read, result.counts.misses) == (400, 2)
    assert result.decode_tok_s == pytest.approx(1 / (0.5 + 4))  # 0 and 1, which come first, run while 2 and 3 come


# hits, against references


@st.composite
def routings(draw: st.DrawFn, experts: int = 5, most: int = 12) -> Trace:
    chosen = st.permutations(range(experts)).map(lambda order: list(order[:2]))
    count = draw(st.integers(1, most))
    passes = [decode(layer(draw(chosen)), layer(draw(chosen)), sequence=draw(st.integers(0, 1))) for _ in range(count)]
    return trace_of(passes, experts=experts)


@settings(max_examples=60, deadline=None)
@given(routings(), st.integers(2, 8))
def test_no_policy_hits_more_than_belady(trace: Trace, slots: int) -> None:
    best = hits_of(trace, "belady", slots, 4).decode.counts
    for name in all_evictions():
        for per_sequence in (False, True):
            counts = hits_of(trace, name, slots, 4, per_sequence=per_sequence).decode.counts
            assert counts.hits <= best.hits, name
            assert counts.hits + counts.misses == 4 * len(trace.passes)


def most_hits(requests: list[frozenset[tuple[int, int]]], slots: int) -> int:
    """By trying every choice of victims."""

    @cache
    def following(number: int, held: frozenset[tuple[int, int]]) -> int:
        if number == len(requests):
            return 0
        request = requests[number]
        kept = held | request
        return len(held & request) + max(following(number + 1, left) for left in reduced(kept, request, slots))

    def reduced(kept: frozenset[Any], request: frozenset[Any], size: int) -> set[frozenset[Any]]:
        if len(kept) <= size:
            return {kept}
        return {left for victim in kept - request for left in reduced(kept - {victim}, request, size)}

    return following(0, frozenset())


@settings(max_examples=30, deadline=None)
@given(routings(experts=4, most=5), st.integers(3, 5))
def test_belady_is_the_optimum(trace: Trace, slots: int) -> None:
    requests = [
        frozenset((number, expert) for expert in traced.experts[0])
        for passed in trace.passes
        for number, traced in enumerate(passed.layers)
    ]
    assert hits_of(trace, "belady", slots, 4).decode.counts.hits == most_hits(requests, slots)


@settings(max_examples=60, deadline=None)
@given(routings(experts=6), st.integers(4, 9))
def test_lru_hits_as_a_plain_lru(trace: Trace, slots: int) -> None:
    order: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = 0
    for passed in trace.passes:
        for number, traced in enumerate(passed.layers):
            request = [(number, expert) for expert in sorted(traced.experts[0])]
            here = [key for key in request if key in order]
            hits += len(here)
            for key in (*here, *(key for key in request if key not in here)):
                order[key] = None
                order.move_to_end(key)
            while len(order) > slots:
                order.popitem(last=False)
    assert hits_of(trace, "lru", slots, 4).decode.counts.hits == hits
    timed = replayed(trace, slots=slots)
    assert timed.counts.hits == hits
    assert timed.belady.headline_hit_rate >= timed.hit_rate
    assert replayed(trace, slots=slots, changes={"cache": "belady"}).hit_rate == timed.belady.headline_hit_rate


def test_records_are_kept_or_forgotten_and_weighed() -> None:
    """0 was used three times: it stays, and 1 and 2 drive each other out, unless a new sequence forgets that."""
    first = [decode(layer([0])) for _ in range(3)]
    trace = trace_of(first + [decode(layer([expert]), sequence=1) for expert in (1, 2, 1, 2)], top_k=1)

    def hits(name: str, **options: Any) -> int:
        return hits_of(trace, name, 2, 4, **options).decode.counts.hits

    assert (hits("lfu"), hits("lfu", per_sequence=True)) == (2, 4)
    assert [hits("weighted", settings={"weights": weights}) for weights in ((0, 1, 0, 0), (1, 0, 0, 0))] == [2, 4]


def test_the_headline_counts_what_is_decoded_after_the_prompt() -> None:
    prompt = Pass("prefill", 0, [1, 2], [layer([0, 1], [1, 2])])
    trace = trace_of([prompt, decode(layer([0, 3]))])
    (row,) = compare_evictions(trace, ["lru"], [CacheSize(fraction=1.0)])
    assert (row.slots, row.hit_rate, row.prefill_hit_rate, row.belady_hit_rate) == (4, 0.5, 0.0, 0.5)


# what is refused


BARE = trace_of([decode(layer([0, 1]), layer([0, 1]))], holds=frozenset(), times=TIMES)


@pytest.mark.parametrize(
    ("preset", "changes", "lacking"),
    [
        ("hobbit", {}, "forecasts .*stacked-gates.* and no gate weights"),
        ("mobile", {}, "little passes"),
        ("fate", {}, "forecasts"),
        ("corm", {}, "forecasts .* and no active neurons"),
        ("mixtral-offload", {}, "forecasts"),
        ("lru", {"routing": "half"}, "gate weights"),
        ("lru", {"routing": "confident"}, "little passes"),
        ("mobile", {"prefetch": "recalled+next-gate"}, "forecasts .* and no little passes"),
    ],
)
def test_what_a_trace_lacks_is_named(preset: str, changes: dict[str, str], lacking: str) -> None:
    with pytest.raises(TraceError, match=f"preset {preset} .*{lacking}"):
        replayed(BARE, preset, changes=changes)


def test_forecasts_must_reach_as_far_as_the_preset_looks() -> None:
    trace = trace_of([decode(layer([0, 1]), layer([0, 1]))], times=TIMES, forecast_distances=[1, 2])
    with pytest.raises(TraceError, match=r"hobbit.*forecasts 3 layers ahead"):
        replayed(trace, "hobbit")


def test_missing_times_settings_and_theta_are_named() -> None:
    with pytest.raises(TraceError, match="--compute"):
        replayed(trace_of([decode(layer([0, 1]))]), times=None)
    with pytest.raises(ProfileError, match=r"fate has no low_popularity.*--for fate"):
        replayed(trace_of([decode(layer([0, 1]))]), "fate")
    with pytest.raises(ConfigError, match="misses=load"):
        replayed(BARE, changes={"misses": "cpu"})
    neurons = trace_of([decode(layer([0, 1]))], head_bytes=1, neuron_bytes=1, neurons=3, made_from={"theta": 0.2})
    with pytest.raises(TraceError, match=r"theta 0.2.*0.3"):
        replayed(neurons, changes={"unit": "neuron", "theta": 0.3})
    assert replayed(neurons, changes={"unit": "neuron"}).counts.misses == 2


def test_links_by_name_and_by_bandwidth() -> None:
    assert parse_link("16GB/s").bandwidth == 16e9
    assert parse_link("PCIe3") is LINKS["pcie3"]
    for text in ("16GB", "fast", "0GB/s", "/s"):
        with pytest.raises(ConfigError, match="link"):
            parse_link(text)


# every preset runs, and the trace that a file brings is the one that was replayed


def full_trace(tokens: int = 6) -> Trace:
    def routed(seed: int, layer_: int) -> LayerTrace:
        chosen = [(seed + layer_) % 4, (seed * 3 + layer_ + 1) % 4]
        chosen = chosen if chosen[0] != chosen[1] else [chosen[0], (chosen[0] + 1) % 4]
        ahead = {d: [((seed + layer_ + d + i) % 4, 0.4 - i / 10) for i in range(4)] for d in (1, 2, 3)}
        return layer(chosen, forecasts=ahead, neurons=dict.fromkeys(chosen, 5))

    passes = [Pass("prefill", 0, [1, 2], [layer([0, 1], [1, 2], neurons={0: 1, 1: 2, 2: 3}) for _ in range(4)])]
    for seed in range(tokens):
        layers = [routed(seed, number) for number in range(4)]
        passes.append(decode(*layers, little=Little(seed / tokens, layers)))
    return trace_of(
        passes, times=TIMES, forecast_distances=[1, 2, 3], head_bytes=40, neuron_bytes=15, neurons=4,
    )  # fmt: skip


SETTINGS = {
    "t1": 0.4, "t2": 0.8, "weights": "0.25,0.25,0.25,0.25", "low_popularity": 0.3, "window": 2, "boundary": 1,
    "theta": 0.1,
}  # fmt: skip


def completed(preset: str, changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` with the settings that the preset then lacks."""
    return changes | {name: SETTINGS[name] for name in compose(preset, changes).missing()}


"""A calibration's tables, or scores that a trace does not have."""


@pytest.mark.parametrize("prefetch", ["none", "next-gate", "stacked-gates", "percentile", "oracle"])
@pytest.mark.parametrize("cache_", ["lru", "arc", "weighted", "distance"])
def test_prefetch_changes_no_demand(prefetch: str, cache_: str) -> None:
    changes = {"prefetch": prefetch, "cache": cache_} | ({} if prefetch == "none" else {"ahead": 2})
    result = replayed(full_trace(), slots=6, changes=completed("lru", changes))
    assert result.counts.hits + result.counts.misses == 3 * 4 + 6 * 4 * 2
    assert result.counts.skipped == 0


# the command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "t", full_trace())


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    """A folder with a profile for each preset that needs one."""
    data = {
        "table": [[4, 2, 4, 4]] * 4, "frequencies": [[1, 2, 3, 4]] * 4,
        "paths": {str(layer_): {"0,1": {"2": 3}} for layer_ in range(1, 4)},
    }  # fmt: skip
    settings_ = SETTINGS | {"weights": [0.25, 0.25, 0.25, 0.25], "layer_recall": [0.5] * 4, "layer_uses": [1.5] * 4}
    for name in ("hobbit", "edgemoe", "fate", "corm", "adapmoe", "fiddler"):
        (tmp_path / f"{name}.json").write_bytes(to_json(Profile(name, "abc", {}, settings_, data)))
    return tmp_path


@pytest.fixture
def rows(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[dict[str, Any]]]:
    """Runs the command with --json."""

    def rows_of(*words: Any, **options: Any) -> list[dict[str, Any]]:
        simulate(*words, **options, as_json=True)
        answer: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return answer

    return rows_of


def test_all_presets_in_one_table(file: Path, profiles: Path, rows: Callable[..., list[dict[str, Any]]]) -> None:
    found = rows(file, presets="all", cache="50%,60%", link="1KB/s", profiles=profiles)
    assert [row["preset"] for row in found] == [*PRESETS, *PRESETS]
    refused = [row for row in found if "refused" in row]
    assert [row["preset"] for row in refused] == ["nimble", "nimble-3bit", "fiddler", "llama-cpu-moe"] * 2
    assert "tiermoe eval" in refused[0]["refused"]  # a trace has no scores of experts that were not chosen
    assert all("take --machine rtx4090" in row["refused"] for row in refused[2:4])
    for row in found:
        if row in refused:
            continue
        assert 0 < row["decode_tok_s"] <= row["bound_tok_s"] * (1 + 1e-9)
        assert 0 <= row["hit_rate"] <= 1
        assert row["expert_hits"] + row["expert_misses"] + row["expert_skips"] >= 6 * 4
        assert row["bytes_per_token"] >= 0


def test_what_cannot_be_replayed_is_listed_with_the_reason(
    tmp_path: Path, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    bare = write_trace(tmp_path / "bare", BARE)
    found = {row["preset"]: row for row in rows(bare, presets="all", cache="100%", link="pcie4")}
    assert list(found) == list(PRESETS)
    assert "forecasts" in found["hobbit"]["refused"]
    assert found["edgemoe"]["refused"].startswith("preset edgemoe has no table of bits per expert")
    assert "--for edgemoe and give the folder" in found["edgemoe"]["refused"]
    assert "no boundary and no activation paths" in found["eap"]["refused"]
    assert "little passes" in found["mobile"]["refused"]
    assert found["lru"]["expert_misses"] == 4


def test_evictions_side_by_side(file: Path, rows: Callable[..., list[dict[str, Any]]]) -> None:
    found = rows(file, evictions="all", cache="40%,60%")
    assert [(row["eviction"], row["slots"]) for row in found] == [
        (name, slots) for slots in (6, 9) for name in all_evictions()
    ]
    assert all(row["hit_rate"] <= row["belady_hit_rate"] for row in found)


def test_the_tables_name_what_was_replayed(file: Path, profiles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate(file, presets="lru,hobbit", link="sdcard")
    shown = capsys.readouterr()
    assert "lru" in shown.out
    assert "left out hobbit: preset hobbit has no t1" in shown.err
    simulate(file, evictions="lru", cache="40%")
    shown = capsys.readouterr()
    assert "37.5%" in shown.out
    assert "belady" in shown.out
    fixed = ["t2=0.8", "weights=0.25,0.25,0.25,0.25"]
    simulate(file, presets="lru,hobbit", sweep=["t1=0.4,0.9"], set_=fixed, link="nvme")
    shown = capsys.readouterr()
    assert "left out lru: t2 does nothing with precision=fixed" in shown.err
    assert "left out hobbit (0.9): " in shown.err


# rows of one setting, and of parts that are switched on


def test_a_sweep_has_a_row_for_each_value_and_preset(
    file: Path, profiles: Path, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    """Each row is the replay that --set asks for alone."""
    given = {"link": "300B/s", "cache": "50%", "profiles": profiles}
    found = rows(file, presets="mobile,lru", sweep=["ahead=1,2"], **given)
    assert [(row["preset"], row["value"]) for row in found] == [("mobile", 1), ("lru", 1), ("mobile", 2), ("lru", 2)]
    assert {row["sweep"] for row in found} == {"ahead"}
    assert "ahead does nothing with prefetch=none" in found[1]["refused"]
    for row in (found[0], found[2]):
        (alone,) = rows(file, preset="mobile", set_=[f"ahead={row['value']}"], **given)
        assert {name: row[name] for name in alone if name != "set"} == {k: v for k, v in alone.items() if k != "set"}


def test_fallbacks_follow_gamma(file: Path, rows: Callable[..., list[dict[str, Any]]]) -> None:
    """The little passes of `full_trace` are 0, 1/6, … 5/6 sure; a token is kept above gamma."""
    found = rows(file, preset="mobile", sweep=["gamma=0,0.4,1"], link="1KB/s")
    sure = [seed / 6 for seed in range(6)]
    assert [row["fallback_ratio"] for row in found] == [
        sum(probability <= gamma for probability in sure) / 6 for gamma in (0, 0.4, 1)
    ]
    assert [row["value"] for row in found] == [0, 0.4, 1]


def test_a_calibration_that_is_there_is_taken_as_the_engine_takes_it(
    file: Path, profiles: Path, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    """MoBiLE has the paper's gamma unless one was calibrated or given."""
    (profiles / "mobile.json").write_bytes(to_json(Profile("mobile", "abc", {}, {"gamma": 0.4}, {})))
    asked = [{}, {"profiles": profiles}, {"profiles": profiles, "set_": ["gamma=1"]}]
    found = [rows(file, preset="mobile", link="1KB/s", **each)[0]["fallback_ratio"] for each in asked]
    assert found == [5 / 6, 3 / 6, 1]


@pytest.mark.parametrize(
    ("sweep", "option", "values"),
    [
        ("cache", "cache", ["40%", "800"]),
        ("link", "link", ["sata", "200B/s"]),
        ("compute", "compute", ["2s", "500ms"]),
        ("bits", "bits", [4, 2]),
    ],
)
def test_options_are_swept(
    sweep: str, option: str, values: list[Any], file: Path, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    given = {name: value for name, value in {"link": "300B/s", "cache": "50%"}.items() if name != option}
    found = rows(file, preset="lru", sweep=[f"{sweep}={','.join(map(str, values))}"], **given)
    assert [row["value"] for row in found] == values
    speeds = [rows(file, preset="lru", **{option: value}, **given)[0]["decode_tok_s"] for value in values]
    assert [row["decode_tok_s"] for row in found] == speeds
    assert speeds[0] != speeds[1]


def test_compute_times_can_be_given(file: Path, rows: Callable[..., list[dict[str, Any]]]) -> None:
    """Nothing is known of the dense part's bytes: all the time is its own."""
    (row,) = rows(file, preset="io-free", cache="100%", link="1TB/s", compute="2s", prefill_compute="0.5s")
    assert (row["decode_tok_s"], row["prefill_tok_s"]) == (pytest.approx(0.5), pytest.approx(2.0))


def test_cache_is_swept_by_size_or_by_policy(file: Path, rows: Callable[..., list[dict[str, Any]]]) -> None:
    sizes = rows(file, preset="lru", sweep=["cache=40%,60%"], link="1KB/s")
    assert [row["cache_fraction"] for row in sizes] == [6 / 16, 9 / 16]
    policies = rows(file, preset="lru", sweep=["cache=lru,lfu"], cache="40%", link="1KB/s")
    assert [(row["eviction"], row["cache_fraction"]) for row in policies] == [("lru", 6 / 16), ("lfu", 6 / 16)]


BASELINES = {
    "default": {"prefetch": "none", "cache": "lru", "allotment": "pool"},
    "hobbit": {"prefetch": "none", "cache": "lru", "precision": "fixed"},
    "edgemoe": {"prefetch": "none", "cache": "none", "precision": "fixed", "bits": 16},
    "mobile": {"prefetch": "none", "cache": "lru", "routing": "all"},
    "fate": {"prefetch": "none", "cache": "none", "precision": "fixed", "bits": 16},
    "corm": {"prefetch": "none", "cache": "none", "precision": "fixed", "unit": "expert", "on_mispredict": "reload"},
}
"""What the papers begin their step-by-step figures with."""


@pytest.mark.parametrize("preset", LADDERS)
def test_a_ladder_goes_from_the_baseline_to_the_whole_preset(
    preset: str, file: Path, profiles: Path, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    given = {"link": "300B/s", "cache": "50%", "profiles": profiles}
    found = rows(file, preset=preset, ladder=True, **given)
    assert [row["part"] for row in found] == [LADDERS[preset].baseline, *(part for part, _ in LADDERS[preset].parts)]
    steps = [compose(preset, changes) for _, changes in LADDERS[preset].steps(PRESETS[preset], {})]
    assert {name: steps[0][name] for name in BASELINES[preset]} == BASELINES[preset]
    assert steps[-1].settings() == compose(preset, LADDERS[preset].beyond).settings()
    assert all(before.settings() != after.settings() for before, after in itertools.pairwise(steps))
    assert (found[0]["prefetched_hits"], found[0]["lossy"]) == (0, [])
    speeds = [row["decode_tok_s"] for row in found]
    assert [row["decode_vs_first"] for row in found] == pytest.approx([speed / speeds[0] for speed in speeds])
    assert [row["decode_vs_before"] for row in found[1:]] == pytest.approx(
        [after / before for before, after in itertools.pairwise(speeds)]
    )
    assert "decode_vs_before" not in found[0]
    (whole,) = rows(file, preset=preset, **given)
    assert found[-2 if LADDERS[preset].beyond else -1]["decode_tok_s"] == whole["decode_tok_s"]


"""What the papers begin their step-by-step figures with."""


def test_a_wrong_command_is_told_in_a_line(tiermoe_: Command, file: Path) -> None:
    for words, cause in REFUSED.items():
        link = () if {"--evictions", "--link", "-"} & {*words.split()} else ("--link", "nvme")
        assert cause in tiermoe_("simulate", file, *words.removeprefix("- ").split(), *link).cause, words


REFUSED = {
    "- --preset lru": "how fast is the link",
    "--preset lru --evictions all": "exclude each other",
    "--preset lrv": "did you mean lru",
    "--presets lru,lrv": "unknown preset 'lrv'",
    "--evictions lru,best": "unknown eviction policy 'best'",
    "--evictions lru --link nvme": "--link has no effect",
    "--evictions lru --set prefetch=none": "--set prefetch has no effect",
    "--evictions lru,fld --set records=sequence": "records does nothing with --evictions lru,fld",
    "--evictions lru,lfu --set weights=1,0,0,0": "it is read by weighted",
    "--preset lru --compute 20": "'20' is not a time",
    "--preset lru --prefill-compute 20ms": "needs --compute",
    "--preset lru --cache 10%,x": "not a size",
    "--preset hobbit": "calibrate tiny",
    "--preset lru --bits 5": "bits must be",
    "--preset lru --sweep gamma=0.5,0.7": "gamma does nothing with routing=all; it is read by routing=confident",
    "--preset mobile --sweep gama=0.5": "unknown setting 'gama' to sweep; did you mean gamma",
    "--preset mobile --sweep gamma=0.5,often": "gamma must be a number, got 'often'",
    "--preset mobile --sweep gamma=0.5,2": "gamma must be from 0 to 1, got 2",
    "--preset mobile --sweep gamma=0.5,,1": "is not NAME=V1,V2; write it like",
    "--preset mobile --sweep gamma": "is not NAME=V1,V2; write it like",
    "--preset mobile --sweep gamma=0.5 --sweep ahead=1": "one --sweep at a time",
    "--preset mobile --sweep gamma=0.5 --set gamma=0.7": "--set gamma and --sweep gamma exclude each other",
    "--preset mobile --sweep gamma=0.5 --ladder": "--sweep and --ladder exclude each other",
    "--preset mobile --sweep cache=10%,all-of-it": "is not a size",
    "--preset mobile --sweep cache=10% --cache 20%": "--cache and --sweep cache exclude each other",
    "--preset mobile --sweep gamma=1 --cache 10%,20%": "--sweep takes one size of the cache",
    "- --preset mobile --sweep link=nvme --link nvme": "--link and --sweep link exclude each other",
    "--preset mobile --sweep bits=4,2 --bits 4": "--bits and --sweep bits exclude each other",
    "--preset mobile --sweep prompt=8,16": "tiermoe trace --prompt",
    "--preset lru --ladder": "preset lru has no parts to switch on; --ladder takes default, hobbit",
    "--preset fate --ladder --set gamma=0.5": "gamma does nothing with routing=all",
    "--preset fate --ladder --cache 10%,20%": "--ladder takes one size of the cache",
    "--evictions lru --ladder": "--ladder has no effect on --evictions",
    "--preset mobile --ladder --picture speed.png": "must be named .svg",
}


def test_what_is_given_holds_in_every_step_that_reads_it() -> None:
    steps = dict(LADDERS["fate"].steps(PRESETS["fate"], {"bits": "8", "percentile": "50"}))
    assert [changes.get("bits") for changes in steps.values()] == [8, 8, 8, 8]
    assert [changes.get("percentile") for changes in steps.values()] == [None, 50, 50, 50]


def test_tables_and_pictures_have_every_row(tiermoe_: Command, file: Path, profiles: Path, tmp_path: Path) -> None:
    start = ("simulate", file, "--link", "300B/s", "--profiles", profiles)
    for words, names in (
        (("--presets", "lru,fate", "--sweep", "allotment=pool,even"), ["lru", "fate *", "pool", "even"]),
        (("--preset", "fate", "--ladder"), ["fate: LoD, 16 bits", "+ prefetch", "+ cache", "+ quantisation"]),
        (("--presets", "lru,fate"), ["lru", "fate *"]),
    ):
        picture = tmp_path / "picture.svg"
        ended = tiermoe_(*start, *words, *(["--picture", picture] if missing_plots() is None else []))
        assert ended.code == 0, ended.err
        assert max(map(len, ended.out.splitlines())) <= 80
        assert "…" not in ended.out
        assert all(name in ended.out for name in names), ended.out
        if missing_plots() is None:
            assert all(f"{name.removesuffix(' *')}<" in picture.read_text() for name in names)


PHONE = Path(__file__).parents[2] / "shared" / "traces" / "qwen3-30b-a3b.csv"


@pytest.mark.skipif(not PHONE.exists(), reason="the trace of a real model is not here")
def test_a_real_trace_hits_as_others_found() -> None:
    (row,) = compare_evictions(read_trace(PHONE), ["lru"], [CacheSize(fraction=0.3)])
    assert row.hit_rate == pytest.approx(0.88, abs=0.01)
    assert row.belady_hit_rate == pytest.approx(0.955, abs=0.01)
