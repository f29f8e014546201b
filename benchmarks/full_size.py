"""What a token takes when the model is several times the memory: a full-size file decodes a recorded trace's routing.

    python -m benchmarks.random_gguf qwen3-30b-a3b F.gguf --trace TRACE
    python -m benchmarks.full_size F.gguf --trace TRACE --memory 4GiB [--memory 6GiB] [--set prefetch=none]
        [--preset nimble] [--bits 16 --bits 3] [--beside TREE]

Each case runs in a process of its own, every round all cases in turn, every other round backwards. A case reads the
trace's prompt, decodes `--tokens` tokens of the trace, and measures the second half. Then the last token is decoded
again and again: its experts are all resident, so that this is computing without waiting, at full size. Columns:

  all, waiting    milliseconds a token, and those in which the computing thread waited for experts
  computing       seconds inside kernels, under a clock, of the token whose experts are resident
  deciding        all - waiting - computing: the engine's own time, and what reading takes of the computing threads'
  read            MB a token; beside: LRU's and Belady's at as many slots, replayed over the same tokens
  drive           milliseconds for the bytes read, at the rate that the drive was measured with
  resident        tokens a second of the token whose experts are resident
  prompt, passes  tokens of the prompt a second; what it read, in passes over all experts

Cases that need experts in fewer bits load once before the rounds, for two tokens: that packs them where nothing has. A
preset that chooses otherwise than the model does is not held to the trace.

`--beside` runs another tree of tiermoe in the same rounds (a git worktree, built), with a store of its own.
`--peer-python` runs llama.cpp too: its mapped file in a memory cgroup of the same size, the file dropped from the page
cache before; what tiermoe decodes before the clock begins is part of its prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.random_gguf import routing_for
from benchmarks.recorded_routing import Routing
from benchmarks.rounds import about, at_least_one, parser_of, print_table, say, shown
from tiermoe.config import BITS, parse_size
from tiermoe.errors import TiermoeError
from tiermoe.formats.gguf_file import open_gguf
from tiermoe.lab.bench.cases import LLAMA, Condition, alternating
from tiermoe.lab.bench.child import CaseFailed, last_object
from tiermoe.lab.bench.engines import Common, LlamaCpp
from tiermoe.lab.bench.summary import number, spread
from tiermoe.lab.simulate.costs import run_bits
from tiermoe.lab.simulate.evictions import hits_of
from tiermoe.model.gguf.checkpoint import config_of
from tiermoe.offload.presets import PRESETS
from tiermoe.platform.built import require_kernels
from tiermoe.platform.machine import processors

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 1800.0  # of a run of llama.cpp
AGAIN = 16  # tokens whose experts are resident


@dataclass
class Case:
    """One way to run the file. runs: a child's object a round."""

    memory: str
    preset: str
    bits: int | None  # of the experts; None: the preset's, else as the file has them
    changes: tuple[str, ...]
    tree: Path
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        parts = [self.memory, *([self.preset] if self.preset != "default" else [])]
        parts += [*([f"{self.bits} bits"] if self.bits else []), *self.changes]
        return ", ".join([*parts, *([self.tree.name] if self.tree != ROOT else [])])

    def median(self, *path: str) -> float:
        return median(self._values(*path))

    def spread(self, *path: str) -> dict[str, Any]:
        found = spread(self._values(*path))
        assert found is not None
        return found

    def _values(self, *path: str) -> list[float]:
        values = []
        for each in self.runs:
            value: Any = each
            for name in path:
                value = value[name]
            values.append(float(value))
        return values


@dataclass(frozen=True)
class Tokens:
    """Token ids of a run: the prompt, what is decoded before the clock begins, and what is measured."""

    prompt: list[int]
    before: list[int]
    measured: list[int]


def tokens_of(routing: Routing, tokens: int, prompt: int | None) -> Tokens:
    """The trace's prompt, or its tokens repeated up to `prompt`, and `tokens` decoded ones, half of them measured."""
    decoded = routing.tokens(tokens, routing.prompt)
    half = tokens // 2
    return Tokens(routing.tokens(prompt or max(routing.prompt, 1)), decoded[:half], decoded[half:])


def measure(model: Path, case: Case, tokens: Tokens) -> dict[str, Any]:
    """A child's object. CaseFailed with the last line that it said where there is none."""
    options = {"memory": case.memory, "preset": case.preset, "set": dict(each.split("=", 1) for each in case.changes)}
    options |= {"bits": case.bits} if case.bits else {}
    given = {"model": str(model), "options": options, "again": AGAIN, **vars(tokens)}
    environment = {**os.environ, "PYTHONPATH": f"{case.tree / 'src'}:{ROOT}"}
    if case.tree != ROOT:
        environment["TIERMOE_CACHE"] = f"{os.environ.get('TIERMOE_CACHE', '.tiermoe')}-{case.tree.name}"
    command = [sys.executable, "-m", "benchmarks.full_size_child", json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    if done.returncode:
        raise CaseFailed(f"{case.name}: {done.stderr.strip().rpartition(chr(10))[2]} (status {done.returncode})")
    return last_object(done.stdout)


def measure_peer(model: Path, memory: str, tokens: Tokens, python: str) -> dict[str, Any]:
    """llama.cpp's `decode_tok_s` over the measured tokens, and `peak_memory_bytes`. CaseFailed as `run_child`."""
    with tempfile.TemporaryDirectory(prefix="full-size-") as folder:
        common = Common(model, processors(), TIMEOUT_S, Path(folder))
        peer = LlamaCpp(common, model, python)
        if (reason := peer.missing()) is not None:
            raise CaseFailed(reason)
        ids = np.array([[*tokens.prompt, *tokens.before, *tokens.measured]])
        np.save(Path(folder) / "ids.npy", ids)
        condition = Condition(
            parse_size(memory), ids.shape[1] - len(tokens.measured), len(tokens.measured), start="cold"
        )
        return peer.run(condition, Path(folder) / "ids.npy")


def check_routing(chosen: Sequence[Sequence[int]], routing: Routing, token: int) -> None:
    """CaseFailed where a token's experts, by layer, are not the trace's."""
    for layer, (found, expected) in enumerate(zip(chosen, routing.chosen[token], strict=True)):
        if set(found) != set(expected):
            raise CaseFailed(
                f"token {token} chose the experts {sorted(found)} in MoE layer {layer}, the trace {sorted(expected)}: "
                f"make the file with benchmarks.random_gguf --trace and this trace"
            )


def replayed(routing: Routing, tokens: Tokens, slots: int, sizes: list[int]) -> dict[str, float]:
    """Bytes a measured token that LRU and Belady read with one pool of so many slots, on the same tokens. sizes: bytes
    of an expert of each MoE layer."""
    trace = routing.passes(tokens.prompt, [*tokens.before, *tokens.measured])
    trace.header = replace(trace.header, expert_bytes={run_bits(trace.header): sizes})
    for each in trace.passes[: 1 + len(tokens.before)]:
        each.phase = "prefill"  # counted apart
    bits = run_bits(trace.header)
    found = {name: hits_of(trace, name, slots, bits).decode for name in ("lru", "belady")}
    return {name: phase.bytes_read / len(tokens.measured) for name, phase in found.items()}


def row(case: Case, prompt: int, least: dict[str, float], beside: Case | None) -> dict[str, Any]:
    """The figures of a case: medians over the rounds, and of speed and time their spread. prompt: its
    tokens; least: what LRU and Belady read."""
    last = case.runs[-1]
    sizes = last["expert_bytes"]
    whole = last["all_slots"] / len(sizes) * sum(sizes)
    every, waiting, computing = case.median("ms"), case.median("wait_ms"), case.median("kernels_ms")
    found = {
        "case": case.name,
        "memory": case.memory,
        "preset": case.preset,
        "bits": last["bits"],
        "kernels": last["kernels"],
        "set": list(case.changes),
        "slots": last["slots"],
        "all_slots": last["all_slots"],
        "hit_rate": case.median("hits"),
        "ms": case.spread("ms"),
        "wait_ms": waiting,
        "computing_ms": computing,
        "deciding_ms": every - waiting - computing,
        "bytes_per_token": case.median("bytes"),
        **{f"{name}_bytes_per_token": each for name, each in least.items()},
        "drive_ms": 1000 * case.median("bytes") / case.median("bandwidth") if last["bandwidth"] else 0.0,
        "bandwidth": case.spread("bandwidth"),
        "resident_ms": case.spread("resident", "ms"),
        "prompt_ms": case.spread("prompt", "ms"),
        "prompt_passes": case.median("prompt", "bytes") * prompt / whole,
        "peak_memory_bytes": case.median("peak_memory_bytes"),
        "rounds": case.runs,
    }
    if beside is not None:
        found["ratio"] = spread([b["ms"] / a["ms"] for a, b in zip(case.runs, beside.runs, strict=True)])
    return found


HEAD = ["case", "slots", "hits", "tok/s", "ms: all", "waiting", "computing", "deciding", "MB read", "LRU", "Belady",
        "drive ms", "resident tok/s", "prompt tok/s", "passes", "times as fast"]  # fmt: skip


def cells(found: dict[str, Any]) -> list[str]:
    """A row of the table."""

    def per_second(ms: dict[str, float]) -> str:
        return shown({"median": 1000 / ms["median"], "low": 1000 / ms["high"], "high": 1000 / ms["low"]})

    megabytes = [found[f"{name}bytes_per_token"] / 1e6 for name in ("", "lru_", "belady_")]
    return [
        found["case"],
        f"{found['slots']} of {found['all_slots']}",
        f"{found['hit_rate']:.1%}",
        per_second(found["ms"]),
        *(number(found["ms"]["median"] if name == "ms" else found[name])
          for name in ("ms", "wait_ms", "computing_ms", "deciding_ms")),
        *map(number, megabytes),
        number(found["drive_ms"]),
        per_second(found["resident_ms"]),
        per_second(found["prompt_ms"]),
        number(found["prompt_passes"]),
        shown(found.get("ratio")),
    ]  # fmt: skip


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Each memory under each preset at each precision: as it is, and with all that `--set` changes."""
    changes = [(), tuple(args.set)] if args.set else [()]
    trees = [ROOT, *([args.beside.resolve()] if args.beside else [])]
    return [
        Case(memory, preset, bits, change, tree)
        for memory in args.memory
        for preset in args.preset or ["default"]
        for bits in args.bits or [None]
        for change in changes
        for tree in trees
    ]


def main() -> None:
    parser = parser_of(__doc__, rounds=1)
    parser.add_argument("model", type=Path, help="a file of benchmarks.random_gguf --trace")
    parser.add_argument("--trace", type=Path, required=True, help="the trace that the file was made with")
    parser.add_argument("--memory", action="append", required=True, help="as 4GiB; again for another")
    parser.add_argument("--preset", action="append", help="again for another (default: default)")
    parser.add_argument("--bits", type=int, action="append", choices=BITS, help="of the experts; 16: as in the file")
    parser.add_argument("--set", action="append", default=[], help="as prefetch=none: a second case with it")
    parser.add_argument("--tokens", type=at_least_one, default=120, help="decoded tokens (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=at_least_one, help="default: the trace's prompt")
    parser.add_argument("--beside", type=Path, metavar="TREE", help="a tree of another commit, built")
    parser.add_argument("--peer-python", help="interpreter that has llama-cpp-python, which runs the file too")
    args = parser.parse_args()
    try:
        document = run(args)
    except TiermoeError as error:
        sys.exit(f"full_size: {error}")
    print(json.dumps(document))
    print_table(HEAD, [cells(each) for each in document["rows"]])


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All rounds of all cases. TiermoeError where the file was not made with the trace, or a case fails."""
    routing = routing_for(args.trace, config_of(open_gguf(args.model)))
    tokens = tokens_of(routing, args.tokens, args.prompt_tokens)
    if not tokens.before:
        raise CaseFailed(f"--tokens {args.tokens} leaves nothing to measure; ask for 2 or more")
    cases = cases_of(args)
    for case in cases:
        require_kernels(args.without_kernels, case.tree / "src")
    for case in cases:
        if case.bits or PRESETS[case.preset].bits:
            first = measure(args.model, case, Tokens(tokens.prompt[:1], tokens.before[:1], tokens.measured[:1]))
            say(f"{case.name}: loaded for the first time in {first['load_s']:.1f} s")
    for number_, index in alternating(range(len(cases)), args.rounds):
        case = cases[index]
        case.runs.append(measure(args.model, case, tokens))
        chosen = case.runs[-1].pop("chosen")
        if not case.runs[-1]["lossy"]:
            check_routing(chosen, routing, tokens.measured[-1])
        say(f"round {number_ + 1}: {case.name}: {case.runs[-1]['ms']:.0f} ms a token")
    peers: dict[str, list[dict[str, Any]]] = {memory: [] for memory in args.memory if args.peer_python}
    for memory, runs in peers.items():
        for _ in range(args.rounds):
            runs.append(measure_peer(args.model, memory, tokens, args.peer_python))
            say(f"llama.cpp in {memory}: {runs[-1]['decode_tok_s']:.2f} tokens a second")
    rows = []
    for index, case in enumerate(cases):
        other = cases[index + 1] if args.beside and case.tree == ROOT else None
        last = case.runs[-1]
        least = replayed(routing, tokens, last["slots"], last["expert_bytes"])
        rows.append(row(case, len(tokens.prompt), least, other))
    return {**about(args.rounds), "model": str(args.model), "tokens": args.tokens, "rows": rows, LLAMA: peers}


if __name__ == "__main__":
    main()
