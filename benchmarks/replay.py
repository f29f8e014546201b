"""Runs of presets beside their replays: hits, and time by what this machine was measured to take.

    python -m benchmarks.replay MODEL --text FILE --cache 45% [--preset lru,default,frugal] [--set cache=arc] [--bits 4]
        [--dense-bits 4] [--threads N] [--lanes 1] [--tokens 1024]

The text's sequences are fed as `tiermoe trace` feeds them. The first warms the cache and the process: it is run and
replayed, and counts in neither. Then the same model records the text, and the trace is replayed with what was measured
in the run: its link's bandwidth, and the mean seconds of an expert, of all else, until a lane without work begins a
load, and until whoever waited for one goes on (threads wait for a processor, which others keep busy). So what is
compared is what a replay makes of waiting and overlap. With several lanes loads arrive in an order of their own, and
what is evicted differs a little. A lossy preset changes what its own routers see: its text is recorded with the exact
experts, beside which its hits differ by more than timing. Prints one JSON object for each preset, and tables on
standard error; a preset that cannot run here is named with the reason.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import tiermoe
from benchmarks.rounds import parser_of
from tiermoe.cli.options import changes
from tiermoe.config import CacheSize
from tiermoe.errors import TiermoeError
from tiermoe.lab.measure.record import DISTANCES, Lap, Recorder, Stopwatch, header_of, times_of
from tiermoe.lab.measure.texts import Feed, SequenceShape, cut_sequences
from tiermoe.lab.simulate import ReplaySettings, Result, replay
from tiermoe.lab.trace import Header, Pass, Times, Trace
from tiermoe.metrics import Metrics, PhaseMetrics
from tiermoe.offload.composition import Composition
from tiermoe.offload.profiles import profile_path, read_profile


class MeasuredRun:
    """Sequences fed to a model, those after the first measured: their phases, and the link and the computing times
    while they ran."""

    def __init__(self, model: Any, ids: Any, prompt: int) -> None:
        self._model, self._prompt = model, prompt
        self._engine = engine = model.tiermoe
        self._laps: dict[str, list[Lap]]
        self._feed(ids[:1])
        before = engine.link.counters()
        self.phases = self._feed(ids[1:]).by_phase
        after = engine.link.counters()
        self.bandwidth = (after.bytes_read - before.bytes_read) / (after.busy_s - before.busy_s)
        self.start = (after.start_s - before.start_s) / max(after.starts - before.starts, 1)
        self.wake = (after.wake_s - before.wake_s) / max(after.wakes - before.wakes, 1)
        self.times = times_of(self._laps["prefill"], self._laps["decode"], prompt, engine.settings.bits, fmean)

    def _feed(self, sequences: Any) -> Metrics:
        import torch

        metrics = Metrics()
        self._laps = {"prefill": [], "decode": []}
        with torch.inference_mode(), Stopwatch(self._model) as watch:
            for ids in sequences:
                feed = Feed(self._model, ids, self._prompt)
                watch.lap()
                with metrics.prefill.measured(self._engine.snapshot, self._prompt):
                    feed.prompt()
                self._laps["prefill"].append(watch.lap())
                for at in range(self._prompt, len(ids)):
                    with metrics.decode.measured(self._engine.snapshot, 1):
                        feed.token(at)
                    self._laps["decode"].append(watch.lap())
        return metrics


def compare(args: argparse.Namespace) -> dict[str, Any]:
    shape = SequenceShape(args.tokens + args.sequence, args.prompt, args.sequence)
    options = {name: getattr(args, name) for name in ("cache", "preset", "bits", "dense_bits", "threads", "lanes")}
    options |= {"set": changes(args.set) or {}, "chunk": shape.chunk, "memory": args.memory}
    model, tokenizer = tiermoe.load(args.model, warm=False, **{name: value for name, value in options.items() if value})
    engine = model.tiermoe
    composition, drive = engine.composition, engine.drive
    ids = cut_sequences(tokenizer, args.text.read_text(), shape)
    run = MeasuredRun(model, ids, args.prompt)
    pools = engine.plan.pools
    cache = engine.settings.cache or CacheSize(nbytes=sum(pool.slots * pool.slot_bytes for pool in pools))
    if not engine.lossy:
        header, passes = recorded(model, ids, args.prompt, run.times, composition)
    profile = None
    if composition.profile:
        path = profile_path(engine.store.root, composition.profile)
        profile = read_profile(path, None, "") if path.exists() else None
    engine.close()
    if composition.lossy:
        exact = {**options, "preset": "lru", "set": {}}
        model, _ = tiermoe.load(args.model, warm=False, **{name: value for name, value in exact.items() if value})
        header, passes = recorded(model, ids, args.prompt, run.times, composition)
        model.tiermoe.close()
    settings = ReplaySettings(cache, run.bandwidth, lanes=drive.lanes, start=run.start, wake=run.wake, profile=profile)
    warming = Trace(header, [passed for passed in passes if passed.sequence == 0])
    replays = [replay(trace, composition, settings) for trace in (Trace(header, passes), warming)]
    found = {
        "model": str(args.model),
        "command": " ".join(sys.argv),
        "preset": args.preset,
        "set": options["set"],
        "slots": {",".join(map(str, pool.bits)): pool.slots for pool in pools},
        "lanes": drive.lanes,
        "bandwidth": run.bandwidth,
        "start": run.start,
        "wake": run.wake,
        "times": asdict(run.times),
        "run": {name: _row(phase) for name, phase in run.phases.items()},
        "replay": _of_replays(*replays),
    }
    pairs = {name: (found["run"][name], found["replay"][name]) for name in run.phases}
    found["hits_agree"] = all(mine["hits"] == other["hits"] for mine, other in pairs.values())
    found["points"] = {name: 100 * (other["hit_rate"] - mine["hit_rate"]) for name, (mine, other) in pairs.items()}
    found["replay_to_run"] = {name: other["tok_s"] / mine["tok_s"] for name, (mine, other) in pairs.items()}
    return found


def recorded(model: Any, ids: Any, prompt: int, times: Times, composition: Composition) -> tuple[Header, list[Pass]]:
    """What a replay of a composition reads of the sequences, recorded with an exact model."""
    distances = DISTANCES if composition.prefetch not in ("none", "path") else ()
    little, theta = composition.routing == "confident", composition.theta if composition.unit == "neuron" else None
    with Recorder(model, distances=distances, little=little, theta=theta) as recorder:
        passes = [passed for number, row in enumerate(ids) for passed in recorder.passes(row, prompt, number)]
        return header_of(model, times, recorder.holds, recorder.distances, {}), passes


def _of_replays(whole: Result, warming: Result) -> dict[str, dict[str, float]]:
    """What the sequences after the first took: the whole replay less that of the first alone."""
    phases = whole.metrics.by_phase
    return {name: _row(phases[name].since(first)) for name, first in warming.metrics.by_phase.items()}


def _row(used: PhaseMetrics) -> dict[str, float]:
    counts, tokens = used.counts, used.tokens
    return {
        "tok_s": tokens / used.seconds,
        "hits": counts.hits,
        "misses": counts.misses,
        "hit_rate": counts.hits / (counts.hits + counts.misses),
        "ahead": counts.speculative_loads / tokens,  # loads that were begun before anybody asked
        "token_ms": used.seconds / tokens * 1e3,
        "compute_ms": (used.seconds - used.wait_s) / tokens * 1e3,
        "wait_ms": used.wait_s / tokens * 1e3,
        "read_mb": used.bytes_read / tokens / 1e6,
    }


def show(found: dict[str, Any]) -> None:
    columns = ("hits", "misses", "ahead", "tok_s", "token_ms", "compute_ms", "wait_ms", "read_mb")
    delays = f"{found['start'] * 1e6:.0f} us to begin, {found['wake'] * 1e6:.0f} us to go on"
    link = f"{found['lanes']} lanes, {found['bandwidth'] / 1e6:,.0f} MB/s, {delays}"
    times = ", ".join(f"{name} {value}" for name, value in found["times"].items())
    print(f"{link}; seconds: {times}", file=sys.stderr)
    print(f"{'':<16}" + "".join(f"{name:>12}" for name in columns), file=sys.stderr)
    for phase in ("prefill", "decode"):
        for what in ("run", "replay"):
            values = (found[what][phase][name] for name in columns)
            cells = "".join(f"{value:>12.2f}" if isinstance(value, float) else f"{value:>12}" for value in values)
            print(f"{what + ' ' + phase:<16}{cells}", file=sys.stderr)
        points = f"{found['points'][phase]:+.2f} points"
        print(f"{'replay / run':<16}{points:>24}{found['replay_to_run'][phase]:>12.3f}", file=sys.stderr)


def summarize(rows: list[dict[str, Any]]) -> None:
    """One line a preset: milliseconds a token of the run and of its replay."""
    print(f"{'ms a token':<18}{'prefill':>20}{'ratio':>8}{'decode':>20}{'ratio':>8}{'points':>8}", file=sys.stderr)
    for found in rows:
        line = f"{found['preset']:<18}"
        for phase in ("prefill", "decode"):
            run, other = (found[what][phase]["token_ms"] for what in ("run", "replay"))
            line += f"{run:>10.2f}{other:>10.2f}{other / run:>8.2f}"
        print(line + f"{found['points']['decode']:>+8.1f}", file=sys.stderr)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--cache", default="45%")
    parser.add_argument("--preset", default="lru", help="one, or several like lru,default: each in turn")
    parser.add_argument("--set", action="append", help="NAME=VALUE, as for tiermoe run")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--dense-bits", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--lanes", type=int)
    parser.add_argument("--memory")
    parser.add_argument("--tokens", type=int, default=512, help="beside those of the sequence that warms up")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=128)
    args = parser.parse_args()
    rows = []
    for preset in args.preset.split(","):
        try:
            found = compare(argparse.Namespace(**{**vars(args), "preset": preset}))
        except TiermoeError as error:
            print(f"{preset}: {error}", file=sys.stderr)
            continue
        show(found)
        print(json.dumps(found), flush=True)
        rows.append(found)
    summarize(rows)
    if not rows:
        sys.exit(1)


if __name__ == "__main__":
    main()
