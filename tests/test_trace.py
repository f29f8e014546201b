"""Trace files: what is written is read, what is damaged is refused, and the CSV of another project is understood."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from small_traces import decode, layer, trace_of, write_trace
from tiermoe.errors import TraceError
from tiermoe.lab.simulate.costs import Costs, copied_bytes, slot_sizes
from tiermoe.lab.trace import Header, LayerTrace, Little, Pass, Times, Trace, TraceWriter, read_trace
from tiermoe.types import ExpertKey

WEIGHT = st.floats(0, 1, allow_nan=False)
TIMES = st.builds(Times, WEIGHT, st.just({4: 0.5}), WEIGHT, st.just({4: 0.25}))


@st.composite
def layer_traces(draw: st.DrawFn) -> LayerTrace:
    experts = draw(st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=3))
    weights = [[draw(WEIGHT) for _ in chosen] for chosen in experts]
    ranked = st.lists(st.tuples(st.integers(0, 7), WEIGHT), max_size=3)
    forecasts = draw(st.dictionaries(st.integers(1, 3), ranked, max_size=2))
    neurons, named = (draw(st.dictionaries(st.integers(0, 7), st.integers(0, 2**70), max_size=2)) for _ in range(2))
    return LayerTrace(experts, weights, forecasts, neurons, named)


def passes(layers: int) -> st.SearchStrategy[Pass]:
    each = st.lists(layer_traces(), min_size=layers, max_size=layers)
    little = st.none() | st.builds(Little, WEIGHT, each)
    tokens = st.lists(st.integers(0, 100_000), max_size=3)
    return st.builds(Pass, st.sampled_from(["prefill", "decode"]), st.integers(0, 5), tokens, each, little)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.lists(passes(2), max_size=3), st.none() | st.builds(Times, WEIGHT, st.just({4: 0.5}), WEIGHT, st.just({4: 0.25}))
)
def test_what_is_written_is_read(tmp_path: Path, recorded: list[Pass], times: Times | None) -> None:
    header = Header(
        "m", "f", [8, 8], [2, 2], {4: [10, 12]}, times, frozenset({"weights", "neurons"}), [1, 3],
        head_bytes=1, neuron_bytes=2, neurons=71, dense_bytes=3, encoder_layers=1, made_from={"text": "a", "tokens": 3},
        slot_bytes={4: [11, 13], 2: [11, 13]}, copied_bytes={4: [12, 14]}, neuron_slot_bytes={2: 9}, hash_layers=(1,),
    )  # fmt: skip
    assert read_trace(write_trace(tmp_path / "t", Trace(header, recorded))) == Trace(header, recorded)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "t.gz", trace_of([decode(layer([0, 1])), decode(layer([2, 3]))]))


def lines_of(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines(keepends=True)


def rewrite(path: Path, lines: list[str]) -> Path:
    path.write_bytes(gzip.compress("".join(lines).encode()))
    return path


def changed(line: str, **values: object) -> str:
    return json.dumps(json.loads(line) | values) + "\n"


def test_a_damaged_file_is_refused_with_what_it_lacks(path: Path) -> None:
    """Cut short at any byte or line, without a pass, of another version, with a pass that is none."""
    content, lines = path.read_bytes(), lines_of(path)
    for share in (0.1, 0.5, 0.9, 0.99):
        path.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(TraceError, match="cut short"):
            read_trace(path)
    for kept in (lines[:1], lines[:2], lines[:3], [lines[0], *lines[2:]]):
        with pytest.raises(TraceError, match="cut short"):
            read_trace(rewrite(path, kept))
    with pytest.raises(TraceError, match="version 9 of the trace format, this tiermoe reads 1"):
        read_trace(rewrite(path, [changed(lines[0], version=9), *lines[1:]]))
    wrong: list[dict[str, object]] = [
        {"phase": "later"}, {"layers": []}, {"layers": [{"experts": [[9, 1]], "weights": [[0.5, 0.5]]}]},
        {"layers": [{"experts": [[0, 1]], "weights": [[0.5]]}]}, {"layers": [{"weights": [[0.5]]}]},
    ]  # fmt: skip
    for values in wrong:
        with pytest.raises(TraceError, match="line 3 is damaged"):
            read_trace(rewrite(path, [*lines[:2], changed(lines[2], **values), *lines[3:]]))


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    with pytest.raises(TraceError, match="there is no trace"):
        read_trace(other)
    other.write_text("hello")
    with pytest.raises(TraceError, match="is not a trace"):
        read_trace(other)
    with pytest.raises(TraceError, match="is not a trace"):
        read_trace(rewrite(other, ['{"a": 1}\n']))


def test_an_interrupted_writer_leaves_nothing(tmp_path: Path) -> None:
    trace = trace_of([decode(layer([0, 1]))])

    def interrupted() -> None:
        with TraceWriter(tmp_path / "t", trace.header) as writer:
            writer.add(trace.passes[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_writer_keeps_the_old_file_until_it_is_done(path: Path) -> None:
    before, trace = path.read_bytes(), trace_of([decode(layer([1, 3]))])
    with TraceWriter(path, trace.header) as writer:
        writer.add(trace.passes[0])
        assert path.read_bytes() == before
    assert read_trace(path) == trace


def test_a_pass_of_another_model_is_not_written(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="2 layers in a trace of 1"),
        TraceWriter(tmp_path / "t", trace_of([decode(layer([0, 1]))]).header) as writer,
    ):
        writer.add(decode(layer([0, 1]), layer([0, 1])))


CSV = """# route_trace v1
# model=Small-Q4_K_M.gguf arch=x n_layer=2 n_expert=8 n_expert_used=2
# layer=0 expert_bytes=10 dense_bytes=30
# layer=1 expert_bytes=12 dense_bytes=40
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,5,0.75,0,10
0,0,0,0,1,2,0.25,0,10
0,0,1,0,0,2,0.5,0,10
0,0,1,0,1,7,0.5,0,10
0,0,1,1,0,1,0.9,0,12
0,0,1,1,1,0,0.1,0,12
0,1,2,0,0,5,1.0,1,0
0,1,2,0,1,6,0.0,0,10
0,1,2,1,0,3,0.6,0,12
0,1,2,1,1,4,0.4,0,12
"""


def test_the_csv_is_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "anything"
    file.write_text(CSV)
    trace = read_trace(file)
    assert (trace.header.experts, trace.header.top_k, trace.header.expert_bytes) == ([8, 8], [2, 2], {4: [10, 12]})
    assert (trace.header.dense_bytes, trace.header.holds, trace.header.times) == (70, {"weights"}, None)
    prompt, token = trace.passes
    assert (prompt.phase, prompt.size) == ("prefill", 2)
    assert prompt.layers == [
        LayerTrace([[5, 2], [2, 7]], [[0.75, 0.25], [0.5, 0.5]]), LayerTrace([[1, 0]], [[0.9, 0.1]])
    ]  # fmt: skip
    assert (token.phase, token.size) == ("decode", 1)
    assert token.layers == [LayerTrace([[5, 6]], [[1.0, 0.0]]), LayerTrace([[3, 4]], [[0.6, 0.4]])]


def test_a_damaged_csv_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    lines = CSV.splitlines()
    for text, cause in (
        (CSV.replace("v1", "v2"), "reads route_trace v1"),
        ("\n".join(lines[:-1]), "step 2, layer 1 has 1 rows, 2 a token"),
        ("\n".join(lines[:-2]), "step 2, layer 1 has 0 rows"),
        (CSV[:-12], "damaged or cut short"),
        ("\n".join(lines[:3] + lines[4:]), "cut short"),
        (CSV.replace(",5,0.75", ",8,0.75"), "damaged"),
        ("\n".join(lines[:2]), "cut short"),
    ):
        file.write_text(text)
        with pytest.raises(TraceError, match=cause):
            read_trace(file)


def test_a_file_without_the_bytes_of_slots_takes_stored_ones(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", trace_of([decode(layer([0, 1]))]).header):
        pass
    lines = gzip.decompress((tmp_path / "t").read_bytes()).decode().splitlines()
    header = json.loads(lines[0])
    for name in ("slot_bytes", "copied_bytes", "neuron_slot_bytes", "hash_layers"):
        del header[name]
    (tmp_path / "old").write_bytes(gzip.compress("\n".join([json.dumps(header), *lines[1:]]).encode()))
    found = read_trace(tmp_path / "old").header
    assert slot_sizes(found, [4, 2]) == {4: 100, 2: 50}
    assert copied_bytes(found, 0, 2) == 50
    assert list(found.hash_layers) == []
    damaged = [changed(lines[0], hash_layers=[1]), *(f"{line}\n" for line in lines[1:])]
    with pytest.raises(TraceError, match="line 1 is damaged"):
        read_trace(rewrite(tmp_path / "old", damaged))


def test_slots_copies_and_what_is_stored_are_told_apart() -> None:
    header = replace(
        trace_of([decode(layer([0, 1]))]).header,
        slot_bytes={4: [100], 2: [101]}, copied_bytes={4: [90], 2: [91]}, neuron_slot_bytes={4: 120},
    )  # fmt: skip
    assert slot_sizes(header, [4, 2]) == {4: 100, 2: 101}
    assert slot_sizes(header, [4, 2], "neuron") == {4: 120, 2: 101}
    costs = [Costs(header, Times(0, {4: 0}, 0, {4: 0}), copies) for copies in (False, True)]
    assert [each.nbytes(ExpertKey(0, 0, 2)) for each in costs] == [50, 91]
