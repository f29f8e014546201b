"""Traces by others: forecasts, little passes and neurons that are drawn as asked, profiles that are counted on the
trace, and every paper's preset on public traces. A folder that ROUTE_TRACES names has more of those, as CSV."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from commands import Command
from small_traces import TIMES, decode, layer, prompt, replayed, trace_of, write_trace
from tiermoe.config import CacheSize
from tiermoe.errors import ProfileError, TraceError
from tiermoe.lab.measure.counted import LOW_SHARE, counted_profile, measured_recall, parted
from tiermoe.lab.papers import corm, hobbit
from tiermoe.lab.papers.statistics import decode_passes, recalls
from tiermoe.lab.simulate import ReplaySettings
from tiermoe.lab.simulate.costs import RECALL
from tiermoe.lab.simulate.profiles import borrowed, profile_of
from tiermoe.lab.simulate.synthetic import (
    ACTIVE,
    MISSED_TWICE,
    PERSISTENCE,
    RECALLED,
    Synthetic,
    completed,
    parse_recall,
)
from tiermoe.lab.trace import Trace, read_trace
from tiermoe.offload.policies.prediction import paths_from_json
from tiermoe.offload.profiles import Profile, to_json

LAYERS, EXPERTS, K, TOKENS = 5, 32, 4, 400


def routed(tokens: int = TOKENS, sequences: int = 1, **more: Any) -> Trace:
    """Decoded tokens that choose the first experts most, each sequence after a prompt of two."""
    chance = random.Random(1)

    def chosen() -> list[int]:
        return sorted(sorted(range(EXPERTS), key=lambda expert: chance.expovariate(1 / (1 + expert)))[:K])

    passes = []
    for sequence in range(sequences):
        passes.append(prompt(*(layer(chosen(), chosen()) for _ in range(LAYERS)), sequence=sequence))
        passes += [decode(*(layer(chosen()) for _ in range(LAYERS)), sequence=sequence) for _ in range(tokens)]
    return trace_of(passes, EXPERTS, K, 900, TIMES, frozenset({"weights"}), forecast_distances=[], **more)


def drawn(trace: Trace, recall: str, ahead: int = 1) -> Trace:
    return completed(trace, Synthetic(parse_recall(recall)), ahead)


# forecasts


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("0.9", {1: 0.9, 2: 0.81, 3: 0.729}),
        ("0.3", {1: 0.3, 2: 0.09, 3: 0.027}),
        ("96%,0.9,0.5", {1: 0.96, 2: 0.9, 3: 0.5}),
        ("hobbit", {1: 0.96, 2: 0.9, 3: 0.9}),
        ("fate", {1: 0.788, 2: 0.788**2}),
        ("0", {1: 0, 2: 0, 3: 0}),
        ("1", {1: 1, 2: 1, 3: 1}),
    ],
)
def test_the_recall_that_is_asked_for_is_measured(asked: str, expected: dict[int, float]) -> None:
    trace = drawn(routed(), asked)
    found = recalls(trace, trace, "next-gate")
    assert {before for _, before in found} == {1, 2, 3}
    for (_, before), share in found.items():
        if before in expected:  # four standard errors of as many draws
            assert share == pytest.approx(expected[before], abs=4 * 0.5 / (TOKENS * K) ** 0.5)
            assert expected[before] not in (0, 1) or share == expected[before]


def test_fates_recall_holds_above_the_percentile_too() -> None:
    trace = drawn(routed(), "fate")
    for share in recalls(trace, trace, "percentile").values():
        assert share == pytest.approx(0.9715, abs=0.02)
    trace = drawn(routed(), "0.5")
    for share in recalls(trace, trace, "percentile").values():
        assert share == pytest.approx(1 - 0.5 * MISSED_TWICE, abs=0.04)


def test_corms_recall_rises_from_the_lower_layers_to_the_middle() -> None:
    trace = drawn(routed(), "corm")
    found = [share for (_, before), share in recalls(trace, trace, "next-gate").items() if before == 1]
    assert found == pytest.approx([0.75, 0.85, 0.90, 0.90], abs=0.05)


def test_a_recall_is_measured_on_a_trace_by_layer_and_distance() -> None:
    own = drawn(routed(), "corm")
    again = completed(routed(), Synthetic(measured_recall(own, "FILE")))
    theirs, ours = (recalls(trace, trace, "next-gate") for trace in (own, again))
    assert ours == pytest.approx(theirs, abs=0.06)
    assert list(recalls(again, again, "percentile").values()) == pytest.approx(
        list(recalls(own, own, "percentile").values()), abs=0.03
    )


def test_a_ranking_names_each_expert_once_and_has_falling_weights() -> None:
    for passed in drawn(routed(30), "0.5").passes:
        for index, each in enumerate(passed.layers):
            for distance, ranking in each.forecasts.items():
                experts, weights = zip(*ranking, strict=True)
                assert len(set(experts)) == len(experts)
                assert list(weights) == sorted(weights, reverse=True)
                target = passed.layers[index + distance]
                if passed.phase == "decode":
                    assert list(weights[:K]) == sorted(target.weights[0], reverse=True)
                else:
                    assert sum(count for _, count in each.counts[distance]) == 2 * K


def test_wrong_experts_are_the_popular_ones_and_low_ranks_are_missed_most() -> None:
    trace = drawn(routed(), "0.6")
    wrong, named = Counter[int](), Counter[int]()
    for passed in decode_passes(trace):
        for index, each in enumerate(passed.layers[:-1]):
            first, own = [expert for expert, _ in each.forecasts[1][:K]], passed.layers[index + 1].experts[0]
            wrong.update(set(first) - set(own))
            named.update(rank for rank, expert in enumerate(own) if expert in first)
    assert sum(wrong[expert] for expert in range(EXPERTS // 2)) > 0.6 * sum(wrong.values())
    assert [named[rank] for rank in range(K)] == sorted(named.values(), reverse=True)


def test_a_recall_of_one_prefetches_as_the_oracle_does() -> None:
    trace = routed(60)
    known = replayed(trace, slots=30, bandwidth=1e4, changes={"prefetch": "oracle", "ahead": "1"})
    named = replayed(drawn(trace, "1"), slots=30, bandwidth=1e4, changes={"prefetch": "next-gate", "ahead": "1"})
    worse = replayed(drawn(trace, "0.3"), slots=30, bandwidth=1e4, changes={"prefetch": "next-gate", "ahead": "1"})
    decoded = named.metrics.decode
    assert (decoded.counts.hits, decoded.bytes_read) == (
        known.metrics.decode.counts.hits,
        known.metrics.decode.bytes_read,
    )
    assert decoded.seconds == pytest.approx(known.metrics.decode.seconds)
    assert worse.hit_rate < named.hit_rate


def test_what_is_drawn_follows_from_the_seed_and_changes_no_choice() -> None:
    trace = routed(20)
    asked = Synthetic(parse_recall("0.8"), 0.25, 64)
    made = completed(trace, asked)
    assert made == completed(trace, asked)
    assert made != completed(trace, dataclasses.replace(asked, seed=1))
    for before, after in zip(trace.passes, made.passes, strict=True):
        assert [each.experts for each in before.layers] == [each.experts for each in after.layers]


# little passes and neurons


def test_the_share_that_is_asked_for_falls_back() -> None:
    trace = completed(routed(200), Synthetic(parse_recall("0.9"), 0.21))
    result = replayed(trace, "mobile", slots=30)
    assert result.metrics.fallback_ratio == 0.21
    found = recalls(trace, trace, "recalled")
    assert found.pop((1, 1)) == pytest.approx(RECALLED, abs=0.07)
    assert list(found.values()) == pytest.approx([RECALLED] * len(found), abs=0.07)
    assert (
        replayed(trace, "mobile", slots=30, changes={"prefetch": "recalled+next-gate"}).metrics.fallback_ratio == 0.21
    )
    for passed in decode_passes(trace):
        assert passed.little is not None
        assert passed.little.layers[0].experts == passed.layers[0].experts


def test_neurons_are_active_persist_and_are_named_as_stated() -> None:
    trace = completed(routed(), Synthetic(neurons=64))
    assert 3 * trace.header.head_bytes == trace.header.expert_bytes[4][0]
    assert trace.header.head_bytes + 64 * trace.header.neuron_bytes <= 900
    before: dict[tuple[int, int], int] = {}
    again = came = was = was_not = 0
    for passed in decode_passes(trace):
        for index, each in enumerate(passed.layers):
            assert sorted(each.neurons) == sorted(each.experts[0])
            for expert, active in each.neurons.items():
                if (index, expert) in before:
                    known = before[index, expert]
                    again, was = again + (active & known).bit_count(), was + known.bit_count()
                    came, was_not = came + (active & ~known).bit_count(), was_not + 64 - known.bit_count()
                before[index, expert] = active
    assert (again + came) / (was + was_not) == pytest.approx(ACTIVE, abs=0.01)
    assert again / was - came / was_not == pytest.approx(PERSISTENCE, abs=0.01)
    assert corm.neuron_recall(trace) == pytest.approx([RECALL] * LAYERS, abs=0.01)


# profiles


def test_profiles_are_counted_on_one_part_and_replayed_on_another() -> None:
    several = routed(4, sequences=4)
    counted, judged, _ = parted(several)
    assert ({each.sequence for each in counted.passes}, {each.sequence for each in judged.passes}) == ({0, 2}, {1, 3})
    one = routed(9)
    counted, judged, told = parted(one)
    assert (counted.passes, judged.passes) == (one.passes[1:5], [one.passes[0], *one.passes[5:]])
    assert told == "counted on the first 4 decoded tokens, replayed on the prompt and the other 5"
    with pytest.raises(TraceError, match="has 1 decoded tokens: too few"):
        parted(routed(1))


def test_a_profile_has_what_its_part_counts() -> None:
    counted = parted(drawn(routed(40), "corm"))[0]
    settings = ReplaySettings(CacheSize(fraction=0.3), 1e4, times=TIMES)
    uses = [Counter(e for passed in counted.passes for e in passed.layers[at].experts[0]) for at in range(LAYERS)]
    edgemoe = counted_profile("edgemoe", counted, settings).data
    assert edgemoe["frequencies"] == [[uses[at][expert] for expert in range(EXPERTS)] for at in range(LAYERS)]
    for at, row in enumerate(edgemoe["table"]):
        low = [expert for expert, bits in enumerate(row) if bits == 2]
        assert len(low) == int(LOW_SHARE * EXPERTS)
        assert max(uses[at][expert] for expert in low) <= min(uses[at][e] for e in range(EXPERTS) if e not in low)
    first, second, third = (tuple(counted.passes[0].layers[at].experts[0]) for at in range(3))
    assert all(paths_from_json(edgemoe["paths"])[2][first, second][expert] >= 1 for expert in third)
    found = counted_profile("hobbit", counted, settings).settings
    assert (found["t1"], found["t2"]) == hobbit.thresholds_of(counted)
    assert tuple(found["weights"]) in hobbit.WEIGHTS
    fate = counted_profile("fate", counted, settings).settings
    # a layer computes for .5 / 5 + 4 x .4 s, in which 1e4 bytes a second move 18 experts of 900 bytes
    assert fate["window"] == [18, 18, 18, 18, 0]
    assert fate["boundary"] in (2, 3)  # corm's recall rises: .75, .85, .90, .90
    for recall, boundary in (("corm", 2), ("0.9", 1)):  # as stated: .85 is the mean of corm's; all alike
        found = counted_profile("fate", counted, settings, parse_recall(recall)).settings
        assert found["boundary"] == boundary
    with pytest.raises(ProfileError, match="counts no profile of nimble"):
        counted_profile("nimble", counted, settings)


def test_a_profile_of_another_checkpoint_is_taken_if_the_shape_is_the_same(tmp_path: Path, tiermoe_: Command) -> None:
    """A widened model replays with the profiles of the small one, in `simulate` and in `paper`."""
    small = Profile("hobbit", "small", {}, {"t1": 0.4, "t2": 0.8, "weights": [1, 0, 0, 0]}, {}, "S", [32] * 5, [4] * 5)
    (tmp_path / "hobbit.json").write_bytes(to_json(small))
    wide = drawn(routed(5, dense_bytes=5000), "0.9")
    file = write_trace(tmp_path / "W.trace", wide)
    assert borrowed(profile_of(tmp_path, "hobbit", wide.header), wide.header) == (
        "hobbit: calibrated on S, replayed on a trace of tiny"
    )
    given = ("--profiles", tmp_path)
    ended = tiermoe_("simulate", file, "--preset", "hobbit", "--ladder", "--link", "nvme", *given)
    assert "calibrated on S, replayed on a trace of tiny" in ended.err
    ended = tiermoe_("paper", "hobbit", "--figure", "18a", "--trace", file, *given)
    assert "calibrated on S, replayed on a trace of tiny" in ended.err
    for wrong in ({"experts": [32] * 4}, {"experts": [16] * 5}, {"top_k": [2] * 5}):
        (tmp_path / "hobbit.json").write_bytes(to_json(dataclasses.replace(small, **wrong)))
        ended = tiermoe_("simulate", file, "--preset", "hobbit", "--link", "nvme", *given)
        assert "a trace of another model than the profile's" in ended.cause
        assert "the trace of tiny (5 layers of 32 experts, 4 a token)" in ended.cause
        same = dataclasses.replace(wide.header, fingerprint="small")
        assert profile_of(tmp_path, "hobbit", same).model == "S"
    older = {"format": "tiermoe-profile", "version": 1, "name": "hobbit", "fingerprint": "small", "made_from": {}}
    older |= {"settings": {}, "data": {"frequencies": [[1] * 32] * 4}}
    (tmp_path / "hobbit.json").write_text(json.dumps(older))
    for damaged in ({"experts": 3}, {"data": {"table": [1, 2]}}, {"top_k": None}):
        (tmp_path / "edgemoe.json").write_text(json.dumps(older | damaged))
        with pytest.raises(ProfileError, match="is damaged"):
            profile_of(tmp_path, "edgemoe", wide.header)
    with pytest.raises(ProfileError, match=r"is of checkpoint small \(4 layers of 32 experts\)"):
        profile_of(tmp_path, "hobbit", wide.header)


# public traces


def written(path: Path, model: str, layers: int, experts: int, k: int) -> Path:
    """A `route_trace` CSV: a prompt of two tokens, then twelve."""
    chance = random.Random(model)
    lines = ["# route_trace v1", f"# model={model} n_layer={layers} n_expert={experts} n_expert_used={k}"]
    lines += [f"# layer={at} expert_bytes=3000000 dense_bytes=9000000" for at in range(layers)]
    lines.append("turn,phase,step,layer,slot,expert,weight,residency,expert_bytes")
    for step in range(14):
        for at in range(layers):
            if at == layers - 1 and not step:
                continue  # the last layer runs for the prompt's last token alone
            chosen = sorted(range(experts), key=lambda expert: chance.expovariate(1 / (1 + expert)))[:k]
            lines += [
                f"0,{int(step > 1)},{step},{at},{slot},{expert},{(k - slot) / (k * (k + 1) / 2):.6g},0,3000000"
                for slot, expert in enumerate(chosen)
            ]
    path.write_text("\n".join(lines) + "\n")
    return path


SLICE = Path(__file__).parent / "data" / "qwen3-30b-a3b-20-tokens.csv.gz"
SHAPES = {"gpt-oss-20b-MXFP4": (10, 32, 4), "gemma-4-26B-A4B-Q4_K_M": (5, 128, 8)}
MORE = sorted(Path(os.environ["ROUTE_TRACES"]).glob("*.csv")) if "ROUTE_TRACES" in os.environ else []
PAPERS = ("hobbit", "edgemoe", "mobile", "fate", "corm")


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B-Q4_K_M", *SHAPES, *map(str, MORE)])
def test_every_papers_preset_replays_a_public_trace(name: str, tmp_path: Path, tiermoe_: Command) -> None:
    file = tmp_path / "t.csv"
    if name in SHAPES:
        written(file, name, *SHAPES[name])
    else:
        file.write_bytes(Path(name).read_bytes() if name.endswith(".csv") else gzip.decompress(SLICE.read_bytes()))
    ended = tiermoe_(
        "simulate", file, "--presets", ",".join(("lru", *PAPERS)), "--cache", "20%", "--machine", "rtx4090",
        "--profiles", "from-trace", "--recall", "0.9", "--fallback", "25%", "--neurons", "64", "--json",
    )  # fmt: skip
    rows = {row["preset"]: row for row in json.loads(ended.out)}
    assert [preset for preset, row in rows.items() if "refused" in row] == []
    assert all(0 < row["hit_rate"] <= 1 and row["decode_tok_s"] > 0 for row in rows.values())
    assert len({row["belady_hit_rate"] for row in rows.values() if abs(row["cache_fraction"] - 0.2) < 1e-3}) == 1
    assert rows["lru"]["hit_rate"] <= rows["lru"]["belady_hit_rate"]
    assert "forecasts" not in rows["lru"]
    assert rows["fate"]["forecasts"].startswith("simulated, recall .90, .81")
    assert rows["mobile"]["little_passes"].startswith("simulated, 25% fall back")
    assert rows["corm"]["neurons"].startswith("simulated, 45% of 64 active")
    assert "2 bits for each layer's 32% least used experts" in rows["edgemoe"]["profile"]
    decoded = len(decode_passes(parted(read_trace(file))[1]))
    assert rows["mobile"]["fallback_ratio"] == pytest.approx(0.25, abs=0.25 + 1 / decoded)


# the command


def test_recall_is_swept_and_replaces_recorded_forecasts(tmp_path: Path, tiermoe_: Command) -> None:
    trace = drawn(routed(20), "0.2")
    file = write_trace(tmp_path / "t", trace)
    start = ("simulate", file, "--preset", "mixtral-offload", "--cache", "30%", "--link", "20KB/s")
    rows = json.loads(tiermoe_(*start, "--sweep", "recall=0.3,1", "--json").out)
    assert [row["value"] for row in rows] == ["0.3", "1"]
    assert rows[0]["hit_rate"] < rows[1]["hit_rate"]
    assert rows[1]["forecasts"] == "simulated, recall 1, 1, 1 by layers ahead, in the place of recorded ones"
    (alone,) = json.loads(tiermoe_(*start, "--recall", "1", "--json").out)
    assert alone["hit_rate"] == rows[1]["hit_rate"]
    told = tiermoe_(*start, "--recall", file).err
    assert "forecasts: simulated, recall .1" in told or "forecasts: simulated, recall .2" in told


def test_rows_that_a_replay_cannot_tell_apart_are_one(tmp_path: Path, tiermoe_: Command) -> None:
    file = write_trace(tmp_path / "t", routed(3))
    start = ("simulate", file, "--presets", "load-on-demand,io-qexp,lru", "--link", "nvme")
    rows = json.loads(tiermoe_(*start, "--json").out)
    assert [row.get("same_as") for row in rows] == [None, "load-on-demand", None]
    shown = tiermoe_(*start)
    assert "io-qexp" not in shown.out
    assert "left out io-qexp: a replay cannot tell it from load-on-demand" in shown.err
    assert "io-qexp" in tiermoe_("simulate", file, "--preset", "io-qexp", "--link", "nvme").out
    apart = tiermoe_(*start, "--bits", "2", "--json")  # given bits are both presets'
    assert [row.get("same_as") for row in json.loads(apart.out)] == [None, "load-on-demand", None]


REFUSED = {
    "--preset default --recall 1.1": "--recall must be from 0 to 1, got 1.1",
    "--preset default --recall=-0.1": "--recall must be from 0 to 1, got -0.1",
    "--preset default --recall 90": "--recall must be from 0 to 1, got 90",
    "--preset default --recall nan": "--recall must be from 0 to 1, got nan",
    "--preset default --recall much": "is neither a number from 0 to 1, numbers with commas, one of fate, hobbit, corm",
    "--preset default --recall 0.9,0.8 --set ahead=3": "is of 2 layers ahead, and the preset looks 3 ahead",
    "--preset lru --recall 0.9": "--recall simulates forecasts, and no preset that is named reads any",
    "--preset default --recall TRACE": "holds no forecasts, of which a recall could be measured",
    "--preset mobile --fallback 120%": "--fallback must be from 0% to 100%",
    "--preset mobile --fallback often": "'often' is not a share",
    "--preset mobile --fallback 20% --set gamma=0.5": "gamma decides nothing in simulated little passes",
    "--preset lru --fallback 20%": "--fallback simulates little passes, and no preset that is named reads any",
    "--preset corm --neurons 0": "--neurons 0 of an expert of 900 bytes cannot be",
    "--preset corm --neurons 64 --set theta=0.3": "theta decides nothing in simulated neurons",
    "--preset edgemoe": "have tiermoe simulate count them with --profiles from-trace",
    "--preset mobile": "have them simulated (tiermoe simulate --recall, --fallback, --neurons)",
    "--evictions lru --recall 0.9": "--recall has no effect on --evictions",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_recall_is_told_in_a_line(words: str, tmp_path: Path, tiermoe_: Command) -> None:
    file = write_trace(tmp_path / "t", routed(4))
    link = () if "--evictions" in words else ("--link", "nvme")
    said = [str(file) if word == "TRACE" else word for word in words.split()]
    profiles = ("--profiles", "from-trace") if "corm" in words else ()
    assert REFUSED[words] in tiermoe_("simulate", file, *said, *link, *profiles).cause


def test_an_encoders_forecasts_are_refused() -> None:
    with pytest.raises(TraceError, match="has an encoder"):
        drawn(routed(2, encoder_layers=2), "0.9")
