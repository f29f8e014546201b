"""The table of `tiermoe.engine.expectation`: what the default preset hits on recorded routing, without prefetch.

    python -m benchmarks.hit_rates TRACE [TRACE...]

Traces of one shape, of `tiermoe trace` or as route_trace CSVs. For each share of the experts that the cache holds: the
lowest and the highest hit rate of 64 decoded tokens that follow each other, the first ones with a cache that the
prompt has left."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from benchmarks.rounds import parser_of
from tiermoe.config import CacheSize
from tiermoe.lab.simulate import ReplaySettings, replay, spread
from tiermoe.lab.trace import Trace, read_trace
from tiermoe.metrics import ExpertCounts
from tiermoe.offload.presets import compose

SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
WINDOW = 64


def windows(trace: Trace, share: float) -> list[float]:
    """The hit rate of each window of decoded tokens. A replay tells its sums alone: those of the trace up to a window's
    end, less those up to its beginning."""
    decoded = [index for index, each in enumerate(trace.passes) if each.phase == "decode"]
    ends = [decoded[count - 1] + 1 for count in range(WINDOW, len(decoded) + 1, WINDOW)]
    sums = [ExpertCounts(), *(_counts(Trace(trace.header, trace.passes[:end]), share) for end in ends)]
    return [after.minus(before).hit_rate or 0.0 for before, after in pairwise(sums)]


def _counts(trace: Trace, share: float) -> ExpertCounts:
    composition = compose("default", {"prefetch": "none"})
    settings = ReplaySettings(CacheSize(fraction=share), bandwidth=1e9, times=spread(trace.header, 1e-2, 1e-3))
    return replay(trace, composition, settings).metrics.decode.counts


def main() -> None:
    """Prints the table's lines."""
    parser = parser_of(__doc__)
    parser.add_argument("traces", type=Path, nargs="+")
    traces = [read_trace(path) for path in parser.parse_args().traces]
    print(f"{traces[0].header.model}: {max(traces[0].header.experts)} experts, {max(traces[0].header.top_k)} a token")
    for share in SHARES:
        rates = [rate for trace in traces for rate in windows(trace, share)]
        print(f"({share}, {min(rates):.3f}, {max(rates):.3f}),", flush=True)


if __name__ == "__main__":
    main()
