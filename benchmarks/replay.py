"""A run of a preset without prefetch beside its replay: hits, and time by what this machine was measured to take.

    python -m benchmarks.replay MODEL --text FILE --cache 45% [--preset lru] [--set cache=arc] [--bits 4]
        [--dense-bits 4] [--threads N] [--lanes 1] [--tokens 1024]

The text's sequences are fed as `tiermoe trace` feeds them. The first warms the cache and the process: it is run and
replayed, and counts in neither. Then the same model records the text and its computing times are measured; the link's
bandwidth is what its lanes reached in the run. With several lanes the order of arrivals, and so what is evicted,
differs a little from the replay's. Prints one JSON object, and a table on standard error.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tiermoe
from tiermoe.cli.options import changes
from tiermoe.compose import PrecisionSlots
from tiermoe.config import CacheSize
from tiermoe.runtime.measure_times import measure_times
from tiermoe.runtime.phases import Phase
from tiermoe.runtime.record import Recorder
from tiermoe.runtime.sequences import Cut, cut, needed_chunk
from tiermoe.runtime.trace_header import header_of
from tiermoe.simulate import ReplaySettings, Result, replay
from tiermoe.trace import Trace


class MeasuredRun:
    """Sequences fed to a model, those after the first measured: their phases, and the link while they ran."""

    def __init__(self, model: Any, ids: Any, prompt: int) -> None:
        self._engine = model.tiermoe
        self.phases = {"prefill": Phase(), "decode": Phase()}
        self._feed(model, ids[0], prompt, {"prefill": Phase(), "decode": Phase()})
        link = self._engine.link
        nbytes, busy_s = link.bytes_read, link.busy_s
        for sequence in ids[1:]:
            self._feed(model, sequence, prompt, self.phases)
        self.bandwidth = (link.bytes_read - nbytes) / (link.busy_s - busy_s)

    def _feed(self, model: Any, ids: Any, prompt: int, phases: dict[str, Phase]) -> None:
        import torch

        with torch.inference_mode():
            with phases["prefill"].measured(self._engine, prompt):
                output = model(input_ids=ids[None, :prompt], use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            with phases["decode"].measured(self._engine, len(ids) - prompt):
                for at in range(prompt, len(ids)):
                    model(input_ids=ids[None, at : at + 1], past_key_values=cache, use_cache=True, logits_to_keep=1)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    shape = Cut(args.tokens + args.sequence, args.prompt, args.sequence)
    options = {name: getattr(args, name) for name in ("cache", "preset", "bits", "dense_bits", "threads", "lanes")}
    options |= {"set": changes(args.set) or {}, "chunk": needed_chunk(shape), "memory": args.memory}
    model, tokenizer = tiermoe.load(args.model, **{name: value for name, value in options.items() if value})
    engine = model.tiermoe
    if engine.composition.prefetch != "none":
        raise SystemExit(f"{args.preset} prefetches ({engine.composition.prefetch}); use --set prefetch=none")
    ids = cut(tokenizer, args.text.read_text(), shape)
    run = MeasuredRun(model, ids, args.prompt)
    with Recorder(model, distances=(), little=False) as recorder:
        passes = [passed for number, row in enumerate(ids) for passed in recorder.passes(row, args.prompt, number)]
        holds = recorder.holds
    times = measure_times(model, ids[1], args.prompt, args.sequence - args.prompt)
    header = header_of(model, times, holds, (), {})
    slots = tuple(PrecisionSlots(pool.bits, pool.slots) for pool in engine.plan.pools)
    settings = ReplaySettings(CacheSize(fraction=1.0), run.bandwidth, lanes=engine.drive.lanes, slots=slots)
    warming = Trace(header, [passed for passed in passes if passed.sequence == 0])
    replays = [replay(trace, engine.composition, settings) for trace in (Trace(header, passes), warming)]
    found = {
        "model": str(args.model),
        "command": " ".join(sys.argv),
        "preset": args.preset,
        "set": options["set"],
        "slots": {",".join(map(str, pool.bits)): pool.slots for pool in slots},
        "lanes": engine.drive.lanes,
        "bandwidth": run.bandwidth,
        "times": asdict(times),
        "run": {name: _of_run(phase) for name, phase in run.phases.items()},
        "replay": _of_replays(*replays),
    }
    engine.close()
    pairs = {name: (found["run"][name], found["replay"][name]) for name in run.phases}
    found["hits_agree"] = all(mine["hits"] == other["hits"] for mine, other in pairs.values())
    found["replay_to_run"] = {name: other["tok_s"] / mine["tok_s"] for name, (mine, other) in pairs.items()}
    return found


def _of_run(phase: Phase) -> dict[str, float]:
    return _row(phase.tokens, phase.hits, phase.misses, phase.seconds, phase.wait_s)


def _of_replays(whole: Result, warming: Result) -> dict[str, dict[str, float]]:
    """What the sequences after the first took: the whole replay less that of the first alone."""
    rows = {}
    for name, first in warming.phases.items():
        used = whole.phases[name].since(first)
        tokens = whole.phases[name].tokens - first.tokens
        rows[name] = _row(tokens, used.counts.hits, used.counts.misses, used.seconds, used.wait_s)
    return rows


def _row(tokens: float, hits: float, misses: float, seconds: float, wait_s: float) -> dict[str, float]:
    return {
        "tok_s": tokens / seconds,
        "hits": hits,
        "misses": misses,
        "hit_rate": hits / (hits + misses),
        "token_ms": seconds / tokens * 1e3,
        "compute_ms": (seconds - wait_s) / tokens * 1e3,
        "wait_ms": wait_s / tokens * 1e3,
    }


def show(found: dict[str, Any]) -> None:
    columns = ("hits", "misses", "tok_s", "token_ms", "compute_ms", "wait_ms")
    link = f"{found['lanes']} lanes, {found['bandwidth'] / 1e6:,.0f} MB/s"
    times = ", ".join(f"{name} {value}" for name, value in found["times"].items())
    print(f"{link}; seconds: {times}", file=sys.stderr)
    print(f"{'':<16}" + "".join(f"{name:>12}" for name in columns), file=sys.stderr)
    for phase in ("prefill", "decode"):
        for what in ("run", "replay"):
            values = (found[what][phase][name] for name in columns)
            cells = "".join(f"{value:>12.2f}" if isinstance(value, float) else f"{value:>12}" for value in values)
            print(f"{what + ' ' + phase:<16}{cells}", file=sys.stderr)
        print(f"{'replay / run':<16}{found['replay_to_run'][phase]:>36.3f}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--cache", default="45%")
    parser.add_argument("--preset", default="lru")
    parser.add_argument("--set", action="append", help="NAME=VALUE, as for tiermoe run")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--dense-bits", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--lanes", type=int)
    parser.add_argument("--memory")
    parser.add_argument("--tokens", type=int, default=512, help="beside those of the sequence that warms up")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=128)
    found = compare(parser.parse_args())
    show(found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
