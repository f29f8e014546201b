"""Replays of layers that are routed by the token alone: their experts are known before a pass begins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import tiermoe
from small_traces import TIMES, layer, replayed, trace_of
from tiermoe.config import CacheSize
from tiermoe.errors import TraceError
from tiermoe.lab.measure.record import Recorder, header_of
from tiermoe.lab.simulate import ReplaySettings, replay
from tiermoe.lab.simulate.steps import hash_tables
from tiermoe.lab.trace import Pass, Trace
from tiermoe.offload.presets import compose
from tiny import write

HASHED = {"prefetch": "hash", "ahead": 2}


def token(token_id: int, *chosen: list[int]) -> Pass:
    return Pass("decode", 0, [token_id], [layer(experts) for experts in chosen])


TWO = trace_of([token(5, [0], [1]), token(6, [2], [3]), token(5, [0], [1])], top_k=1, hash_layers=[0, 1])
"""Two hash-routed layers of four experts, one a token."""


def test_experts_come_from_before_the_first_layer_on() -> None:
    plain, ahead = (replayed(TWO, slots=2, changes=changes) for changes in ({}, HASHED))
    # each token: dense .25, an expert of 1 s, .4; again for the second layer, with nothing read ahead
    assert plain.decode_tok_s == pytest.approx(3 / (3 * 2 * (0.25 + 1 + 0.4)))
    # both are read from the beginning on: here at 1.0 and 2.0, the first runs until 1.4 and the second until 2.4; the
    # last token's first one misses its slot to the second layer's no more than before
    assert ahead.decode_tok_s == pytest.approx(3 / (3 * 2.4))
    assert (ahead.counts.loads, ahead.counts.speculative_loads) == (0, 6)
    fast = replayed(TWO, slots=2, changes=HASHED, bandwidth=1e6)
    assert (fast.counts.hits, fast.counts.prefetched, fast.counts.misses) == (6, 6, 0)
    second = replayed(trace_of(TWO.passes, top_k=1, hash_layers=[1]), slots=4, changes=HASHED, bandwidth=1e6)
    assert (second.counts.prefetched, second.counts.misses) == (2, 2)  # the first layer's are not named


def test_a_prompts_experts_come_by_number_of_tokens() -> None:
    prompt = Pass("prefill", 0, [5, 6, 5, 7], [layer([0], [2], [0], [3])])
    trace = trace_of([prompt], top_k=1, hash_layers=[0])
    result = replayed(trace, slots=3, changes=HASHED)
    # of two tokens first: expert 0 at 1.0; dense .4 meanwhile; the last comes at 3.0 and runs .4
    assert result.prefill_tok_s == pytest.approx(4 / 3.4)


def test_a_layer_that_runs_for_the_last_tokens_shows_theirs() -> None:
    last = Pass("prefill", 0, [5, 6, 7], [layer([0], [1], [2]), layer([3])])
    found = hash_tables(trace_of([last], top_k=1, hash_layers=[0, 1]))
    assert found == {0: {5: [0], 6: [1], 7: [2]}, 1: {7: [3]}}
    assert found[1][5] == []


def test_what_a_trace_lacks_is_told() -> None:
    plain = trace_of(TWO.passes, top_k=1, times=TIMES)
    for prefetch in ("hash", "hash+path"):
        told = rf"prefetch={re.escape(prefetch)}\), and the trace of tiny names none.*next-gate"
        with pytest.raises(TraceError, match=told):
            replayed(plain, changes={"prefetch": prefetch})
    without = trace_of(TWO.passes, top_k=1, hash_layers=[0], holds=frozenset({"weights"}))
    with pytest.raises(TraceError, match="no ids of tokens"):
        replayed(without, changes=HASHED)
    two_ways = trace_of([token(5, [0], [1]), token(5, [2], [1])], top_k=1, hash_layers=[0])
    with pytest.raises(TraceError, match=r"token 5 got experts \[0\] and \[2\]"):
        replayed(two_ways, changes=HASHED)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Path]:
    """A trace of a tiny DeepSeek-V4, whose first two of three layers are hashed, and its checkpoint."""
    checkpoint = write(tmp_path_factory.mktemp("hashed"), "deepseek_v4", torch.float32)
    model, _ = tiermoe.load(checkpoint, memory="4GiB", device="cpu", bits=16, preset="lru", warm=False)
    ids = torch.randint(3, 128, (28,), generator=torch.Generator().manual_seed(1))
    with Recorder(model) as recorder:
        passes = list(recorder.passes(ids, 8))
        header = header_of(model, TIMES, recorder.holds, recorder.distances, {})
    model.tiermoe.close()
    return Trace(header, passes), checkpoint


def test_a_recorded_trace_has_the_models_own_tables(recorded: tuple[Trace, Path]) -> None:
    from safetensors.torch import load_file

    trace, checkpoint = recorded
    assert list(trace.header.hash_layers) == [0, 1]
    (file,) = checkpoint.glob("*.safetensors")
    theirs = [table for name, table in sorted(load_file(file).items()) if name.endswith("tid2eid")]
    for layer_, table in hash_tables(trace).items():
        assert table
        for token_id, experts in table.items():
            assert sorted(experts) == sorted(theirs[layer_][token_id].tolist())


def test_a_recorded_trace_replays_as_a_model_runs(recorded: tuple[Trace, Path]) -> None:
    """Every expert of the hashed layers is there when a decoded token asks for it, as in the engine
    (test_hash_routing)."""
    trace, _ = recorded
    options = ReplaySettings(CacheSize(fraction=0.4), 1e15)
    result = replay(trace, compose("lru", HASHED), options)
    plain = replay(trace, compose("lru", {}), options)
    asked = sum(len(passed.layers[2].experts[0]) for passed in trace.passes if passed.phase == "decode")
    assert plain.metrics.decode.counts.misses > asked
    assert result.metrics.decode.counts.misses <= asked  # of the third layer alone
    assert result.metrics.decode.counts.prefetched > 0
