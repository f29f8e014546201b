"""The papers' figures: what is counted and replayed for them, and the command that prints them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import Command
from small_traces import TIMES, decode, layer, prompt, trace_of, write_trace
from tiermoe.config import CacheSize
from tiermoe.errors import ConfigError, TraceError
from tiermoe.lab.papers import PAPERS
from tiermoe.lab.papers import statistics as counted
from tiermoe.lab.papers.figure import KINDS, Counted, Loss, Place, Ratio, Replayed, Row, Runs, Side, Windows
from tiermoe.lab.papers.mobile import OFFLOADING, RTX_4080, AsOften, Estimated, at
from tiermoe.lab.simulate import ReplaySettings, machine_of, parse_link, replay, spread
from tiermoe.lab.sizes import Sizes
from tiermoe.lab.trace import Costs, Deciding, Little, Trace, read_trace
from tiermoe.offload.presets import compose

SATA = Place("jetson-tx2", "75%", seconds=(2e-3, 2e-4))


def small() -> Trace:
    return trace_of([decode(layer([0, 1]), layer([token % 4, 3])) for token in range(3)], nbytes=1 << 20)


def test_each_paper_has_a_figure_once_and_every_setting_is_one_that_the_parts_read() -> None:
    for paper in PAPERS.values():
        names = [figure.name for figure in paper.figures] + list(paper.missing)
        assert len(names) == len(set(names))
        for row in (row for figure in paper.figures for row in figure.rows):
            for measure in (row.ours, *row.moved.values()):
                for side in (getattr(measure, name) for name in ("ours", "theirs", "side") if hasattr(measure, name)):
                    compose(side.preset, dict(side.changes))
                if isinstance(measure, Ratio | Replayed):
                    machine_of(measure.place.machine, None, None)
    assert sum(len(paper.figures) for paper in PAPERS.values()) >= 35


def test_a_ratio_is_that_of_two_replays() -> None:
    trace, machine = small(), parse_link("sata")
    times = spread(trace.header, 2e-3, 2e-4)

    def speed(preset: str, nbytes: int) -> float:
        settings = ReplaySettings(CacheSize(nbytes=nbytes), machine.bandwidth, machine.latency, bits=4, times=times)
        return replay(trace, compose(preset, {}), settings).metrics.decode.tok_s

    ratio = Ratio(Side("lru"), Side("load-on-demand"), SATA)
    expected = speed("lru", 6 << 20) / speed("load-on-demand", 6 << 20)
    assert expected > 1.2
    assert float(ratio.value(Runs(trace))) == pytest.approx(expected, abs=0.005)
    half = Ratio(Side("lru", bits=2, share="50%", share_of=4), Side("load-on-demand"), SATA)
    assert float(half.value(Runs(trace))) > float(ratio.value(Runs(trace)))


def test_a_baseline_runs_in_the_bits_that_a_row_names() -> None:
    runs = Runs(small())
    read = [runs.replayed(Side("io-qexp", bits=bits), SATA).metrics.decode.bytes_read for bits in (None, 4, 2)]
    assert read[0] == read[1] == 2 * read[2]  # its preset says 4
    assert runs.replayed(Side("sti", bits=2), SATA).bytes_read < runs.replayed(Side("sti"), SATA).bytes_read


def test_a_cpu_beside_the_gpu_may_be_faster_for_one_side() -> None:
    passes = [decode(layer([token % 4, 3])) for token in range(8)]
    runs, side = Runs(trace_of(passes, nbytes=1 << 26, dense_bytes=1 << 20)), Side("lru", {"misses": "cpu"})
    slow, fast = (runs.replayed(side.but(cpu=cpu), Place("rtx4090", "50%")) for cpu in (1, 100))
    assert fast.metrics.decode.tok_s > slow.metrics.decode.tok_s


def test_a_replay_of_a_papers_sizes_has_its_loads_and_its_computing() -> None:
    """Two experts of 8 M weights a layer over 520 MB/s, at 16 bits, and a dense part of 10 M weights a layer."""
    trace = small()
    trace.header.expert_bytes[16] = [1 << 22] * 2
    place = replace(SATA, share="50%", sizes=Sizes(8e6, 10e6), seconds=None)
    decode = Runs(trace).replayed(Side("load-on-demand", bits=16), place).metrics.decode
    tx2 = machine_of("jetson-tx2", None, None).processor
    assert tx2 is not None
    assert decode.bytes_read == 3 * 2 * 2 * 16e6  # three tokens, two layers
    assert decode.compute_s == pytest.approx(3 * 2 * ((2 * 16e6 + 20e6) / tx2.rate + tx2.layer_s), rel=1e-3)


@pytest.mark.parametrize(
    ("paper", "ours", "same"),
    [
        ("1.92 to 2.09", "1.43", True),
        ("1.92 to 2.09", "0.99", True),  # as fast, within 2 %
        ("1.5 at most", "0.93", False),
        (".99, 1.46", "0.80", True),  # the paper has both
        ("1.01, below 1", "1.30", True),
        (".91 to .95", "1.10", False),
        ("above 1", "0.94", False),
        ("1.8 at most with little memory", "0.94", False),
        ("the most", "1.10", None),
        ("1.28", "not had: no trace", None),
    ],
)
def test_the_order_of_a_ratio_is_the_papers_or_the_other(paper: str, ours: str, same: bool | None) -> None:
    assert Row("what", paper, Ratio(Side("lru"), Side("load-on-demand"), SATA)).same_order(ours) is same
    assert Row("what", paper, Loss(Side("lru"))).same_order(ours) is None


def test_each_row_has_a_kind_and_what_is_given_says_by_what() -> None:
    rows = [row for paper in PAPERS.values() for figure in paper.figures for row in figure.rows]
    assert {row.kind for row in rows} == set(KINDS)
    for row in rows:
        assert (row.kind == "given") == bool(row.given)
        assert all(measure.kind in KINDS for measure in row.moved.values())


def test_a_theta_is_taken_as_it_was_printed() -> None:
    """`tiermoe calibrate` prints four digits of the theta that its profile has."""
    active = layer([0, 1], neurons={0: 0b01, 1: 0b10})
    trace = trace_of([decode(active, active)], neurons=2, neuron_bytes=100, head_bytes=100, times=TIMES)
    recorded = Trace(replace(trace.header, made_from={"theta": 0.2526}), trace.passes)
    settings = ReplaySettings(CacheSize(fraction=0.5), 1e9)
    corm = compose("corm", {"theta": 0.25259214639663696, "precision": "fixed", "prefetch": "none"})
    assert replay(recorded, corm, settings).metrics.decode.tokens == 1
    with pytest.raises(TraceError, match="active at theta 0\\.2526, preset corm asks for 0\\.253"):
        replay(recorded, corm.having({"theta": 0.253}), settings)


def test_fates_windows_are_of_the_machine_that_is_replayed() -> None:
    """A card from which nothing can be read while a layer is computed reads nothing ahead, PCIe 3.0 does."""
    passes = [decode(layer([0, 1], forecasts={1: [(2, 0.6), (3, 0.4)]}), layer([2, 3])) for _ in range(4)]
    trace = trace_of(passes, nbytes=1 << 20)

    def ahead(machine: str) -> int:
        side = Side("fate", {"precision": "fixed", "allotment": "pool", "cache": "lru"})
        result = Runs(trace).replayed(side, Place(machine, "50%", seconds=(2e-3, 2e-4)))
        return int(result.counts.speculative_loads)

    assert ahead("raspberry-pi-4b") == 0
    assert ahead("rtx3090") > 0


def test_mobiles_equation_is_of_times_that_were_replayed() -> None:
    passes = [
        decode(layer([0, 1]), layer([token % 4, 3]), little=Little(confidence, [layer([0, 1]), layer([token % 4, 3])]))
        for token, confidence in enumerate((0.9, 0.5, 0.8, 0.1))
    ]
    runs = Runs(trace_of(passes, nbytes=1 << 20, dense_bytes=1 << 20))
    seconds = [
        runs.replayed(side, RTX_4080).metrics.decode.seconds
        for side in (OFFLOADING, Side("mobile", {"routing": "half", "prefetch": "none"}), at(1.0))
    ]
    expected = seconds[0] / (seconds[1] + 0.5 * (seconds[2] - seconds[1]))
    assert float(Estimated(0.7).value(runs)) == pytest.approx(expected, abs=0.005)


def test_as_often_finds_the_gamma_of_as_many_fallbacks() -> None:
    passes = [
        decode(layer([0, 1]), layer([token % 4, 3]), little=Little(sure, [layer([0, 1]), layer([token % 4, 3])]))
        for token, sure in enumerate((0.9, 0.5, 0.8, 0.1))
    ]
    runs = Runs(trace_of(passes, nbytes=1 << 20, dense_bytes=1 << 20))
    assert AsOften(0.5, OFFLOADING).value(runs) == Ratio(at(0.5), OFFLOADING, RTX_4080).value(runs)
    assert AsOften(1.0, OFFLOADING).value(runs) == Ratio(at(0.9), OFFLOADING, RTX_4080).value(runs)
    with pytest.raises(TraceError, match="no little pass"):
        AsOften(0.5, OFFLOADING).value(Runs(small()))


def test_an_evaluation_is_made_once_and_has_its_error() -> None:
    asked: list[tuple[Side, Windows]] = []

    def evaluate(side: Side, windows: Windows) -> dict[str, Any]:
        asked.append((side, windows))
        return {"perplexity_loss": 0.01234 + 0.01 * (len(asked) - 1), "perplexity_loss_se": 0.002}

    runs = Runs(None, None, evaluate)
    assert [Loss(Side("lru")).value(runs) for _ in range(2)] == ["1.23% ± 0.20%"] * 2
    assert asked == [(Side("lru"), (32, 256))]
    # two runs differ if what is resident decides what computes: three of them, by their mean and range
    assert Loss(Side("hobbit"), (256, 32)).value(runs) == "3.23% ± 0.20% (2.23% to 4.23% in 3 runs)"
    assert asked[1:] == [(Side("hobbit"), (256, 32))] * 3
    with pytest.raises(ConfigError, match="give --model MODEL and --text FILE"):
        Loss(Side("fate")).value(Runs(small()))
    with pytest.raises(ConfigError, match="give --trace FILE"):
        Counted(counted.first_is_used_again, ".2f").value(runs)


# statistics, counted by hand


def test_uses_by_the_next_token() -> None:
    """First experts 0, 1, 1, and 2 in another sequence: 0 is not used again, 1 is; of {0, 3} none, of {1, 2} one."""
    passes = [decode(layer([0, 3])), decode(layer([1, 2])), decode(layer([1, 0])), decode(layer([2, 1]), sequence=1)]
    trace = trace_of(passes)
    assert counted.first_is_used_again(trace) == 0.5
    assert counted.one_is_used_again(trace) == 0.5
    assert counted.first_at_random(trace) == 0.5
    assert counted.one_at_random(trace) == pytest.approx(5 / 6)  # of 6 pairs one has neither of two


def test_the_most_used_experts_of_a_sequence_and_of_all() -> None:
    trace = trace_of([decode(layer([0])), decode(layer([0])), decode(layer([1]), sequence=1)], top_k=1)
    assert counted.most_used(0.25, per_sequence=True)(trace) == 1
    assert counted.most_used(0.25, per_sequence=False)(trace) == pytest.approx(2 / 3)


def test_paths_are_the_first_experts_of_three_layers() -> None:
    tokens = [(0, 1, 2, 0), (0, 1, 2, 1), (0, 1, 2, 3), (1, 1, 0, 2)]
    trace = trace_of([decode(*(layer([expert, 3]) for expert in token)) for token in tokens])
    # of layers 0 to 2: 012 three times, 110 once; of layers 1 to 3: 120, 121, 123, 102 once each
    assert counted.paths_covered(1 / 6)(trace) == 3 / 8
    # the second layer is of the next token, the third of the one after
    assert counted.paths_covered(1 / 7, apart=1)(trace) == 2 / 8  # 012, 010, 012, 112; 123, 122, 100, 121
    with pytest.raises(TraceError, match="no path occurs twice"):
        counted.paths_covered(0.2)(trace_of(trace.passes[3:]))


def test_unpopular_experts_of_a_prompt() -> None:
    trace = trace_of([prompt(layer([0], [0], [0], [1], [2], [2]))], top_k=1)  # active: 3, 1 and 2 tokens
    assert counted.popular_tokens(0.34)(trace) == pytest.approx(1 / 6)
    with pytest.raises(TraceError, match="holds no prompts"):
        counted.popular_tokens(0.3)(small())


def test_the_first_expert_of_a_forecast() -> None:
    passes = [
        decode(layer([0, 1], forecasts={1: [(named, 0.9), (1, 0.1)]}), layer([used, 1]))
        for named, used in ((2, 2), (3, 0))
    ]
    assert counted.first_predicted(1)(trace_of(passes)) == 0.5
    with pytest.raises(TraceError, match="no forecasts 2 layers on"):
        counted.first_predicted(2)(trace_of([decode(*[layer([0, 1])] * 3)]))


def test_recall_is_judged_on_the_sequences_between() -> None:
    """Counted on sequence 0, where layer 1 has 1 after 0; judged on sequence 1, where it has it once of twice."""
    pairs = [(0, 1, 0), (0, 1, 0), (0, 1, 1), (0, 2, 1)]
    trace = trace_of([decode(layer([a]), layer([b]), sequence=sequence) for a, b, sequence in pairs], top_k=1)
    assert counted.recall_of("path 1")(trace) == 0.5
    assert counted.recall_by_layer("path 1")(trace) == [None, 0.5]
    with pytest.raises(TraceError, match="nothing that recalled names"):
        counted.recall_of("recalled")(trace_of(trace.passes, top_k=1, holds=frozenset()))


def test_fallbacks_weights_neurons_and_sizes() -> None:
    one = layer([0, 1], weights=[[0.75, 0.25]], neurons={0: 0b0111, 1: 0b0001})
    passes = [decode(one, little=Little(sure, [one])) for sure in (0.9, 0.6, 0.7, 0.1)]
    trace = trace_of(passes, neurons=4, dense_bytes=100)
    assert counted.fallback_ratio(0.6)(trace) == 0.5  # kept strictly above gamma
    assert counted.first_weight(trace) == [0.75]
    assert counted.inactive_neurons(trace) == [0.5]
    trace.header.expert_bytes[16] = [400]
    assert counted.memory_saved(0.5, 4)(trace) == pytest.approx((100 + 4 * 400) / (100 + 2 * 100))
    assert counted.bytes_moved(4)(trace) == 4
    with pytest.raises(TraceError, match="no little pass"):
        counted.fallback_ratio(0.5)(small())


def test_hits_without_time() -> None:
    passes = [decode(layer([expert])) for expert in (0, 1, 0, 1, 2)]
    assert counted.hits("lru", 0.5)(trace_of(passes, top_k=1)) == 0.4


# the command


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    passes = [decode(layer([0, 1]), layer([token % 4, 3]), sequence=token // 2) for token in range(4)]
    return write_trace(tmp_path / "small.trace", trace_of(passes, nbytes=1 << 20, times=TIMES, dense_bytes=1 << 20))


def test_lists_and_tables(tiermoe_: Command, trace_file: Path) -> None:
    papers = tiermoe_("paper").out
    assert all(name in papers for name in PAPERS)
    assert "figure 13" in tiermoe_("paper", "fate").out
    rows = json.loads(tiermoe_("paper", "hobbit", "--figure", "10a", "--trace", trace_file, "--json").out)
    assert (rows[0]["figure"], rows[0]["what"]) == ("figure 10a", "the first expert")
    assert {row["paper"] for row in rows} == {"above .25", ".25", "above .46", ".46"}
    table = tiermoe_("paper", "edgemoe", "--figure", "figure 13", "--trace", trace_file, "--markdown").out
    assert "| 13 | EdgeMoE's, 10% of the experts | counted | the most |" in table
    assert table.count("\n| 13 |") == 15
    without = tiermoe_("paper", "fate", "--figure", "12", "--trace", trace_file, "--json").out
    assert "--profiles" in json.loads(without)[0]["ours"]


def test_replays_charge_the_costs_of_the_trace_that_is_named(
    tiermoe_: Command, trace_file: Path, tmp_path: Path
) -> None:
    trace = read_trace(trace_file)
    costs = Costs(1e9, 0.0, 1, 0.0, {"lru": Deciding({}, 1.0, 1.0)})  # longer than all else
    other = write_trace(tmp_path / "other.trace", Trace(replace(trace.header, costs=costs), trace.passes))

    def waited(*words: object) -> float:
        row = json.loads(tiermoe_("paper", "hobbit", "--figure", "3a", "--trace", trace_file, "--json", *words).out)[0]
        return float(row["ours"].rstrip("%"))

    assert waited("--costs", other) == 0 < waited()
    alone = tiermoe_("paper", "hobbit", "--figure", "3a", "--costs", other, "--model", "m", "--text", "t").cause
    assert "give --trace FILE beside it" in alone
    without = tiermoe_("paper", "hobbit", "--figure", "3a", "--trace", other, "--costs", trace_file).cause
    assert "holds no costs; make it again with tiermoe trace --costs" in without


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("corn",), "unknown paper 'corn'; known: hobbit, edgemoe, mobile, fate, corm"),
        (("fate", "--figure", "99"), "no figure 99 of fate here; known: table 1, section 4.2"),
        (("hobbit", "--figure", "7a"), "figure 7a of hobbit cannot be had here: a trace holds choices"),
        (("fate", "--figure", "12"), "on which model? give --trace FILE"),
        (("fate", "--figure", "12", "--model", "m"), "--model and --text go together"),
        (("--figure", "12"), "--figure 12 of which paper?"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], error: str, tiermoe_: Command) -> None:
    assert error in tiermoe_("paper", *words).cause
