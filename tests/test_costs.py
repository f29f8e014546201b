"""What the engine spends beside kernels: from runs by hand, in a trace file, and as a replay charges it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import Command
from small_traces import TIMES, decode, layer, prompt, trace_of, write_trace
from tiermoe.config import CacheSize
from tiermoe.lab.measure.costs import costs_of, with_link
from tiermoe.lab.simulate import Machine, NamedLink, ReplaySettings, Result, replay, settings_on
from tiermoe.lab.simulate.costs import deciding_of
from tiermoe.lab.simulate.machines import Processor
from tiermoe.lab.trace import Costs, Deciding, Pass, Times, Trace, read_trace
from tiermoe.metrics import PhaseMetrics
from tiermoe.offload.presets import PRESETS, compose

LAYERS = 2
T0, LOAD, LAYER = 0.010, 0.0005, 0.001


def run(loads: int, layer_s: float, wait_s: float = 0.0, fallbacks: float = 0.0) -> dict[str, Any]:
    """What `tiermoe eval --json` prints of 100 decoded tokens and a prompt of 10 with 6 loads and .25 s of waiting.
    A pass takes T0, LOAD for each of `loads` loads and `layer_s` for each layer; a prompt half of that a layer."""
    seconds = 100 * ((1 + fallbacks) * (T0 + LAYERS * layer_s) + loads * LOAD + wait_s)
    prompt = 10 * T0 + 6 * LOAD + LAYERS * layer_s / 2 + 0.25
    found = {"tokens": 101, "windows": 1, "prompt": 10, "loads": 6 + 100 * loads, "speculative_loads": 0}
    found |= {"decode_loads": 100 * loads, "decode_wait_s": 100 * wait_s, "wait_s": 100 * wait_s + 0.25}
    return found | {"decode_tok_s": 100 / seconds, "prefill_tok_s": 10 / prompt, "fallback_ratio": fallbacks}


def test_costs_follow_from_runs() -> None:
    free = run(0, 0.0) | {"loads": 0, "wait_s": 0.0, "prefill_tok_s": 1 / T0}
    runs = {
        "io-free": free, "load-on-demand": run(8, LAYER, 0.004), "lru": run(3, LAYER, 0.001),
        "mobile": run(5, 3 * LAYER, 0.002, fallbacks=0.5),
    }  # fmt: skip
    times = Times(0.5, {4: 0.001}, 0.0, {4: 0.0}, layers=0.3)
    fitted, costs = costs_of(runs, {name: PRESETS[name] for name in runs}, times, [2, 2], 4)
    assert fitted.dense == pytest.approx(T0 - 4 * 0.001)
    assert fitted.layers == fitted.dense  # no more than all
    assert costs.load == pytest.approx(LOAD)
    decided = {name: deciding.decode for name, deciding in costs.presets.items()}
    assert decided == pytest.approx({"io-free": 0, "load-on-demand": LAYER, "lru": LAYER, "mobile": 3 * LAYER})
    assert costs.presets["mobile"].prefill == pytest.approx(1.5 * LAYER)
    assert costs.presets["mobile"].parts["routing"] == "confident"


def costs(**more: Any) -> Costs:
    parts = {"unit": "expert", "precision": "fixed", "prefetch": "none", "routing": "all", "cache": "lru"}
    known = {
        "lru": Deciding(parts, 0.25, 0.0),
        "mixtral-offload": Deciding(parts | {"prefetch": "next-gate"}, 0.75, 0.0),
        "hobbit": Deciding(parts | {"precision": "gate-score", "prefetch": "stacked-gates"}, 3.0, 0.0),
    }
    return Costs(100.0, 0.0, 1, 0.125, known, **more)


def seconds(trace: Trace, preset: str, times: Times | None = None, **changes: Any) -> Result:
    settings = ReplaySettings(CacheSize(fraction=0.5), 100.0, times=times)
    return replay(trace, compose(preset, changes), settings)


def test_a_replay_charges_deciding_and_asking() -> None:
    """Two tokens through two layers, four slots of eight: the first token loads four experts, the second one in its
    last layer."""
    ahead = {1: [(0, 0.6), (1, 0.4)]}
    passes = [decode(layer([0, 1], forecasts=ahead), layer([0, second])) for second in (1, 2)]
    trace = trace_of(passes, times=TIMES)
    charged = Trace(replace(trace.header, costs=costs()), trace.passes)
    free, dear = seconds(trace, "lru"), seconds(charged, "lru")
    assert free.deciding_s == 0
    assert dear.counts.loads == 5
    # the second token's first layer has all that it asks for, and decides nothing
    assert dear.deciding_s == pytest.approx(3 * 0.25 + 5 * 0.125)
    ahead_of = seconds(charged, "mixtral-offload", allotment="pool")
    loads = ahead_of.counts.loads + ahead_of.counts.speculative_loads
    assert ahead_of.deciding_s == pytest.approx(4 * 0.75 + loads * 0.125)  # every layer
    # where nothing is waited for, all of it is added; a load overlaps it
    assert dear.metrics.decode.seconds > free.metrics.decode.seconds
    assert dear.metrics.decode.compute_s == free.metrics.decode.compute_s
    # another machine's computing times change none of it
    assert seconds(charged, "lru", replace(TIMES, dense=0.7)).deciding_s == pytest.approx(3 * 0.25 + 5 * 0.125)


def test_a_machine_charges_layers_and_what_the_engine_spent() -> None:
    """A layer takes 1/8 s whatever its size, its dense part 1/4 s, and an expert 1/12 s after one of loading; a decoded
    token decides a layer in 1/4 s and each load in 1/8 s. A prompt's two tokens take 1.2 s each, .4 s by expert."""
    machine = Machine("m", NamedLink("l", 100.0, 0.0, ""), Processor(1200.0, "", 1000.0, 0.125))
    passes = [decode(layer([0, 1]), layer([0, 1]))] * 2
    both = prompt(layer([0, 1], [0, 1]), layer([0, 1], [0, 1]))

    def took(*passes: Pass) -> PhaseMetrics:
        trace = trace_of(passes, dense_bytes=600, made_from={"dense_bits": 8})
        header = replace(trace.header, costs=costs())
        settings = settings_on(machine, header, CacheSize(fraction=1.0))
        return replay(Trace(header, trace.passes), compose("lru"), settings).metrics.total

    # first token: 1/8 + 1/4, two loads while 1/4 is decided, the second one computed, and 2/8 for the loads;
    # the second has all: 1/8 + 1/4 and two experts
    assert took(*passes).seconds == pytest.approx(2 * (0.375 + 2 + 1 / 12 + 0.25) + 2 * (0.375 + 2 / 12))
    assert took(*passes).compute_s == pytest.approx(4 * 0.375 + 8 / 12)
    assert took(both).seconds == pytest.approx(2 * (0.125 + 1.2 + 2 + 1 / 12 + 0.4 + 0.25))


def test_a_composition_that_was_not_measured_takes_the_nearest_ones_time() -> None:
    passes = [decode(layer([0, 1]), layer([0, 1]))]
    charged = Trace(replace(trace_of(passes, times=TIMES).header, costs=costs()), passes)
    lfu = seconds(charged, "lru", cache="lfu")  # shares all but the eviction with lru
    assert lfu.deciding_s == pytest.approx(2 * 0.25 + 4 * 0.125)
    path = deciding_of(charged.header, compose("eap", {"cache": "lru"}))  # reads ahead, as mixtral-offload does
    assert path == costs().presets["mixtral-offload"]
    low = seconds(charged, "lru", precision="gate-score", t1=0.9, t2=0.95)  # the precision comes before the prediction
    assert low.deciding_s == pytest.approx(2 * 3.0 + (low.counts.loads) * 0.125)


def test_the_link_is_the_one_over_which_replays_wait_as_long() -> None:
    """Four experts a layer on demand, one or two with an LRU cache: what a layer waits tells latency from bandwidth."""
    choices = [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 4, 5], [0, 2, 4, 6]] * 8
    passes = [decode(layer(chosen), layer([0, 2, 4, (token * 3) % 7 + 1])) for token, chosen in enumerate(choices)]
    trace = trace_of(passes, experts=8, top_k=4, nbytes=1000, times=TIMES)
    charged = Trace(replace(trace.header, costs=replace(costs(), lanes=4)), passes)
    runs = {}
    for name in ("load-on-demand", "lru"):
        real = replay(charged, PRESETS[name], ReplaySettings(CacheSize(fraction=0.45), 2000.0, 1.5, 4)).metrics.decode
        runs[name] = run(0, 0.0) | {"decode_wait_s": 100 * real.wait_s / real.tokens}
    found = with_link(charged, runs)
    assert found.latency == pytest.approx(1.5, rel=0.05)
    assert found.bandwidth == pytest.approx(2000, rel=0.1)


def test_costs_in_a_file_and_in_the_command(tiermoe_: Command, tmp_path: Path) -> None:
    passes = [decode(layer([0, 1]), layer([token % 4, 3])) for token in range(4)]
    trace = trace_of(passes, times=TIMES)
    path = write_trace(tmp_path / "plain", trace)
    assert read_trace(path).header.costs is None
    assert "how fast is the link?" in tiermoe_("simulate", path).cause
    path = write_trace(tmp_path / "costs", Trace(replace(trace.header, costs=costs()), passes))
    assert read_trace(path).header.costs == costs()
    (row,) = json.loads(tiermoe_("simulate", path, "--preset", "lru", "--cache", "50%", "--json").out)
    assert "as the trace measured" in row["link"]
    assert row["deciding_s"] > 0
    (other,) = json.loads(
        tiermoe_("simulate", path, "--preset", "lru", "--cache", "50%", "--link", "1GB/s", "--json").out
    )
    assert other["decode_tok_s"] > row["decode_tok_s"]


def test_a_traced_link_has_the_trace_s_lanes_unless_others_are_given(tiermoe_: Command, tmp_path: Path) -> None:
    """Four loads at once, with a latency that lanes overlap."""
    trace = trace_of([decode(layer([0, 1, 2, 3]))], top_k=4, times=TIMES)
    known = replace(costs(), lanes=4, latency=1.0)
    path = write_trace(tmp_path / "t", Trace(replace(trace.header, costs=known), trace.passes))

    def waited(*words: str) -> float:
        (row,) = json.loads(tiermoe_("simulate", path, "--preset", "lru", "--cache", "100%", "--json", *words).out)
        return float(row["wait_s"])

    assert waited() == waited("--lanes", "4") < waited("--lanes", "1")


def test_the_engine_measures_costs_where_a_trace_is_made(tiermoe_: Command, shipped: Path, tmp_path: Path) -> None:
    text = shipped.parents[1] / "data" / "heldout.txt"
    words = ("--tokens", "64", "--prompt", "8", "--sequence", "40", "--memory", "4GiB", "--store", tmp_path / "store")
    done = tiermoe_("trace", shipped, "--text", text, "--out", tmp_path / "t", *words, "--costs", "lru,fate")
    assert "left out fate" in done.err  # which is not calibrated
    header = read_trace(tmp_path / "t").header
    assert header.costs is not None
    assert [*header.costs.presets] == ["io-free", "load-on-demand", "lru"]
    assert header.costs.bandwidth > 0
    assert header.times is not None
