"""What the benchmark of reading neurons counts, on sets that are read off by hand."""

from __future__ import annotations

from benchmarks.neuron_reads import Layout, bundled, by_activity, positions, spans
from small_traces import decode, layer, trace_of

PAGE = 4096


def test_neurons_in_the_order_of_their_activity() -> None:
    """Of four neurons 2 is active three times, 0 twice, 3 once; 1 never."""
    passes = [decode(layer([0], neurons={0: active})) for active in (0b0101, 0b0101, 0b1100)]
    order = by_activity(trace_of(passes, top_k=1), 4)
    assert order == {(0, 0): [2, 0, 3, 1]}
    assert positions(0b1101, order[0, 0], 4) == 0b0111
    assert positions(0b1101, None, 4) == 0b1101


def test_bundles_are_read_whole() -> None:
    assert bundled(0b1000_0001, 8, 3) == 0b101
    assert bundled(0b0011_1000, 8, 3) == 0b010
    alone = Layout("checkpoint", {}, 1, PAGE // 2, 0)
    assert spans(alone, (0, 0), 0b1000_0001, PAGE, 8) == [(PAGE, 2 * PAGE), (4 * PAGE, 5 * PAGE)]
    together = Layout("checkpoint", {}, 2, PAGE, 0)
    assert spans(together, (0, 0), 0b1000_0001, PAGE, 8) == [(PAGE, 2 * PAGE), (4 * PAGE, 5 * PAGE)]
    through = Layout("checkpoint", {}, 1, PAGE // 2, 2 * PAGE + PAGE)
    assert spans(through, (0, 0), 0b1000_0001, PAGE, 8) == [(PAGE, 5 * PAGE)]
    ideal = Layout("ideal", {}, 1, PAGE // 2, 0)
    assert spans(ideal, (0, 0), 0b1000_0001, PAGE, 8) == [(PAGE, 2 * PAGE)]
