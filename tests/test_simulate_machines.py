"""Replays on the papers' machines: a CPU beside a GPU, main memory between a drive and a GPU, times from bandwidths;
all by hand, and against a plain reference."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_link import each, pools
from gpu_rig import EXPERTS, LAYERS, Rig
from small_traces import TIMES, decode, layer, prompt, replayed, trace_of, write_trace
from tiermoe.config import CacheSize
from tiermoe.errors import ConfigError, TiermoeError, TraceError
from tiermoe.lab.cli.simulate import simulate
from tiermoe.lab.simulate import LINKS, MACHINES, NamedLink, machine_of
from tiermoe.lab.simulate.costs import computed_times
from tiermoe.lab.simulate.link import HostTier, Move, VirtualClock, VirtualLink
from tiermoe.lab.simulate.machines import Processor
from tiermoe.lab.trace import Trace
from tiermoe.offload.loader import ExpertLoader
from tiermoe.offload.second_level import SecondLevelCache
from tiermoe.types import Demand

DRIVE = NamedLink("slow", 50.0, 0.0, "half as fast as the link")
"""An expert of 100 bytes takes two seconds from here, and one over the link."""


def ram(slots: int) -> dict[str, Any]:
    return {"ram": CacheSize(nbytes=100 * slots), "drive": DRIVE}


# a CPU beside a GPU


def decoded_s(cpu_s: float, misses: str = "cpu") -> float:
    """Seconds of a token that finds one of its experts, after a prompt that brought two others."""
    trace = trace_of([prompt(layer([0, 1])), decode(layer([0, 2]))])
    result = replayed(trace, changes={"misses": misses}, cpu={4: cpu_s})
    assert (result.counts.hits, result.counts.cpu_fallback, result.bytes_read) == (1, 1, 200)
    assert result.decode_tok_s is not None
    return 1 / result.decode_tok_s


def test_the_cpu_computes_what_the_gpu_lacks_at_the_same_time() -> None:
    assert decoded_s(0.3) == pytest.approx(0.5 + 0.4)  # the GPU's expert takes longer
    assert decoded_s(0.6) == pytest.approx(0.5 + 0.6)  # the GPU waits


def test_the_cpu_computes_one_expert_after_the_other_and_loads_none() -> None:
    result = replayed(trace_of([decode(layer([0, 1]), layer([2, 3]))]), changes={"misses": "cpu"}, cpu={4: 0.3})
    # dense .25, two experts of .3, twice
    assert result.decode_tok_s == pytest.approx(1 / (2 * (0.25 + 0.6)))
    assert (result.counts.misses, result.counts.cpu_fallback, result.counts.loads) == (4, 4, 0)
    assert result.bound_tok_s == pytest.approx(result.decode_tok_s)  # waiting for a processor is computing


def test_as_many_misses_as_end_with_the_loads_of_the_others() -> None:
    passes = [decode(layer([first, first + 1, first + 2])) for first in (0, 3)]
    result = replayed(trace_of(passes, experts=6, top_k=3), changes={"misses": "measured"}, cpu={4: 0.4})
    # first one, since nothing is measured: 2 on the CPU take .4 while 0 and 1 come until 2.5 and run until 2.9
    # then of three: none 3 s, one 2 s, two 1 s (2 x .4 less), three 1.2 s: 3 comes until 1.0, runs until 1.4
    assert result.counts.cpu_fallback == 1 + 2
    assert result.decode_tok_s == pytest.approx(2 / (2.9 + 0.5 + 1.0 + 0.4))


def test_a_machine_without_a_cpu_beside_its_gpu_is_named() -> None:
    trace = trace_of([decode(layer([0, 1]))])
    for misses in ("cpu", "measured"):
        with pytest.raises(ConfigError, match=rf"misses={misses}.*has none; take --machine rtx4090"):
            replayed(trace, changes={"misses": misses})
    neurons = trace_of([decode(layer([0, 1]))], head_bytes=1, neuron_bytes=1, neurons=3)
    for options in ({"changes": {"unit": "neuron", "theta": 0.1, "misses": "cpu"}, "cpu": {4: 1.0}},
                    {"changes": {"unit": "neuron", "theta": 0.1}, **ram(4)}):  # fmt: skip
        with pytest.raises(ConfigError, match="main memory has all experts"):
            replayed(neurons, **options)


# main memory between a drive and a GPU


def test_what_main_memory_holds_is_not_read_again() -> None:
    trace = trace_of([decode(layer([expert])) for expert in (0, 1, 2, 0)], top_k=1)
    result = replayed(trace, slots=2, **ram(3))
    # three are read and copied, 2 + 1 s; 0 has left the GPU and is copied again, 1 s
    assert result.decode_tok_s == pytest.approx(4 / (4 * 0.9 + 3 * 3 + 1))
    assert result.second_level == {"host_hits": 1, "host_misses": 3, "bytes_copied": 400}
    assert result.bytes_read == 300  # from the drive, which takes longer for them than the link for the copies
    assert result.bound_tok_s == pytest.approx(4 / 6.0)
    fast = replayed(trace, slots=2, latency=0.5, ram=CacheSize(nbytes=300), drive=NamedLink("fast", 400.0, 0.0, ""))
    # four copies of 1.5 s, which are 400 bytes at 100 a second: more than 3.6 s of computing and 300 bytes at 400
    assert (fast.metrics.decode.copy_s, fast.metrics.decode.read_s) == (pytest.approx(6.0), pytest.approx(0.75))
    assert fast.bound_tok_s == pytest.approx(4 / 4.0)
    less = replayed(trace, slots=2, **ram(2))
    assert less.second_level == {"host_hits": 0, "host_misses": 4, "bytes_copied": 400}


def test_two_lanes_share_the_drive_and_copies_follow_each_other() -> None:
    result = replayed(trace_of([decode(layer([0, 1]))]), lanes=2, **ram(4))
    # both read until 4.5, copied until 5.5 and 6.5, 1 runs until 6.9
    assert result.decode_tok_s == pytest.approx(1 / 6.9)
    # one lane: 0 read until 2.5, copied until 3.5 | 1 read until 4.5, copied until 5.5 | 1 runs until 5.9
    assert replayed(trace_of([decode(layer([0, 1]))]), **ram(4)).decode_tok_s == pytest.approx(1 / 5.9)
    for lacking in ({"ram": CacheSize(nbytes=100)}, {"drive": DRIVE}):
        with pytest.raises(ConfigError, match="give both"):
            replayed(trace_of([decode(layer([0, 1]))]), **lacking)


def test_the_cpu_waits_for_the_drive_where_main_memory_lacks_an_expert() -> None:
    trace = trace_of([decode(layer([0])), decode(layer([0]))], top_k=1)
    result = replayed(trace, changes={"misses": "cpu"}, cpu={4: 0.3}, **ram(2))
    # read in two seconds the first time, there the second
    assert result.decode_tok_s == pytest.approx(2 / ((0.5 + 2.0 + 0.3) + (0.5 + 0.3)))
    assert result.second_level == {"host_hits": 1, "host_misses": 1, "bytes_copied": 0}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.permutations(range(6)).map(lambda order: sorted(order[:2])), min_size=1, max_size=14),
       st.integers(2, 4), st.integers(3, 6))  # fmt: skip
def test_main_memory_hits_as_a_plain_lru_behind_a_plain_lru(chosen: list[list[int]], slots: int, second: int) -> None:
    gpu, memory = (OrderedDict[int, None](), OrderedDict[int, None]())
    hits = misses = 0
    for experts in chosen:
        lacking = [expert for expert in experts if expert not in gpu]
        read = []
        for expert in lacking:
            hits += expert in memory
            if expert not in memory:
                misses += 1
                read.append(expert)
                if len(memory) == second:
                    memory.popitem(last=False)
            memory[expert] = None
            memory.move_to_end(expert)
        # the GPU computes in the order of arrival, and what is not read arrives first
        for expert in sorted(experts, key=lambda expert: (expert in lacking, expert in read)):
            gpu[expert] = None
            gpu.move_to_end(expert)
        while len(gpu) > slots:
            gpu.popitem(last=False)
    trace = trace_of([decode(layer(experts)) for experts in chosen], experts=6)
    found = replayed(trace, slots=slots, **ram(second)).second_level
    assert (found["host_hits"], found["host_misses"]) == (hits, misses)


def test_main_memory_hits_as_the_engines_own() -> None:
    """The engine's link, over a fake drive and a fake GPU, and the virtual one; an expert a layer."""
    rig, memory = Rig(device_slots=3, host_slots=5, lanes=1), SecondLevelCache([((4,), 5)])
    host = HostTier(memory, 50.0, 0.0, lambda key: 100)
    loader = ExpertLoader(pools(3), VirtualLink(VirtualClock(), 100.0, lambda key: Move(100), host=host))
    draws = random.Random(3)
    for _ in range(200):
        layer_, expert = draws.randrange(LAYERS), draws.randrange(EXPERTS)
        rig.layer(layer_, [expert])
        assert len(list(each(loader.run_layer(layer_, [Demand(expert, 1, 4)])))) == 1
        assert (memory.hits, memory.misses) == (rig.link.host.hits, rig.link.host.misses)
    assert memory.hits
    rig.end()


# machines by name


def test_times_follow_from_what_a_processor_reads_and_calculates() -> None:
    trace = trace_of([decode(layer([0, 1]))], dense_bytes=600, made_from={"dense_bits": 8}, slot_bytes={4: [120]})
    times = computed_times(trace.header, Processor(1200.0, "", arithmetic=1000.0, layer_s=0.125))
    # 600 bytes dense are 600 weights, the 100 stored ones of an expert in 4 bits 200; a layer takes its own in any pass
    assert (times.dense, times.expert) == (0.5 + 0.125, {4: 0.1})
    assert (times.prefill_token, times.prefill_expert, times.prefill_pass) == (1.2, {4: 0.4}, 0.125)
    with pytest.raises(TraceError, match="does not say how many bytes its dense layers have"):
        computed_times(trace_of([decode(layer([0]))]).header, Processor(1.0, "", 1.0))


def test_what_the_papers_measured_comes_out() -> None:
    """HOBBIT: a float16 Mixtral layer computes for 3 ms, an int8 one on an Orin loads for 94.5 % of its time, and an
    expert takes the CPU 5 ms. EdgeMoE: six experts of 18.9 MB on a card take 2.55 times as long as the rest of a token.
    CORM: Mixtral loads for 2,100 ms of a token and computes for 350, DeepSeekMoE for 706 and 130."""
    expert, attention = 176.2e6, 41.9e6
    rtx, orin, corm = (MACHINES[name] for name in ("rtx4090", "jetson-orin", "rtx3090ti"))
    assert rtx.processor is not None
    assert rtx.cpu is not None
    assert orin.processor is not None
    assert corm.processor is not None
    assert (4 * expert + 2 * attention) / rtx.processor.rate + rtx.processor.layer_s == pytest.approx(3e-3)
    assert 2 * expert / rtx.cpu.rate == pytest.approx(5e-3)
    loading = 2 * expert / LINKS["nvme"].bandwidth
    computing = (2 * expert + attention) / orin.processor.rate + orin.processor.layer_s
    assert loading / (loading + computing) == pytest.approx(0.945)
    for layers, k, weights, dense, loading, computing in (
        (32, 2, expert, attention, 2.1, 0.35),
        (27, 6, 8.65e6, 2 * 8.65e6 + 16.8e6, 0.706, 0.13 * 27 / 28),
    ):
        nbytes = weights * 4.25 / 8
        assert layers * k * (corm.link.latency + nbytes / corm.link.bandwidth) == pytest.approx(loading)
        computed = layers * (corm.processor.layer_s + (k * nbytes + 2 * dense) / corm.processor.rate)
        assert computed == pytest.approx(computing)
    pi = MACHINES["raspberry-pi-4b"]
    assert pi.processor is not None
    computing = 0.495e9 / pi.processor.rate + 6 * pi.processor.layer_s
    assert 6 * 18.9e6 / pi.link.bandwidth / computing == pytest.approx(2.55, rel=2e-3)


def test_the_way_of_an_expert_on_each_machine() -> None:
    orin, rtx = MACHINES["jetson-orin"], MACHINES["rtx4090"]
    assert rtx.hops(False) == (LINKS["pcie4"], None)
    assert rtx.hops(True) == (LINKS["pcie4"], LINKS["nvme"])
    assert orin.hops(False) == (LINKS["nvme"], None)  # main memory is the GPU's, and holds not all
    assert orin.hops(True) == (orin.link, LINKS["nvme"])
    assert machine_of(None, "pcie4", "sata").hops(True) == (LINKS["pcie4"], LINKS["sata"])
    laptop = machine_of("laptop-ddr5", None, None)
    assert laptop.hops(False)[0].bandwidth == pytest.approx(7e9 * 0.65)
    for machine in MACHINES.values():
        told = machine.described(machine.drive is not None)
        assert told["machine"] == machine.name
        assert all("GB/s: " in text for part, text in told.items() if part != "machine")
    for machine in (MACHINES["raspberry-pi-4b"], laptop, MACHINES["rtx3090"]):
        with pytest.raises(ConfigError, match=f"{machine.name} has no such way; give --link pcie4"):
            machine.hops(True)


# the command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    neurons = {"head_bytes": 40, "neuron_bytes": 10, "neurons": 6}
    passes = [decode(layer([0, 1], neurons={0: 3, 1: 3})), decode(layer([1, 2], neurons={1: 3, 2: 3}))]
    return write_trace(tmp_path / "t", trace_of(passes, times=TIMES, dense_bytes=600, **neurons))


def rows(capsys: pytest.CaptureFixture[str], file: Path, **options: Any) -> list[dict[str, Any]]:
    simulate(file, **options, as_json=True)
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_a_row_names_the_machine_and_where_its_figures_come_from(file: Path, capsys: Any) -> None:
    (row,) = rows(capsys, file, machine="rtx4090", preset="lru", set_=["misses=cpu"], cache="50%", ram="75%")
    assert row["machine"] == "rtx4090"
    assert "HOBBIT, section 5.4" in row["cpu"]
    assert "980 PRO" in row["drive"]
    assert (row["experts_on_cpu"], row["host_misses"]) == (4, 3)
    (row,) = rows(capsys, file, link="pcie4", preset="lru", cache="50%")
    assert row["machine"] == "pcie4"
    assert "processor" not in row
    simulate(file, machine="jetson-orin", preset="lru", cache="50%")
    assert "figure 3-(a)" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"machine": "rtx4091"}, "unknown machine 'rtx4091'; did you mean 'rtx4090'"),
        ({"machine": "rtx4090", "link": "nvme"}, "machine rtx4090 has links of its own"),
        ({"machine": "raspberry-pi-4b", "ram": "1GiB"}, "raspberry-pi-4b has no such way"),
        ({"machine": "raspberry-pi-4b", "set_": ["misses=cpu"]}, "this machine has none"),
        ({"link": "pcie4", "drive": "nvme"}, "give --ram"),
        ({"link": "pcie4", "ram": "1GiB"}, "pcie4 has no such way; give --link pcie4 --drive nvme"),
        ({"link": "pcie4", "gather": "1GB/s"}, "gathers no neurons"),
        ({"link": "pcie4", "cpu_expert": "1ms"}, "computes no misses"),
        ({"link": "pcie4", "gather": "fast", "set_": ["unit=neuron", "theta=0.1"]}, "gather 'fast' is neither"),
        ({"link": "pcie4", "drive": "fast", "ram": "1GiB"}, "drive 'fast' is neither"),
        ({"link": "pcie4", "cpu_expert": "1", "set_": ["misses=cpu"]}, "'1' is not a time"),
    ],
)
def test_what_a_machine_lacks_is_told(file: Path, options: dict[str, Any], cause: str) -> None:
    with pytest.raises(TiermoeError, match=cause):
        simulate(file, preset="lru", cache="50%", **options)


# gathering neurons


def gathered_s(active: int, gather: float = 1 / 300, **more: Any) -> float:
    """Seconds of loading an expert of 100 bytes, 40 of them W1's and 10 each of six neurons', at 100 bytes a second."""
    trace: Trace = trace_of(
        [decode(layer([0], neurons={0: active}))], top_k=1, head_bytes=40, neuron_bytes=10, neurons=6
    )
    changes = {"unit": "neuron", "theta": 0.1, "store": "memory"} | more
    result = replayed(trace, changes=changes, gather=gather)
    assert result.decode_tok_s is not None
    return 1 / result.decode_tok_s - 0.5 - 0.4


def test_gathering_takes_a_time_for_each_byte_of_single_neurons() -> None:
    assert gathered_s(0b11) == pytest.approx(0.4 + 0.2 * 4 / 3)
    assert gathered_s(0b11, gather=0.0) == pytest.approx(0.6)
    assert gathered_s(0b111111) == pytest.approx(1.0)  # a whole expert is not gathered
    # at a third of the link's time three quarters cost as much as all; above them gathering would cost more
    assert gathered_s(0b11111) == pytest.approx(1.0)
    assert gathered_s(0b11111, upper_limit=1.0) == pytest.approx(0.4 + 0.5 * 4 / 3)
    assert gathered_s(0b11, store="disk") == pytest.approx(gathered_s(0b11, gather=0.0, store="disk"))  # nothing there


def test_missing_neurons_of_a_cached_expert_are_gathered_too() -> None:
    passes = [decode(layer([0], neurons={0: active})) for active in (0b11, 0b110)]
    trace = trace_of(passes, top_k=1, head_bytes=40, neuron_bytes=10, neurons=6)
    result = replayed(trace, changes={"unit": "neuron", "theta": 0.1, "store": "memory"}, gather=1 / 300)
    assert result.decode_tok_s == pytest.approx(2 / (2 * 0.9 + 0.4 + 0.2 * 4 / 3 + 0.1 * 4 / 3))


def test_the_command_gathers_at_three_times_the_links_rate(file: Path, capsys: Any) -> None:
    options = {"preset": "lru", "set_": ["unit=neuron", "theta=0.1"], "cache": "50%", "link": "pcie4"}
    usual, three, none = (
        rows(capsys, file, **options, **more)[0]["decode_tok_s"]
        for more in ({}, {"gather": "76.8GB/s"}, {"gather": "1000TB/s"})
    )
    assert usual == pytest.approx(three)
    assert usual < none
