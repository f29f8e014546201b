"""Active neurons in traces: against act(W1 x) of the checkpoint's own weights, and replayed by corm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
import tiny
from commands import Command
from small_traces import decode, layer, trace_of
from tiermoe.errors import ModelError
from tiermoe.formats.neurons import record_place
from tiermoe.formats.store import open_store
from tiermoe.lab.measure.record import Recorder
from tiermoe.lab.papers import corm
from tiermoe.lab.simulate.costs import RECALL, Costs, NeuronLoads
from tiermoe.lab.trace import Times, read_trace
from tiermoe.offload.composition import Composition
from tiermoe.offload.profiles import Profile, to_json
from tiermoe.types import ExpertKey

IDS = torch.tensor([5, 40, 77, 12, 9, 100, 33, 8, 61, 25, 90, 14])
PROMPT = 5
THETA = 0.3
NEURONS = 64
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen; Winston Smith slipped quickly. " * 4


@torch.inference_mode()
def test_recorded_neurons_are_those_of_the_plain_models_gates(mixtral: Path) -> None:
    model, _ = tiermoe.load(mixtral, bits=16, preset="lru", cache="30%", lanes=1)
    with Recorder(model, theta=THETA) as recorder:
        assert "neurons" in recorder.holds
        prefill, *decoded = recorder.passes(IDS, PROMPT)
    assert model.tiermoe.context.observer is None
    model.tiermoe.close()
    assert not any(traced.neurons for traced in prefill.layers)
    assert all(not traced.neurons for passed in decoded if passed.little for traced in passed.little.layers)

    plain = tiny.oracle(mixtral, "mixtral", torch.float32)
    modules = [module for module in plain.modules() if hasattr(module, "gate_up_proj")]
    inputs: list[torch.Tensor] = []
    for module in modules:
        module.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    cache = plain(input_ids=IDS[None, :PROMPT], use_cache=True).past_key_values
    found = wrong = 0
    for position, passed in zip(range(PROMPT, len(IDS)), decoded, strict=True):
        inputs.clear()
        cache = plain(input_ids=IDS[None, position : position + 1], past_key_values=cache).past_key_values
        before = inputs[0]
        for traced, module, x in zip(passed.layers, modules, inputs, strict=True):
            assert set(traced.neurons) == set(traced.experts[0])
            assert set(traced.named) == (set() if module is modules[0] else set(traced.neurons))
            for expert, active in traced.neurons.items():
                w1 = module.gate_up_proj[expert][:NEURONS]
                for neuron, value in enumerate(torch.nn.functional.silu(w1 @ x[0]).abs().tolist()):
                    found += active >> neuron & 1
                    # on the other side of the threshold only where rounding can put it
                    wrong += (value > THETA) != bool(active >> neuron & 1) and abs(value - THETA) > 1e-4
                assert active >> NEURONS == 0
                wrong += _wrongly_named(traced.named.get(expert), w1, before[0])
            before = x
    assert wrong == 0
    every = len(decoded) * len(modules) * 2 * NEURONS
    assert 0.1 * every < found < 0.9 * every


def _wrongly_named(named: int | None, w1: torch.Tensor, before: torch.Tensor) -> int:
    """How many of the neurons that the layer before's input makes active were not named, or named for nothing."""
    if named is None:
        return 0
    values = torch.nn.functional.silu(w1 @ before).abs().tolist()
    return sum(
        (value > THETA) != bool(named >> neuron & 1) and abs(value - THETA) > 1e-4
        for neuron, value in enumerate(values)
    )


def test_the_neurons_that_a_trace_names_are_those_that_a_prefetch_brings() -> None:
    passes = [decode(layer([0], neurons={0: 0b11}), layer([0], neurons={0: 0b0110}, named={0: 0b1010}))]
    trace = trace_of(passes, top_k=1, head_bytes=40, neuron_bytes=15, neurons=4)
    key, costs = ExpertKey(1, 0, 4), Costs(trace.header, Times(0, {4: 0}, 0, {4: 0}))
    loads = NeuronLoads(trace, costs, composition())
    loads.start_pass(trace.passes[0].layers, 1)
    loads.start_layer(0)
    assert loads.load(key).nbytes == 40 + 2 * 15
    loads.start_layer(1)
    assert loads.complete(key).nbytes == 15  # of neurons 1 and 2 it named 1
    assert loads.load(ExpertKey(1, 1, 4)).nbytes == 40 + 2 * 15  # it was not chosen: the mean of those that were
    loads.start_pass(trace.passes[0].layers, 3)
    assert loads.load(key).nbytes == 100  # whole, for several tokens
    assert corm.neuron_recall(trace) == [None, 0.5]


def test_a_model_without_gates_has_no_neurons(tmp_path: Path) -> None:
    model, _ = tiermoe.load(tiny.write(tmp_path, "switch_transformers", torch.float32), preset="lru", bits=16)
    with pytest.raises(ModelError, match="neuron unit cannot take"):
        Recorder(model, theta=THETA)
    assert model.tiermoe.context.observer is None
    model.tiermoe.close()


@pytest.fixture(scope="module")
def traced(mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace with neurons."""
    from tiermoe.lab.cli.trace import trace

    folder = tmp_path_factory.mktemp("traced")
    (folder / "text.txt").write_text(TEXT)
    trace(
        model=str(mixtral), text=folder / "text.txt", out=folder / "t", tokens=64, prompt=8, sequence=32, neurons=THETA,
        store=folder / "store",
    )  # fmt: skip
    return folder / "t"


def test_the_header_has_the_neuron_units_bytes(traced: Path, mixtral: Path) -> None:
    header = read_trace(traced).header
    assert "neurons" in header.holds
    assert header.made_from["theta"] == THETA
    model, _ = tiermoe.load(
        mixtral, preset="lru", set={"unit": "neuron", "theta": 0.1}, quantizer="hqq-double",
        store=traced.parent / "store", cache="30%",
    )  # fmt: skip
    model.tiermoe.close()
    form = open_store(traced.parent / "store").expert_format("4-hqq-double-neuron", 0)
    place = record_place(form)
    assert (header.head_bytes, header.neuron_bytes, header.neurons) == (place.stored_at, place.record_bytes, NEURONS)


def test_corm_replays_it(traced: Path, tmp_path: Path, tiermoe_: Command) -> None:
    def simulated(*more: str) -> Any:
        done = tiermoe_("simulate", traced, "--preset", "corm", "--link", "1MB/s", "--cache", "60%", "--json", *more)
        return json.loads(done.out)[0] if done.code == 0 else done.err

    fixed = ("--set", "precision=fixed")
    alone = (*fixed, "--set", "prefetch=none")  # what a prefetch brings depends on bytes
    whole, found = simulated(*alone, "--set", "unit=expert"), simulated(*alone, "--set", f"theta={THETA}")
    assert (found["expert_hits"], found["loads"]) == (whole["expert_hits"], whole["loads"])
    assert 0 < found["bytes_per_token"] < whole["bytes_per_token"]
    assert simulated(*fixed, "--set", f"theta={THETA}")["speculative_loads"] > 0
    assert "theta 0.3" in simulated(*fixed, "--set", "theta=0.2")
    assert "calibrate" in simulated("--set", f"theta={THETA}")
    (text := tmp_path / "text").write_text(TEXT)
    done = tiermoe_("trace", "nowhere", "--text", text, "--out", tmp_path / "t", "--neurons", "-1")
    assert "threshold from 0 on" in done.err
    fingerprint = read_trace(traced).header.fingerprint
    table = [[4, 2] * 4] * 3
    profile = Profile("corm", fingerprint, {}, {"theta": THETA}, {"table": table})
    (tmp_path / "corm.json").write_bytes(to_json(profile))
    assert simulated("--profiles", str(tmp_path))["expert_misses"] > 0


def composition(**changes: Any) -> Composition:
    return Composition("neurons", "", unit="neuron", theta=0.1, store="memory", **changes)


def test_what_is_read_ahead_brings_other_neurons_than_those_that_are_active() -> None:
    """A replay knows what was active; an earlier layer's state would have named most of it, and as many others."""
    active = (1 << 40) - 1  # of 100 neurons, each a byte, without W1
    trace = trace_of(
        [decode(layer([0], neurons={0: active}), layer([0], neurons={0: active}))],
        top_k=1, head_bytes=0, neuron_bytes=1, neurons=100,
    )  # fmt: skip
    key, costs = ExpertKey(1, 0, 4), Costs(trace.header, Times(0, {4: 0}, 0, {4: 0}))
    passed = trace.passes[0].layers

    loads = NeuronLoads(trace, costs, composition())
    loads.start_pass(passed, 1)
    loads.start_layer(0)
    assert loads.load(key).nbytes == 40  # as many as are active
    loads.start_layer(1)
    assert loads.complete(key).nbytes == round((1 - RECALL) * 40)  # the active ones among them that it did not name
    assert loads.complete(key).nbytes == 0
    going_on = NeuronLoads(trace, costs, composition(on_mispredict="proceed"))
    going_on.start_pass(passed, 1)
    going_on.start_layer(0)
    assert going_on.load(key).nbytes == 40
    going_on.start_layer(1)
    assert going_on.complete(key).nbytes == 0  # it goes on with what was predicted
    assert going_on.complete(key).nbytes == round((1 - RECALL) * 40)  # and fetches the rest when it is asked for again
